"""docs/learn/sources.md names every kernel of the registry, and none that is not there."""

import re
from pathlib import Path

import pytest

from outblas.core import registry

PAGE = Path(__file__).parents[2] / "docs" / "learn" / "sources.md"
KERNELS = {kernel.name: kernel for kernel in registry.ladder()}


@pytest.fixture(scope="module")
def named() -> set[str]:
    """Names of kernels on the page."""
    return set(re.findall(r"`((?:simt|turing|hopper)\.\w+|portable)`", PAGE.read_text("utf-8")))


def test_every_kernel_is_on_the_page(named: set[str]) -> None:
    assert named == set(KERNELS)


@pytest.mark.parametrize("document", ["000", "001", "002", "003", "004"])
def test_every_document_that_a_kernel_cites_has_a_section(document: str) -> None:
    assert any(document in kernel.source for kernel in KERNELS.values())
    assert f"\n## {document}: " in PAGE.read_text("utf-8")

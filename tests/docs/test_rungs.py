"""What the documents add to the page of a rung, and what a page proposes to try."""

import re

import pytest
from docs._ext import rungs
from support import pages

from outblas.base import configs, registry

NAMES = [kernel.name for kernel in registry.ladder()]
CONFIGS = [
    (name, text)
    for page in pages.pages()
    for block in pages.blocks(page)
    if block.language == "console"
    for name, text in re.findall(r"((?:simt|turing|hopper)\.\w+)\[(.*?)\]", block.text)
]


@pytest.mark.parametrize("name", NAMES)
def test_a_rung_has_a_page(name: str) -> None:
    page = rungs.LEARN / f"{name.replace('.', '/')}.md"

    assert f"<!-- rung: {name} -->" in page.read_text(encoding="utf-8")


@pytest.mark.compile  # imports the CuTe DSL
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("simt.shared", ("## Machine code", "| `block_k` | 1 | 32 |", "+def staged(")),
        ("turing.ldmatrix", ("It launches `staged` of `turing/shared.py`",)),
        ("hopper.hilbert", ("| 8192 | bfloat16 |  | 840.3 | 1.026", "| grouped | hilbert |")),
        ("hopper.lean_barriers", ("# LeanPipeline.arrival_counts, in place of Pipeline.arrival",)),
    ],
)
def test_a_page_shows_figures_config_code_and_diff(name: str, parts: tuple[str, ...]) -> None:
    text = rungs.text(registry.find(name))

    assert [part for part in parts if part not in text] == []


@pytest.mark.compile
@pytest.mark.parametrize(("name", "text"), CONFIGS)
def test_a_config_to_try_differs_from_the_rungs_own(name: str, text: str) -> None:
    default = registry.load(name).Config()

    assert configs.from_text(type(default), text) != default

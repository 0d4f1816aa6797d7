"""docs/environment-variables.md lists the variables that the source reads, and no other of ours."""

import re

import pytest
from support.paths import ROOT

PAGE = (ROOT / "docs" / "environment-variables.md").read_text(encoding="utf-8")
FOLDERS = ("src", "autotune", "hopper", "kernels", "turing")
READ = re.compile(r"environ(?:\.get\(|\.setdefault\(|\.pop\(|\[)\s*\"([A-Z_0-9]+)\"")


def read_by_the_source() -> set[str]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return {name for path in files for name in READ.findall(path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("name", sorted(read_by_the_source()))
def test_a_variable_that_is_read_is_on_the_page(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_no_variable_of_ours_is_on_the_page_that_nothing_reads() -> None:
    assert set(re.findall(r"OUTBLAS_[A-Z_]+", PAGE)) <= read_by_the_source()

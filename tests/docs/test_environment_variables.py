"""docs/environment-variables.md lists the variables that the source reads, and no other of ours."""

import re

import pytest
from support.paths import ROOT

PAGE = (ROOT / "docs" / "environment-variables.md").read_text(encoding="utf-8")
FOLDERS = ("src", "autotune", "hopper", "kernels", "turing")
_NAME = r"""["']([A-Z][A-Z0-9_]+)["']"""
_READ = re.compile(
    rf"environ(?:\.get|\.setdefault|\.pop)?[(\[]\s*{_NAME}|getenv\(\s*{_NAME}|"
    rf"{_NAME} in os\.environ"
)
_CONSTANT = re.compile(rf"^ENVIRONMENT = {_NAME}", re.MULTILINE)
_OURS = re.compile(r"OUTBLAS_[A-Z_]*[A-Z]")
SOURCES = [
    path.read_text(encoding="utf-8")
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
]
READ = {
    name
    for text in SOURCES
    for names in [*_READ.findall(text), _CONSTANT.findall(text)]
    for name in names
    if name
}
OURS = {name for text in SOURCES for name in _OURS.findall(text)}  # in code, messages or comments


def test_every_variable_of_ours_that_the_source_names_is_read() -> None:
    assert {name for name in READ if name.startswith("OUTBLAS_")} == OURS


@pytest.mark.parametrize("name", sorted(READ))
def test_a_variable_that_is_read_is_on_the_page(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_no_variable_of_ours_is_on_the_page_that_nothing_reads() -> None:
    assert {*_OURS.findall(PAGE)} <= OURS

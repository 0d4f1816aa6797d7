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


def read(text: str) -> set[str]:
    """The variables that a source reads or sets."""
    names = {name for groups in _READ.findall(text) for name in groups if name}
    return names | {*_CONSTANT.findall(text)}


READ = {name for text in SOURCES for name in read(text)}
OURS = {name for text in SOURCES for name in _OURS.findall(text)}  # in code, messages or comments


def section(name: str) -> str:
    """The text of the page about a variable of ours."""
    found = re.search(rf"^## {name}\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    return "" if found is None else found[1]


def test_every_variable_of_ours_that_the_source_names_is_read() -> None:
    assert {name for name in READ if name.startswith("OUTBLAS_")} == OURS


@pytest.mark.parametrize(
    "line",
    [
        'os.environ.get("X_Y")',
        "os.environ['X_Y'] = 1",
        'os.getenv("X_Y")',
        'if "X_Y" in os.environ:',
        'ENVIRONMENT = "X_Y"',
    ],
)
def test_a_variable_is_found_however_it_is_read(line: str) -> None:
    assert read(line) == {"X_Y"}


@pytest.mark.parametrize("name", sorted(READ))
def test_a_variable_that_is_read_is_on_the_page(name: str) -> None:
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("name", sorted(OURS))
def test_a_variable_of_ours_has_a_section_that_says_when_it_is_read(name: str) -> None:
    assert "- **Read**: " in section(name)


@pytest.mark.parametrize("name", sorted(OURS))
def test_a_variable_of_ours_has_an_example(name: str) -> None:
    assert re.search(r"^```(python|console)", section(name), re.MULTILINE)


def test_no_variable_of_ours_is_on_the_page_that_nothing_reads() -> None:
    assert {*_OURS.findall(PAGE)} <= OURS

"""README.md stays short, and its headline names both bases."""

import re

import pytest
from support import pages

README = (pages.ROOT / "README.md").read_text(encoding="utf-8")
MOST_LINES = 200


def headline(text: str) -> str:
    """The generated headline of a page; empty if it has none."""
    found = re.search(r"<!-- generated: headline [^>]*-->\n(.*?)<!-- end -->", text, re.DOTALL)
    return found[1] if found else ""


def test_readme_is_short() -> None:
    lines = README.count("\n")

    assert lines <= MOST_LINES


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
@pytest.mark.parametrize("base", ["`torch.mm`", "the best of cuBLASLt's algorithms"])
def test_the_headline_names_both_bases(base: str, page: str) -> None:
    text = (pages.ROOT / page).read_text(encoding="utf-8")

    assert base in headline(text)


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.name)
def test_no_table_stacks_lines_in_a_cell(page: pages.Path) -> None:
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]

    assert [row for row in rows if "<br" in row] == []


def test_readme_opens_with_a_chart() -> None:
    first_screen = "\n".join(README.splitlines()[:20])

    assert re.search(r"!\[[^]]+\]\(results/\w+\.svg\)", first_screen)

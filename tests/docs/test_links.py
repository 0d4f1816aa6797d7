"""Every link of a page leads somewhere; links to other sites are https."""

from pathlib import Path

import pytest
from support import links
from support.paths import ROOT


@pytest.mark.parametrize(
    "page", links.pages(), ids=lambda page: str(page.relative_to(ROOT).with_suffix(""))
)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    wrong = [f"{link}: {why}" for link in links.links(page) if (why := links.fault(link))]

    assert wrong == []


# ---- the check itself
def faults(folder: Path, text: str) -> list[str | None]:
    """What is wrong with the links of a page, beside which another page lies."""
    (folder / "other.md").write_text(
        "# Other\n\n## What it `does`, twice\n\n## Twice\n\n## Twice\n"
    )
    (folder / "code.py").write_text("a = 1\nb = 2\n")
    page = folder / "page.md"
    page.write_text(text)
    return [links.fault(link) for link in links.links(page)]


@pytest.mark.parametrize(
    "text",
    [
        "[a](other.md)",
        "[a](other.md#what-it-does-twice)",
        "[a](other.md#twice-1)",
        "[a](code.py#L2)",
        "[a](.)",
        "# Here\n[a](#here)",
        "(there)=\n[a](#there)",
        "[a](https://example.org/x)",
        "| a |\n|---|\n| [b](other.md) |",
    ],
)
def test_a_link_that_leads_somewhere_passes(text: str, tmp_path: Path) -> None:
    assert faults(tmp_path, text) == [None]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[a](none.md)", "there is no such file"),
        ("![a](none.svg)", "there is no such file"),
        ('<img src="none.svg">', "there is no such file"),
        ("[a](other.md#none)", "the page has no such heading"),
        ("[a](#none)", "the page has no such heading"),
        ("[a](code.py#L3)", "expected a line, as #L10"),
        ("[a](http://example.org)", "expected https"),
        ("| a |\n|---|\n| [b](none.md) |", "there is no such file"),
    ],
)
def test_a_link_that_leads_nowhere_is_named(text: str, fault: str, tmp_path: Path) -> None:
    assert faults(tmp_path, text) == [fault]


def test_code_has_no_links(tmp_path: Path) -> None:
    assert faults(tmp_path, "`[a](none.md)`\n\n```\n[a](none.md)\n```\n") == []

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


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[a](other.md#twice-1)", None),
        ("[a](none.md)", "there is no such file"),
        ('<img src="none.svg">', "there is no such file"),
        ("[a](other.md#none)", "the page has no such heading"),
        ("[a](http://example.org)", "expected https"),
    ],
)
def test_a_link_that_leads_nowhere_is_named(text: str, fault: str | None, tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Other\n\n## Twice\n\n## Twice\n")
    page = tmp_path / "page.md"
    page.write_text(text)

    assert [links.fault(link) for link in links.links(page)] == [fault]

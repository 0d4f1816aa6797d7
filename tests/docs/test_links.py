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

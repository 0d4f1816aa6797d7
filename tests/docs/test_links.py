"""Every link of a page leads somewhere; links to other sites are https."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from support.paths import ROOT

_TAG = re.compile(r'\b(?:href|src|srcset)="([^"]*)"')
_TARGET = re.compile(r"^\(([\w-]+)\)=\s*$", re.M)  # MyST's name of a place
_LINES = re.compile(r"L(\d+)(?:-L(\d+))?")
_NOT_IN_SLUGS = re.compile(r"[^\w\- ]")
_parser = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Link:
    """An address in a page, and the line where it stands."""

    page: Path
    line: int
    to: str

    def __str__(self) -> str:
        where = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page.name
        return f"{where}:{self.line}: {self.to}"


def pages() -> list[Path]:
    """Every page that has links for readers."""
    beside = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "WORKLOG.md")
    paths = [ROOT / name for name in beside]
    paths += [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    return sorted(path for path in paths if path.exists())


def links(page: Path) -> Iterator[Link]:
    """The links and pictures of a page, those of HTML tags too; code has none."""
    for token in _parser.parse(page.read_text(encoding="utf-8")):
        line = token.map[0] + 1 if token.map else 0
        for part in [token, *(token.children or ())]:
            if part.type in ("html_block", "html_inline"):
                yield from (Link(page, line, to) for to in _TAG.findall(part.content))
            for name in ("href", "src"):
                if to := part.attrGet(name):
                    yield Link(page, line, str(to))


def fault(link: Link) -> str | None:
    """Why a link leads nowhere, or None. Other sites are not asked."""
    if re.match(r"[a-z]+:", link.to):
        return None if link.to.startswith(("https://", "mailto:")) else "expected https"
    path, _, anchor = link.to.partition("#")
    target = (link.page.parent / path).resolve() if path else link.page
    if not target.exists():
        return "there is no such file"
    if not anchor:
        return None
    if target.suffix == ".md":
        return None if anchor in anchors(target) else "the page has no such heading"
    return None if _is_line(target, anchor) else "expected a line, as #L10"


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page: of its headings, as GitHub and MyST make them, and MyST's targets."""
    text = page.read_text(encoding="utf-8")
    tokens = _parser.parse(text)
    slugs: list[str] = []
    for heading, content in pairwise(tokens):
        if heading.type == "heading_open":
            slug = _slug("".join(part.content for part in content.children or ()))
            count = sum(
                re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in slugs
            )
            slugs.append(f"{slug}-{count}" if count else slug)
    return frozenset({*slugs, *_TARGET.findall(text)})


def _slug(heading: str) -> str:
    return _NOT_IN_SLUGS.sub("", heading.strip().lower()).replace(" ", "-")


def _is_line(file: Path, anchor: str) -> bool:
    lines = _LINES.fullmatch(anchor)
    if not lines or not file.is_file():
        return False
    last = int(lines[2] or lines[1])
    return last <= len(file.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize(
    "page", pages(), ids=lambda page: str(page.relative_to(ROOT).with_suffix(""))
)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    wrong = [f"{link}: {why}" for link in links(page) if (why := fault(link))]

    assert wrong == []

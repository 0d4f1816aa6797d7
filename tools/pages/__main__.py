"""Makes the generated parts of README.md and of the pages below docs/ from the files of results/.

    python -m tools.pages            # make all anew, and name what changed
    python -m tools.pages --check    # change nothing, and fail where anything is out of date

A part reads `<!-- generated: KIND ARGUMENT from FILE,FILE -->` … `<!-- end -->`; files are relative
to the root of the checkout. `TEXTS` has the kinds. Parts in `FIGURES` show a picture, which is
drawn too: the last word of their argument is its file, and it carries the digest of its data.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from outblas.bench import plotting
from tools.pages import (
    accesses,
    campaign_chart,
    campaigns,
    grouped,
    kernels,
    ladder,
    raster,
    tuned,
)
from tools.pages.results import Results, load

ROOT = Path(__file__).parents[2]
PART = re.compile(
    r"(<!-- generated: (?P<what>[^>]*?) from (?P<files>[^>]*?) -->\n)(?P<body>.*?)(<!-- end -->)",
    re.DOTALL,
)
# The text of a part by its kind, from the results and the argument.
TEXTS: dict[str, Callable[[Results, str], str]] = {
    "suite": campaigns.suite,
    "headline": campaigns.headline,
    "cold": campaigns.cold,
    "layers": campaigns.layers,
    "sustained": campaigns.sustained,
    "fp8": campaigns.fp8,
    "invariance": campaigns.invariance,
    "grouped": grouped.tables,
    "grouped-means": grouped.means,
    "ladder": ladder.tables,
    "timings": kernels.timings,
    "phases": kernels.phases,
    "conflicts": accesses.conflict_table,
    "coalescing": accesses.coalescing_table,
    "raster": raster.tables,
    "tuned": tuned.part,
    "chart": campaign_chart.link,
    "climb": ladder.link,
    "orders": raster.link,
}
# The figure of a part that is drawn, from the results and the argument without the picture's file.
FIGURES: dict[str, Callable[[Results, str], Figure]] = {
    "chart": campaign_chart.draw,
    "climb": ladder.draw,
    "orders": raster.draw,
}


@dataclass(frozen=True)
class Part:
    """A generated part of a page, as its opening marker describes it."""

    kind: str
    argument: str
    files: tuple[str, ...]

    @staticmethod
    def of(marker: re.Match[str]) -> Part:
        """The part of a marker. Raises ValueError for a kind that does not exist."""
        kind, _, argument = marker["what"].partition(" ")
        if kind not in TEXTS:
            raise ValueError(f"a part is a {kind!r}, expected {', '.join(TEXTS)}")
        return Part(kind, argument, tuple(name.strip() for name in marker["files"].split(",")))

    @property
    def picture(self) -> str:
        """The picture's file, "" for a part without one."""
        return self.argument.rpartition(" ")[2] if self.kind in FIGURES else ""

    def text(self, root: Path, folder: Path) -> str:
        """The text for a page in a folder, to which links to pictures are relative."""
        text = TEXTS[self.kind](self.results(root), self.argument)
        if self.picture:
            link = os.path.relpath(root / self.picture, folder)
            text = text.replace(f"]({self.picture})", f"]({link})")
        return text

    def draw(self, root: Path) -> None:
        """Draws the picture."""
        figure = FIGURES[self.kind](self.results(root), self.argument.rpartition(" ")[0])
        plotting.save(figure, root / self.picture, note=self.digest(root))

    def results(self, root: Path) -> Results:
        """What the part's files hold."""
        return load(root / name for name in self.files)

    def digest(self, root: Path) -> str:
        """The digest of a picture's data, which the picture has in its metadata."""
        data = b"".join((root / name).read_bytes() for name in self.files)
        return f"data sha256 {hashlib.sha256(data).hexdigest()[:16]}"


def markers(path: Path, text: str) -> list[re.Match[str]]:
    """The parts of a page. Raises ValueError where a marker is malformed."""
    matches = list(PART.finditer(text))
    if len(matches) != text.count("<!-- generated:"):
        raise ValueError(
            f"{path}: a generated part is not of the form "
            "<!-- generated: KIND from FILES --> … <!-- end -->"
        )
    return matches


def render(root: Path = ROOT, *, check: bool = False) -> list[str]:
    """Makes every page and picture anew, and returns those that changed; with `check` none is
    written. Nothing is written unless every part can be made.

    Raises ValueError that names the page where a part cannot be made.
    """
    texts: dict[Path, str] = {}
    pictures: dict[Path, Part] = {}
    for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        matches = markers(path, text)
        try:
            parts = [Part.of(match) for match in matches]
            bodies = iter([part.text(root, path.parent) for part in parts])
        except (KeyError, OSError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
        pictures |= {root / part.picture: part for part in parts if part.picture}
        body_of = PART.sub(lambda match: match[1] + next(bodies) + match[5], text)  # noqa: B023
        if body_of != text:
            texts[path] = body_of
    stale = [
        path
        for path, part in pictures.items()
        if not path.is_file() or part.digest(root) not in path.read_text(encoding="utf-8")
    ]
    if not check:
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        for part in pictures.values():
            part.draw(root)
    return [path.relative_to(root).as_posix() for path in (*texts, *stale)]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.pages", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where stale")
    check = parser.parse_args().check
    changed = render(check=check)
    for name in changed:
        print(f"{name}: {'out of date: run make pages' if check else 'made anew'}")
    sys.exit(1 if check and changed else 0)


if __name__ == "__main__":
    main()

"""The generated parts of README.md and of the pages below docs/: tables and charts between markers,
made from the files in `results/`.

A part reads `<!-- generated: KIND ARGUMENT from FILE,FILE -->` … `<!-- end -->`. FILES are relative
to the root of the checkout, and so is the file of a picture: the link to it is made relative to the
page. `readme_parts.TEXTS` has the kinds and says what argument each takes. Parts in
`readme_parts.FIGURES` have a picture that is drawn too and carries the digest of its data.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..bench import plotting
from ..core import progress
from . import evidence
from .readme_parts import FIGURES, NOT_YET, TABLES, TEXTS
from .results import ROOT, in_checkout

_PART = re.compile(
    r"(<!-- generated: (?P<what>[^>]*?) from (?P<files>[^>]*?) -->\n)(?P<body>.*?)(<!-- end -->)",
    re.DOTALL,
)
_OPENING = "<!-- generated:"
_SEAL = "<!-- drawn by outblas report readme, sha256 "


@dataclass(frozen=True)
class Part:
    """A generated part of a page, as its opening marker describes it."""

    kind: str
    argument: str
    files: tuple[str, ...]

    @classmethod
    def of(cls, marker: re.Match[str]) -> "Part":
        kind, _, argument = marker["what"].partition(" ")
        return cls(kind, argument, tuple(name.strip() for name in marker["files"].split(",")))

    @property
    def picture(self) -> str | None:
        """The file of the picture that is drawn for this part; None if there is none."""
        return self.argument.rpartition(" ")[2] if self.kind in FIGURES else None

    @property
    def subject(self) -> str:
        """The argument without the file of the picture."""
        return self.argument.rpartition(" ")[0] if self.kind in FIGURES else self.argument

    def paths(self, root: Path) -> list[Path]:
        """The files with the data."""
        return [root / name for name in self.files]


@dataclass(frozen=True)
class Page:
    """A page in a checkout, by its path from the root, with its text."""

    name: str
    text: str

    def parts(self) -> list[Part]:
        """The generated parts in order. Raises ValueError where a marker is malformed."""
        parts = [Part.of(marker) for marker in _PART.finditer(self.text)]
        if len(parts) != self.text.count(_OPENING):
            raise ValueError(
                f"{self.name}: a generated part is not of the form "
                "<!-- generated: KIND from FILES --> … <!-- end -->"
            )
        return parts

    def rendered(self, root: Path) -> str:
        """The text with every part made anew."""
        made = iter(
            [self._made(root, part) for part in progress.counted(self.parts(), lambda p: p.kind)]
        )
        return _PART.sub(lambda marker: marker[1] + next(made) + marker[5], self.text)

    def _made(self, root: Path, part: Part) -> str:
        try:
            if part.kind in TABLES:
                return TABLES[part.kind](part.paths(root)[0], part.argument)
            if part.kind in TEXTS:
                paths = part.paths(root)
                if part.kind in NOT_YET:
                    paths = [path for path in paths if path.exists()]
                    if not paths:
                        return NOT_YET[part.kind]
                made = TEXTS[part.kind](evidence.load(paths), part.argument)
                return self._with_link(made, part.picture)
        except ValueError as error:
            raise ValueError(f"{self.name}: {part.kind}: {error}") from error
        known = ", ".join((*TEXTS, *TABLES))
        raise ValueError(
            f"{self.name}: a generated part is a {part.kind!r}, expected one of {known}"
        )

    def _with_link(self, made: str, picture: str | None) -> str:
        """The text of a part, where the link to its picture is relative to the page."""
        if picture is None:
            return made
        link = os.path.relpath(picture, Path(self.name).parent)
        return made.replace(f"]({picture})", f"]({Path(link).as_posix()})")


def render(root: Path = ROOT) -> list[str]:
    """Make every page and picture anew, and return those that changed.

    No page is written unless every part of every page can be made.

    Args:
        root: The root of a checkout.

    Raises:
        ValueError: A part cannot be made, or `root` is no checkout.
    """
    pages = _pages(root)
    made = {page.name: page.rendered(root) for page in progress.counted(pages, _name)}
    pictures = _pictures(root, pages)
    drawn = [name for name, part in pictures.items() if _draw(root, part, name)]
    changed = [page.name for page in pages if made[page.name] != page.text]
    for name in changed:
        (root / name).write_text(made[name], encoding="utf-8")
    return changed + drawn


def stale(root: Path = ROOT) -> list[str]:
    """Return the pages and pictures that differ from what `results/` makes of them.

    Args:
        root: The root of a checkout.

    Raises:
        ValueError: A part cannot be made, or `root` is no checkout.
    """
    pages = _pages(root)
    changed = [
        page.name for page in progress.counted(pages, _name) if page.rendered(root) != page.text
    ]
    return changed + [
        picture
        for picture, part in _pictures(root, pages).items()
        if not _is_current(root, picture, part.files)
    ]


def _name(page: Page) -> str:
    return page.name


def _pages(root: Path) -> list[Page]:
    """README.md and every page below docs/."""
    if not in_checkout(root):
        raise ValueError(f"{root} is no checkout of outblas: README.md is made there")
    return [
        Page(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
        for path in _paths(root)
    ]


def _paths(root: Path) -> Iterator[Path]:
    yield root / "README.md"
    yield from sorted((root / "docs").rglob("*.md"))


def _pictures(root: Path, pages: Iterable[Page]) -> dict[str, Part]:
    """The part that describes each picture, by the picture's file. Raises ValueError where two
    pages make one picture from different data.
    """
    found: dict[str, Part] = {}
    for page in pages:
        for part in page.parts():
            if part.picture is None:
                continue
            if found.setdefault(part.picture, part) != part:
                raise ValueError(
                    f"{page.name}: {part.picture} is drawn from {', '.join(part.files)}, but "
                    f"another part draws it from {', '.join(found[part.picture].files)}"
                )
    return found


def _draw(root: Path, part: Part, picture: str) -> bool:
    """Draws a picture, and says whether that changed its file."""
    path = root / picture
    plotting.check_chart(path)
    before = path.read_bytes() if path.is_file() else b""
    found = evidence.load(part.paths(root))
    if not (found.measurements or found.profiles):
        raise ValueError(f"{', '.join(part.files)}: no results, expected some to draw")
    figure = FIGURES[part.kind](found, part.subject)
    plotting.save(figure, path, note=_digest(root, part.files))
    with path.open("a", encoding="utf-8") as file:
        file.write(_seal(path.read_text(encoding="utf-8")))
    return path.read_bytes() != before


def _is_current(root: Path, name: str, files: Iterable[str]) -> bool:
    """Whether a chart is whole, as it was drawn, and drawn from these files."""
    text = (root / name).read_text(encoding="utf-8") if (root / name).is_file() else ""
    body, mark, rest = text.rpartition(_SEAL)
    return _digest(root, files) in body and _seal(body) == mark + rest


def _seal(text: str) -> str:
    return f"{_SEAL}{hashlib.sha256(text.encode()).hexdigest()} -->\n"


def _digest(root: Path, files: Iterable[str]) -> str:
    data = b"".join((root / name).read_bytes() for name in files)
    return f"data sha256 {hashlib.sha256(data).hexdigest()[:16]}"

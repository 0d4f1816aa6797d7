"""The generated parts of README.md: tables and charts between markers, made from the files in
`results/`.

A part reads `<!-- generated: KIND from results/A.json,results/B.json -->` … `<!-- end -->`; a
ladder takes files of `outblas profile` too. KIND is `suite`, `cold PROVIDER`, `sustained`,
`ladder NAME`, `ladder NAME N,N`, `sizes KERNEL`, `layouts KERNEL`, `phases`, `raster N`,
`conflicts`, `coalescing`, or one whose picture is drawn too: `chart results/FILE.svg`, `climb NAME
results/FILE.svg`, `orders N results/FILE.svg`. A picture carries the digest of its data. `tuned`
takes a shipped table of `autotune/tables/`.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..bench import plotting
from . import evidence
from .readme_parts import FIGURES, TEXTS
from .results import ROOT, in_checkout
from .tuning import shipped

_PART = re.compile(
    r"(<!-- generated: (?P<what>[^>]*?) from (?P<files>[^>]*?) -->\n)(?P<body>.*?)(<!-- end -->)",
    re.DOTALL,
)
_OPENING = "<!-- generated"
_SEAL = "<!-- drawn by outblas report readme, sha256 "
_TUNED = "tuned"


@dataclass(frozen=True)
class Part:
    """A generated part of README.md, as its opening marker describes it."""

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

    def paths(self, root: Path) -> list[Path]:
        """The files with the data."""
        return [root / name for name in self.files]


def render(root: Path = ROOT) -> list[str]:
    """Rewrites README.md and its charts; returns what was out of date. Raises ValueError for a part
    that cannot be made.
    """
    text = _text(root)
    made = _rendered(root, text)
    changed = _outdated(root, text, made)
    for part in _parts(text):
        if part.picture is not None:
            _draw(root, part, part.picture)
    (root / "README.md").write_text(made, encoding="utf-8")
    return changed


def stale(root: Path = ROOT) -> list[str]:
    """The files, README.md and charts, that differ from what `results/` makes of them. Raises
    ValueError as `render`.
    """
    text = _text(root)
    return _outdated(root, text, _rendered(root, text))


def _text(root: Path) -> str:
    if not in_checkout(root):
        raise ValueError(f"{root} is no checkout of outblas: README.md is made there")
    return (root / "README.md").read_text(encoding="utf-8")


def _parts(text: str) -> list[Part]:
    parts = [Part.of(marker) for marker in _PART.finditer(text)]
    if len(parts) != text.count(_OPENING):
        raise ValueError(
            "README.md: a generated part is not of the form <!-- generated: KIND from FILES --> … "
            "<!-- end -->"
        )
    return parts


def _rendered(root: Path, text: str) -> str:
    """The README's text with every part made anew."""
    made = iter([_made(root, part) for part in _parts(text)])
    return _PART.sub(lambda marker: marker[1] + next(made) + marker[5], text)


def _made(root: Path, part: Part) -> str:
    if part.kind == _TUNED:
        return shipped.table(part.paths(root)[0])
    if part.kind not in TEXTS:
        known = ", ".join((*TEXTS, _TUNED))
        raise ValueError(f"README.md: a generated part is a {part.kind!r}, expected one of {known}")
    return TEXTS[part.kind](evidence.load(part.paths(root)), part.argument)


def _outdated(root: Path, text: str, made: str) -> list[str]:
    found = [] if made == text else ["README.md"]
    return found + [
        part.picture
        for part in _parts(text)
        if part.picture is not None and not _is_current(root, part.picture, part.files)
    ]


def _draw(root: Path, part: Part, picture: str) -> None:
    path = root / picture
    plotting.check_chart(path)
    found = evidence.load(part.paths(root))
    if not (found.measurements or found.profiles):
        raise ValueError(f"{', '.join(part.files)}: no results, expected some to draw")
    subject = part.argument.partition(" ")[0]
    figure = FIGURES[part.kind](found, subject)
    plotting.save(figure, path, note=_digest(root, part.files))
    with path.open("a", encoding="utf-8") as file:
        file.write(_seal(path.read_text(encoding="utf-8")))


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

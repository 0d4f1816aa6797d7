"""Generated parts: where they stand on the pages, and what makes each."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from . import commands, configs, operators

REFERENCE = Path(__file__).parents[1] / "reference"

_PART = re.compile(
    r"(?P<opening><!-- written by make pages: (?P<name>[^>]*?) -->\n)(?P<body>.*?)"
    r"(?P<closing><!-- end -->)",
    re.DOTALL,
)
_PARTS: dict[str, Callable[[], str]] = {
    "list of commands": commands.overview,
    "commands": commands.details,
    "operators": operators.schemas,
    **{f"fields of {ladder}": configs.fields_of(ladder) for ladder in configs.LADDERS},
    **{f"rungs of {ladder}": configs.rungs_of(ladder) for ladder in configs.LADDERS},
}


def pages() -> dict[str, str]:
    """The pages that have generated parts, by name, with these parts as they are now."""
    found = {}
    for path in sorted(REFERENCE.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if _PART.search(text):
            found[path.name] = renewed(text)
    return found


def renewed(text: str) -> str:
    """A page with its parts as they are now. Raises ValueError for a part that nothing makes."""

    def made(part: re.Match[str]) -> str:
        if part["name"] not in _PARTS:
            raise ValueError(f"a part is {part['name']!r}, expected one of {', '.join(_PARTS)}")
        return f"{part['opening']}\n{_PARTS[part['name']]()}\n\n{part['closing']}"

    return _PART.sub(made, text)

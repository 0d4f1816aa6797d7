"""Markdown: tables, and text that is written elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_OPTION = re.compile(r"(?<![\w`-])--?[a-z][\w-]*(?![\w`-])")
_CODE = re.compile(r"(`[^`]+`)")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, one line a row; "" without rows."""
    rows = list(rows)
    if not rows:
        return ""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def cell(text: str) -> str:
    """Text of a cell: in one line, with no bar that would end it."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """The text as code; "" for none."""
    return f"`{text}`" if text else ""


def prose(text: str) -> str:
    """Plain text as Markdown: options as code, and no character that Markdown would take for
    markup. What is code already stays.
    """
    parts = _CODE.split(text)
    return "".join(
        part if part.startswith("`") else _OPTION.sub(r"`\g<0>`", _escaped(part)) for part in parts
    )


def _escaped(text: str) -> str:
    return re.sub(r"[*_<>\[\]]", r"\\\g<0>", text)

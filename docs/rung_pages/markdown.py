"""Markdown: paragraphs, tables, links, blocks."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

WIDTH = 100  # columns of a line of text


def fill(text: str, indent: str = "") -> str:
    """The text in lines of WIDTH columns, broken between words; `indent` begins all but the
    first.
    """
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def join(parts: Iterable[str]) -> str:
    """The parts that are not empty, with a blank line between them."""
    return "\n\n".join(filter(None, parts))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; "" without rows."""
    rows = list(rows)
    if not rows:
        return ""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def block(language: str, text: str) -> str:
    """A fenced block."""
    return f"```{language}\n{text}\n```"


def link(text: str, target: Path, page: Path) -> str:
    """A link from a page to a file."""
    return f"[{text}]({relative(target, page)})"


def relative(target: Path, page: Path) -> str:
    """The path of a file from the folder of a page."""
    return os.path.relpath(target.resolve(), page.resolve().parent).replace(os.sep, "/")


def sentence(text: str) -> str:
    """The text with a capital at its beginning."""
    return text[0].upper() + text[1:]


def listed(words: Sequence[str]) -> str:
    """The words as a sentence lists them: "a, b and c"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last

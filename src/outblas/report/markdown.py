"""Tables of pages in Markdown, and the sentence under a table that says how its figures came."""

from collections.abc import Iterable, Sequence

from . import page
from .results import Measurement


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table whose first column is code. A heading stands on one line."""
    heads = [_on_one_line(heading) for heading in columns]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return lines + [f"| {' | '.join((f'`{first}`', *rest))} |" for first, *rest in rows]


def without(
    column: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]], str | None]:
    """A table without a column whose cells are all alike, and what those cells say; the table as it
    is, and None, where they differ.
    """
    heads = [_on_one_line(heading) for heading in columns]
    place = heads.index(column)
    found = {row[place] for row in rows}
    if len(found) != 1:
        return heads, [list(row) for row in rows], None
    kept = [[cell for i, cell in enumerate(row) if i != place] for row in rows]
    return heads[:place] + heads[place + 1 :], kept, found.pop()


def closed(lines: Sequence[str], measurements: Sequence[Measurement], note: str) -> str:
    """The lines of a part, then its conditions: dtypes, layouts, the way of timing, the GPU and the
    versions.
    """
    kinds = dict.fromkeys((m.dtype, m.layout) for m in measurements)
    dtypes, layouts = (listed(dict.fromkeys(of)) for of in zip(*kinds, strict=True))
    where = "; ".join(page.environment_notes(m.environment for m in measurements))
    return "\n".join([*lines, "", f"{dtypes}, {layouts}, {note}. {where}."]) + "\n"


def listed(words: Iterable[str]) -> str:
    """The words as a sentence lists them: "a, b and c"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _on_one_line(heading: str) -> str:
    return " ".join(heading.replace("_\n", "_").split())

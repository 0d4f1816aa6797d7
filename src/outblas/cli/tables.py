"""Tables that read well in a terminal of any width.

A column is never narrower than its longest word, so that no number is split. Where the columns do
not fit side by side, a table of many rows is split: the columns that fit come first, the others
follow in tables below, each of which begins with the columns that say what a row is about. A table
of few rows, or one that would be split too often, is stacked: each row becomes a block with a line
for each column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outblas.base.terminal import printable

BORDER = 3  # characters of a column's border and of the blanks beside its cells
FEW_ROWS = 2  # that are stacked rather than split
MOST_PARTS = 4  # that a table is split into

Rows = Sequence[Sequence[str]]  # of a table, the names of its columns first


def make_table(
    title: str,
    columns: Iterable[str],
    rows: Iterable[Iterable[object]],
    width: int,
    *,
    keys: int = 1,
) -> RenderableType:
    """A table for a terminal that is `width` characters wide. Cells are shown as they are, not as
    markup.

    keys: how many columns, from the left, say what a row is about.
    """
    cells = [[printable(str(cell), keep="\n") for cell in row] for row in (list(columns), *rows)]
    heading = Text(printable(title, keep="\n"), style="bold")
    parts = split_columns(cells, width, keys)
    if parts is None or (len(parts) > 1 and len(cells) <= 1 + FEW_ROWS):
        return Group(heading, _stacked(cells))
    views = [_side_by_side(_columns(cells, part), width) for part in parts]
    return Group(heading, *views)


def split_columns(rows: Rows, width: int, keys: int) -> list[list[int]] | None:
    """The columns of each part of a table, by index: the first `keys` columns, then as many others
    as fit. None where a column does not fit beside the keys, or where the parts are too many.
    """
    keys = min(keys, len(rows[0]))
    parts = [list(range(keys))]
    for index in range(keys, len(rows[0])):
        if column_widths(_columns(rows, [*parts[-1], index]), width) is None:
            parts.append(list(range(keys)))
        parts[-1].append(index)
    fits = all(column_widths(_columns(rows, part), width) for part in parts)
    return parts if fits and len(parts) <= MOST_PARTS else None


def _columns(rows: Rows, indices: Sequence[int]) -> Rows:
    return [[row[index] for index in indices] for row in rows]


def column_widths(rows: Rows, width: int) -> list[int] | None:
    """How wide each column is, None where the columns do not fit with all words whole. What room is
    left is shared out in equal parts to the columns that want more.
    """
    columns = list(zip(*rows, strict=True))
    widths = [
        max(cell_len(word) for word in " ".join(column).split() or [""]) for column in columns
    ]
    wanted = [max(map(cell_len, "\n".join(column).split("\n"))) for column in columns]
    room = width - len(columns) * BORDER - 1 - sum(widths)
    if room < 0:
        return None
    by_need = sorted(range(len(columns)), key=lambda index: wanted[index] - widths[index])
    for sharing, index in zip(range(len(columns), 0, -1), by_need, strict=True):
        more = min(wanted[index] - widths[index], room // sharing)
        widths[index] += more
        room -= more
    return widths


def _side_by_side(rows: Rows, width: int) -> Table:
    """The columns beside each other, which fit."""
    view = Table()
    for name, size in zip(rows[0], column_widths(rows, width) or (), strict=True):
        view.add_column(Text(name), width=size, overflow="fold")
    for row in rows[1:]:
        # A row of its own for each line: lines stay beside each other where one of them wraps.
        for line in zip_longest(*(cell.split("\n") for cell in row), fillvalue=""):
            view.add_row(*map(Text, line))
    return view


def _stacked(rows: Rows) -> Table:
    """A block a row: the name of each column beside its cell. What is empty is left out."""
    view = Table(show_header=False)
    view.add_column(no_wrap=True, style="dim")
    view.add_column(overflow="fold")
    for row in rows[1:]:
        for name, cell in zip(rows[0], row, strict=True):
            if cell:
                view.add_row(Text(name), Text(cell))
        view.add_section()
    return view

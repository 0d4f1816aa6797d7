"""Tables that read well in a terminal of any width.

A column is never narrower than its longest word, so that no number is split. Where the columns do
not fit side by side, each row becomes a block with a line for each column.
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


def make_table(
    title: str, columns: Iterable[str], rows: Iterable[Iterable[object]], width: int
) -> RenderableType:
    """A table for a terminal that is `width` characters wide. Cells are shown as they are, not as
    markup.
    """
    names, *cells = [[printable(str(cell), keep="\n") for cell in row] for row in (columns, *rows)]
    widths = _column_widths([names, *cells], width)
    view = _stacked(names, cells) if widths is None else _side_by_side(names, cells, widths)
    return Group(Text(printable(title, keep="\n"), style="bold"), view)


def _column_widths(rows: Sequence[Sequence[str]], width: int) -> list[int] | None:
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


def _side_by_side(names: list[str], rows: Iterable[list[str]], widths: Iterable[int]) -> Table:
    """The columns beside each other, which fit."""
    view = Table()
    for name, width in zip(names, widths, strict=True):
        view.add_column(Text(name), width=width, overflow="fold")
    for row in rows:
        # A row of its own for each line: lines stay beside each other where one of them wraps.
        for line in zip_longest(*(cell.split("\n") for cell in row), fillvalue=""):
            view.add_row(*map(Text, line))
    return view


def _stacked(names: list[str], rows: Iterable[list[str]]) -> Table:
    """A block a row: the name of each column beside its cell. What is empty is left out."""
    view = Table(show_header=False)
    view.add_column(no_wrap=True, style="dim")
    view.add_column(overflow="fold")
    for row in rows:
        for name, cell in zip(names, row, strict=True):
            if cell:
                view.add_row(Text(name), Text(cell))
        view.add_section()
    return view

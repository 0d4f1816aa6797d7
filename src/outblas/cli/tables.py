"""Tables that read well in a terminal of any width.

A column is never narrower than its longest word, so that no number is split. Where all columns do
not fit side by side, a table of many rows is split: the columns that fit come first, the others
follow in tables below, and each of these begins with the columns that say what a row is about. A
table of few rows, or one that would be split too often, is stacked: each row becomes a block with
a line for each column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..core.terminal import printable

BORDER = 1  # columns of a terminal beside each cell, and at the end
PADDING = 2  # blanks of each cell
FEW_ROWS = 2  # that are stacked rather than split
MOST_PARTS = 4  # that a table is split into
MOST_LINES = 3  # of a cell in a table that is split; longer texts read better in a stack

Cells = list[list[str]]  # rows of a table


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
    names = [_plain(name) for name in columns]
    cells = [[_plain(str(cell)) for cell in row] for row in rows]
    heading = Text(_plain(title), style="bold")
    if column_widths([names, *cells], width) is not None:
        return Group(heading, _side_by_side(names, cells, width))
    parts = _parts(names, cells, width, keys) if len(cells) > FEW_ROWS else None
    if parts is None:
        return Group(heading, _stacked(names, cells))
    return Group(heading, *(_side_by_side(part[0], part[1:], width) for part in parts))


def _parts(names: list[str], cells: Cells, width: int, keys: int) -> list[Cells] | None:
    """The tables that a table is split into, each with its names first; None where it cannot be
    split. Rows are numbered where their keys do not tell them apart.
    """
    rows = [names, *cells]
    if len({tuple(row[:keys]) for row in cells}) < len(cells):
        numbers = ["#", *(str(number) for number in range(1, len(cells) + 1))]
        rows = [[number, *row] for number, row in zip(numbers, rows, strict=True)]
        keys += 1
    parts = split_columns(rows, width, keys)
    if parts is None:
        return None
    return [[[row[i] for i in part] for row in rows] for part in parts]


def column_widths(rows: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """How wide each column is, None where the columns do not fit with all words whole.

    rows: what the columns have, their names first.
    width: of the terminal, in characters.
    """
    columns = list(zip(*rows, strict=True))
    least = [max(map(_longest_word, column)) for column in columns]
    wanted = [max(map(_longest_line, column)) for column in columns]
    room = width - len(columns) * (BORDER + PADDING) - BORDER - sum(least)
    if room < 0:
        return None
    return _shared_out(least, wanted, room)


def split_columns(rows: Sequence[Sequence[str]], width: int, keys: int) -> list[list[int]] | None:
    """The columns of each part of a table that is split, by index: the first `keys` columns, then
    as many others as fit. None where a column does not fit beside the keys, where the parts are too
    many, or where a cell would have too many lines.
    """
    key_columns, count = list(range(keys)), len(rows[0])
    parts: list[list[int]] = []
    rest = list(range(keys, count))
    while rest:
        taken = next(
            (
                size
                for size in range(len(rest), 0, -1)
                if _reads_well(rows, [*key_columns, *rest[:size]], width)
            ),
            0,
        )
        if not taken or len(parts) == MOST_PARTS:
            return None
        parts.append([*key_columns, *rest[:taken]])
        rest = rest[taken:]
    return parts


def _reads_well(rows: Sequence[Sequence[str]], part: Sequence[int], width: int) -> bool:
    chosen = [[row[i] for i in part] for row in rows]
    widths = column_widths(chosen, width)
    return widths is not None and all(
        cell_len(line) <= MOST_LINES * size
        for row in chosen
        for cell, size in zip(row, widths, strict=True)
        for line in cell.split("\n")
    )


def _shared_out(least: list[int], wanted: list[int], room: int) -> list[int]:
    """The columns' least widths, with the room that is left given to those that want most of it in
    equal parts: no column gets more than it wants.
    """
    widths = list(least)
    while room > 0:
        narrow = [i for i, size in enumerate(widths) if size < wanted[i]]
        if not narrow:
            break
        part = max(1, room // len(narrow))
        for i in narrow:
            more = min(part, wanted[i] - widths[i], room)
            widths[i] += more
            room -= more
    return widths


def _side_by_side(names: list[str], cells: Cells, width: int) -> Table:
    """The columns beside each other, which fit."""
    view = Table()
    for name, size in zip(names, column_widths([names, *cells], width) or (), strict=True):
        view.add_column(Text(name), width=size, overflow="fold")
    for row in cells:
        # A row of its own for each line: lines stay beside each other where one of them wraps.
        for line in zip_longest(*(cell.split("\n") for cell in row), fillvalue=""):
            view.add_row(*map(Text, line))
    return view


def _stacked(names: list[str], cells: Cells) -> Table:
    """A block a row: the name of each column beside its cell. What is empty is left out."""
    view = Table(show_header=False)
    view.add_column(no_wrap=True, style="dim")
    view.add_column(overflow="fold")
    for row in cells:
        shown = [(name, cell) for name, cell in zip(names, row, strict=True) if cell]
        for at, (name, cell) in enumerate(shown, 1):
            view.add_row(Text(name), Text(cell), end_section=at == len(shown))
    return view


def _plain(text: str) -> str:
    """A text in which control characters are escapes."""
    return printable(text, keep="\n")


def _longest_line(text: str) -> int:
    return max(map(cell_len, text.split("\n")))


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)

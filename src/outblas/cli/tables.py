"""Tables that read well in a terminal of any width.

A column is never narrower than its longest word, so that no number is split. Where all columns do
not fit side by side, each row becomes a block of its own: one line for each column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from ..core.terminal import printable

BORDER = 1  # columns of a terminal beside each cell, and at the end
PADDING = 2  # blanks of each cell


def make_table(
    title: str, columns: Iterable[str], rows: Iterable[Iterable[object]], width: int
) -> Table:
    """A table for a terminal that is `width` characters wide. Cells are shown as they are, not as
    markup.
    """
    names = [_plain(name) for name in columns]
    cells = [[_plain(str(cell)) for cell in row] for row in rows]
    widths = column_widths([names, *cells], width)
    view = Table(title=Text(_plain(title)), title_justify="left", title_style="bold")
    if widths is None:
        _fill_stacked(view, names, cells)
    else:
        _fill(view, names, cells, widths)
    return view


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


def _fill(view: Table, names: list[str], cells: list[list[str]], widths: list[int]) -> None:
    for name, size in zip(names, widths, strict=True):
        view.add_column(Text(name), width=size, overflow="fold")
    for row in cells:
        view.add_row(*map(Text, row))


def _fill_stacked(view: Table, names: list[str], cells: list[list[str]]) -> None:
    """A block a row: the name of each column beside its cell. What is empty is left out."""
    view.show_header = False
    view.add_column(no_wrap=True, style="dim")
    view.add_column(overflow="fold")
    for row in cells:
        shown = [(name, cell) for name, cell in zip(names, row, strict=True) if cell]
        for at, (name, cell) in enumerate(shown, 1):
            view.add_row(Text(name), Text(cell), end_section=at == len(shown))


def _plain(text: str) -> str:
    """A text in which control characters are escapes."""
    return printable(text, keep="\n")


def _longest_line(text: str) -> int:
    return max(map(cell_len, text.split("\n")))


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)

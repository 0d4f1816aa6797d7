"""Tables in terminals of any width: no word is split, whatever does not fit is stacked."""

import io
from collections.abc import Iterable

import pytest
from rich.console import Console

from outblas.cli.tables import column_widths, make_table

COLUMNS = ("shape", "kernel", "µs", "× cuBLAS")
ROWS = [
    ("4096x4096x4096", "hopper.cluster_multicast", "183.41", "1.012 (1.009–1.015)"),
    ("512x512x512", "hopper.gemm", "2.89", "1.095 (1.091–1.099)"),
]


def printed(
    width: int, columns: tuple[str, ...] = COLUMNS, rows: Iterable[Iterable[object]] = ROWS
) -> str:
    """A table as a terminal of a width shows it."""
    out = io.StringIO()
    Console(file=out, width=width).print(make_table("Times", columns, rows, width))
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_no_number_is_split(width: int) -> None:
    text = printed(width)

    for word in " ".join(cell for row in ROWS for cell in row).split():
        assert word in text, word
    assert max(map(len, text.splitlines())) <= width


def test_columns_stand_side_by_side_where_they_fit() -> None:
    text = printed(140)

    line = next(line for line in text.splitlines() if "183.41" in line)
    assert all(cell in line for cell in ROWS[0])


def test_columns_that_do_not_fit_are_stacked_with_their_names() -> None:
    lines = [[part.strip() for part in line.split("│")] for line in printed(50).splitlines()]

    assert ["", "µs", "183.41", ""] in lines
    assert ["", "µs", "2.89", ""] in lines


def test_an_empty_cell_is_left_out_of_a_stack() -> None:
    text = printed(20, ("name", "a long name of a column", "note"), [("portable", "1", "")])

    assert "note" not in text


def test_text_wraps_between_words_where_it_has_to() -> None:
    text = printed(30, ("name", "idea"), [("simt.naive", "one output of C per thread")])

    lines = [[part.strip() for part in line.split("│")] for line in text.splitlines()]
    assert ["", "simt.naive", "one output of", ""] in lines
    assert ["", "", "C per thread", ""] in lines


def test_cells_are_shown_as_they_are() -> None:
    assert "[bold]k=v[/bold]" in printed(80, ("config",), [("[bold]k=v[/bold]",)])


def test_control_characters_are_escapes() -> None:
    text = printed(80, ("name",), [("a\x1b[31mb",)])

    assert "\x1b" not in text
    assert "\\x1b[31mb" in text


def test_room_goes_to_the_columns_that_want_it() -> None:
    rows = [["a", "b"], ["x", "one two three four"]]

    assert column_widths(rows, 7 + 1 + 18) == [1, 18]
    assert column_widths(rows, 7 + 1 + 10) == [1, 10]
    assert column_widths(rows, 7 + 1 + 4) is None

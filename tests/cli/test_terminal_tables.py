"""Tables in terminals of any width: no word is split, and what does not fit goes below."""

import io
from collections.abc import Iterable

import pytest
from rich.console import Console

from outblas.cli.tables import column_widths, make_table, split_columns

COLUMNS = ("shape", "kernel", "µs", "× cuBLAS")
ROWS = [
    ("4096x4096x4096", "hopper.cluster_multicast", "183.41", "1.012 (1.009–1.015)"),
    ("512x512x512", "hopper.gemm", "2.89", "1.095 (1.091–1.099)"),
]
MANY = [
    (f"{n}x{n}x{n}", "hopper.gemm", f"{n}.25", f"1.0{n % 10} (0.998–1.012)") for n in range(40, 60)
]


def printed(
    width: int,
    columns: tuple[str, ...] = COLUMNS,
    rows: Iterable[Iterable[object]] = ROWS,
    *,
    keys: int = 1,
    title: str = "Times",
) -> str:
    """A table as a terminal of a width shows it."""
    out = io.StringIO()
    Console(file=out, width=width).print(make_table(title, columns, rows, width, keys=keys))
    return out.getvalue()


def lines_of(text: str) -> list[list[str]]:
    """The cells of each line."""
    return [[part.strip() for part in line.split("│")] for line in text.splitlines()]


@pytest.mark.parametrize("width", [40, 60, 80, 140])
@pytest.mark.parametrize("rows", [ROWS, MANY], ids=["few rows", "many rows"])
def test_no_number_is_split(width: int, rows: list[tuple[str, ...]]) -> None:
    text = printed(width, rows=rows)

    for word in " ".join(cell for row in rows for cell in row).split():
        assert word in text, word
    assert max(map(len, text.splitlines())) <= width


def test_columns_stand_side_by_side_where_they_fit() -> None:
    text = printed(140)

    line = next(line for line in text.splitlines() if "183.41" in line)
    assert all(cell in line for cell in ROWS[0])


def test_columns_that_do_not_fit_are_stacked_with_their_names() -> None:
    lines = lines_of(printed(50))

    assert ["", "µs", "183.41", ""] in lines
    assert ["", "µs", "2.89", ""] in lines


def test_many_rows_are_split_into_tables_that_repeat_what_a_row_is_about() -> None:
    lines = lines_of(printed(44, rows=MANY, keys=2))

    assert ["", "45x45x45", "hopper.gemm", "45.25", ""] in lines
    assert ["", "45x45x45", "hopper.gemm", "1.05", ""] in lines
    assert ["", "", "", "(0.998–1.012)", ""] in lines
    assert ["", "µs", "45.25", ""] not in lines


def test_rows_that_the_keys_do_not_tell_apart_are_numbered() -> None:
    rows = [("simt.naive", f"{n}" * 12, f"{n}" * 13) for n in range(4)]

    lines = lines_of(printed(36, ("kernel", "loads", "stores"), rows))

    assert ["", "3", "simt.naive", "2" * 12, ""] in lines
    assert ["", "3", "simt.naive", "2" * 13, ""] in lines


def test_a_title_may_be_wider_than_its_table() -> None:
    title = "µs of each size, in CUDA graphs"

    text = printed(80, ("N",), [("4096",)], title=title)

    assert text.splitlines()[0].rstrip() == title


def test_columns_that_do_not_fit_beside_the_keys_are_not_split_off() -> None:
    rows = [["name", "idea"], ["hopper.cluster_multicast", "multicast"]]

    assert split_columns(rows, 30, keys=1) is None


def test_parts_hold_as_many_columns_as_fit() -> None:
    rows = [["name", "a", "b", "c"], ["simt.naive", "1" * 8, "2" * 8, "3" * 8]]

    assert split_columns(rows, 36, keys=1) == [[0, 1, 2], [0, 3]]


def test_a_table_that_would_be_split_into_too_many_parts_is_stacked() -> None:
    columns = tuple(f"column{i}" for i in range(12))
    rows = [tuple(f"{row}:{i}" for i in range(12)) for row in range(5)]

    assert ["", "column7", "3:7", ""] in lines_of(printed(30, columns, rows))


def test_long_texts_are_stacked_rather_than_split_off() -> None:
    columns = ("kernel", "reason", "µs")
    rows = [("hopper.gemm", "word " * 60, "1.25")] * 5

    assert split_columns([columns, *rows], 40, keys=1) is None


def test_lines_of_cells_stay_beside_each_other_where_one_wraps() -> None:
    rows = [("hopper.gemm", "4096\n8192", "1.014 (0.997–1.017)\n1.038 (1.037–1.039)")]

    lines = lines_of(printed(38, ("kernel", "N", "× cuBLAS"), rows))

    assert ["", "hopper.gemm", "4096", "1.014", ""] in lines
    assert ["", "", "8192", "1.038", ""] in lines


def test_an_empty_cell_is_left_out_of_a_stack() -> None:
    text = printed(20, ("name", "a long name of a column", "note"), [("portable", "1", "")])

    assert "note" not in text


def test_text_wraps_between_words_where_it_has_to() -> None:
    text = printed(30, ("name", "idea"), [("simt.naive", "one output of C per thread")])

    lines = lines_of(text)
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

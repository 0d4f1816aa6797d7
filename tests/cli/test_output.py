"""What commands print: tables in terminals of any width, a line of progress on standard error, and
files of JSON.
"""

import io
import json
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from rich.console import Console

from outblas.base import progress
from outblas.cli import progress_line
from outblas.cli.common import save_json, without_nulls
from outblas.cli.tables import make_table

COLUMNS = ("shape", "kernel", "µs", "× cuBLAS")
ROWS = [
    ("4096x4096x4096", "hopper.cluster_multicast", "183.41", "1.012 (1.009–1.015)"),
    ("512x512x512", "hopper.gemm", "2.89", "1.095 (1.091–1.099)"),
]
MANY = [
    (f"{n}x{n}x{n}", "hopper.gemm", f"{n}.25", f"1.0{n % 10} (0.998–1.012)") for n in range(40, 60)
]


# ---- tables
def printed(
    width: int,
    columns: tuple[str, ...] = COLUMNS,
    rows: Iterable[Iterable[object]] = ROWS,
    *,
    keys: int = 1,
) -> str:
    """A table as a terminal of a width shows it."""
    out = io.StringIO()
    Console(file=out, width=width).print(make_table("Times", columns, rows, width, keys=keys))
    return out.getvalue()


def lines_of(text: str) -> list[list[str]]:
    """The cells of each line."""
    return [[part.strip() for part in line.split("│")] for line in text.splitlines()]


@pytest.mark.parametrize("width", [30, 40, 44, 60, 80, 140])
@pytest.mark.parametrize("rows", [ROWS, MANY], ids=["few rows", "many rows"])
def test_no_number_is_split_and_no_line_is_too_long(
    width: int, rows: list[tuple[str, ...]]
) -> None:
    text = printed(width, rows=rows)

    words = " ".join(cell for row in rows for cell in row).split()
    assert [word for word in words if word not in text and len(word) < width - 20] == []
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize(
    ("width", "rows", "line"),
    [
        (140, ROWS, ["", *ROWS[0], ""]),  # side by side
        (50, ROWS, ["", "µs", "183.41", ""]),  # few rows: stacked
        (44, MANY, ["", "45x45x45", "hopper.gemm", "45.25", ""]),  # many rows: split
        (44, MANY, ["", "45x45x45", "hopper.gemm", "1.05", ""]),
        (44, MANY, ["", "", "", "(0.998–1.012)", ""]),
    ],
)
def test_columns_stand_where_they_fit(
    width: int, rows: list[tuple[str, ...]], line: list[str]
) -> None:
    assert line in lines_of(printed(width, rows=rows, keys=2))


def test_a_table_of_too_many_parts_is_stacked() -> None:
    columns = tuple(f"column{i}" for i in range(12))
    rows = [tuple(f"{row}:{i}" if i else "" for i in range(12)) for row in range(5)]

    lines = lines_of(printed(30, columns, rows))

    assert ["", "column7", "3:7", ""] in lines
    assert not any("column0" in line for line in lines)  # what is empty is left out


def test_lines_of_cells_stay_beside_each_other_where_one_wraps() -> None:
    rows = [("hopper.gemm", "4096\n8192", "1.014 (0.997–1.017)\n1.038 (1.037–1.039)")]

    lines = lines_of(printed(38, ("kernel", "N", "× cuBLAS"), rows))

    assert ["", "hopper.gemm", "4096", "1.014", ""] in lines
    assert ["", "", "8192", "1.038", ""] in lines


def test_cells_are_no_markup_and_no_commands_to_the_terminal() -> None:
    text = printed(80, ("name",), [("[bold]a\x1b[2J",)])

    assert "[bold]a\\x1b[2J" in text


# ---- progress
WORK = """
import time
from outblas.cli import progress_line
from outblas.base import progress

with progress_line.shown("looking around"):
    time.sleep(0.4)
    for name in progress.counted(["simt.naive", "hopper.gemm", "a" * 200]):
        time.sleep(0.4)
print("done")
"""


@pytest.mark.parametrize(("seconds", "said"), [(1.9, ""), (6.0, "3 of 5 c\n5 of 5 e\n")])
def test_without_a_terminal_long_work_says_a_line_now_and_then(
    seconds: float, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: now)

    with progress_line.shown():
        for _ in progress.counted("abcde"):
            now += seconds

    assert capfd.readouterr() == ("", said)


def on_terminal(program: str, columns: int) -> tuple[str, str]:
    """What a program prints to a pipe, and what to the terminal that is its standard error."""
    ours, theirs = pty.openpty()
    screen: list[bytes] = []

    def read() -> None:
        try:
            while chunk := os.read(ours, 4096):
                screen.append(chunk)
        except OSError:  # Linux's end of a terminal
            pass

    reader = threading.Thread(target=read)
    reader.start()
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        check=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": str(columns)},
    )
    os.close(theirs)
    reader.join()
    os.close(ours)
    return done.stdout, b"".join(screen).decode()


@pytest.mark.long
def test_a_terminal_has_one_line_that_changes_and_is_gone_at_the_end() -> None:
    output, screen = on_terminal(WORK, columns=60)

    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)
    lines = [line.strip() for line in re.split(r"[\r\n]+", shown) if line.strip()]
    assert output == "done\n"
    assert any("looking around" in line for line in lines)
    assert any("2 of 3 hopper.gemm" in line for line in lines)
    assert max(map(len, lines)) <= 60
    assert screen.rstrip().endswith("\x1b[2K")  # the line is erased


# ---- files
def test_saved_json_is_indented_and_keeps_every_digit(tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    record = without_nulls({"us": 1e300, "ratio": 1 / 3, "best": None})

    save_json(path, {"results": [record]})

    text = path.read_text()
    assert json.loads(text) == {"results": [{"us": 1e300, "ratio": 1 / 3}]}
    assert text == json.dumps(json.loads(text), indent=2) + "\n"
    assert [file.name for file in tmp_path.iterdir()] == ["saved.json"]

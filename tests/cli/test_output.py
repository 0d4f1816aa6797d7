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


# ---- tables
def printed(
    width: int, columns: tuple[str, ...] = COLUMNS, rows: Iterable[Iterable[object]] = ROWS
) -> str:
    """A table as a terminal of a width shows it."""
    out = io.StringIO()
    Console(file=out, width=width).print(make_table("Times", columns, rows, width))
    return out.getvalue()


def lines_of(text: str) -> list[list[str]]:
    """The cells of each line."""
    return [[part.strip() for part in line.split("│")] for line in text.splitlines()]


@pytest.mark.parametrize("width", [44, 60, 80, 140])
def test_no_number_is_split_and_no_line_is_too_long(width: int) -> None:
    text = printed(width)

    words = " ".join(cell for row in ROWS for cell in row).split()
    assert [word for word in words if word not in text] == []
    assert max(map(len, text.splitlines())) <= width


def test_columns_that_do_not_fit_are_stacked_without_empty_cells() -> None:
    rows = [*ROWS, ("512x512x512", "", "3.00", "")]

    assert ["", *ROWS[0], ""] in lines_of(printed(140, rows=rows))
    stacked = lines_of(printed(50, rows=rows))
    assert ["", "µs", "183.41", ""] in stacked
    assert sum("kernel" in line for line in stacked) == 2


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

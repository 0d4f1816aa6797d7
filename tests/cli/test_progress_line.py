"""What a long command says of itself while it runs: on standard error, and counted."""

import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from support import commands

from outblas.cli import progress_line
from outblas.core import progress

WORK = """
import time
from outblas.cli import progress_line
from outblas.core import progress

with progress_line.shown("looking around"):
    time.sleep(0.4)
    for name in progress.counted(["simt.naive", "hopper.gemm", "a" * 200]):
        time.sleep(0.4)
print("done")
"""


@pytest.fixture
def passes_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock on, where standard error is no terminal."""
    now = 0.0
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: now)

    def pass_(seconds: float) -> None:
        nonlocal now
        now += seconds

    return pass_


def work(pass_: Callable[[float], None], *, seconds: float) -> None:
    """Five steps of so many seconds each, shown."""
    with progress_line.shown():
        for _ in progress.counted("abcde"):
            pass_(seconds)


def test_short_work_says_nothing_without_a_terminal(
    passes_time: Callable[[float], None], capfd: pytest.CaptureFixture[str]
) -> None:
    work(passes_time, seconds=1.9)

    assert capfd.readouterr() == ("", "")


def test_long_work_says_a_line_now_and_then_without_a_terminal(
    passes_time: Callable[[float], None], capfd: pytest.CaptureFixture[str]
) -> None:
    work(passes_time, seconds=6.0)

    assert capfd.readouterr() == ("", "3 of 5 c\n5 of 5 e\n")


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
    printed, screen = on_terminal(WORK, columns=60)

    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)
    lines = [line.strip() for line in re.split(r"[\r\n]+", shown) if line.strip()]
    assert printed == "done\n"
    assert any("looking around" in line for line in lines)
    assert any("2 of 3 hopper.gemm" in line for line in lines)
    assert max(map(len, lines)) <= 60
    assert screen.rstrip().endswith("\x1b[2K")  # the line is erased


def test_json_on_standard_output_is_nothing_but_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_line, "LINES_EVERY", 0.0)

    done = commands.invoke("report", "raster", "--shapes", "1024", "--json", code=0)

    assert done.stdout.startswith("{")
    assert re.search(r"^\d+ of \d+ \w+", done.stderr)

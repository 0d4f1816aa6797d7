"""The command as a process: whatever its streams and the width of its lines are."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.stored import fill

import _outblas_command

LINES = (
    "list hopper --long",
    "bench --help",
    "cache ls",
    "cache show 4096",
    "cache show 4096 --json",
)
COMMAND = [sys.executable, "-c", "from _outblas_command import main; main()", "list", "simt"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
@pytest.mark.parametrize("line", LINES)
def test_what_cannot_be_encoded_costs_a_character(
    line: str, encoding: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path)
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(path.parent))
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    monkeypatch.setattr(sys, "argv", ["outblas", *line.split()])

    with pytest.raises(SystemExit) as done:
        _outblas_command.main()

    assert not done.value.code
    assert "hopper." in written.getvalue().decode(encoding)


@pytest.mark.parametrize(
    "columns", ["0", "00", "-1", "wide", pytest.param("9" * 5000, id="digits"), "", None]
)
def test_a_width_that_is_none_is_that_of_no_setting(
    columns: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)

    _outblas_command._make_ready()

    assert "COLUMNS" not in os.environ


def test_a_width_that_is_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")

    _outblas_command._make_ready()

    assert os.environ["COLUMNS"] == "100"


def test_a_table_has_its_width_where_columns_has_none() -> None:
    environment = {**os.environ, "COLUMNS": "0", "PYTHONIOENCODING": "ascii"}

    done = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, check=True)

    assert "| simt.naive " in done.stdout


@pytest.mark.parametrize(
    "closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"], ids=["in", "out", "err", "all"]
)
def test_closed_streams_are_no_error(closed: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *COMMAND], capture_output=True, text=True
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert ("simt.naive" in done.stdout) is ("1>&-" not in closed)


def test_a_pipe_that_nobody_reads_ends_the_command_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)

    done = subprocess.run(COMMAND, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)

    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_behind_the_output_is_said_in_a_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(COMMAND, stdout=full, stderr=subprocess.PIPE, text=True)

    assert done.returncode == 1
    assert done.stderr == "outblas: standard output: No space left on device\n"

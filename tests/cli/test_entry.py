"""The command as a process: what it imports, its streams, and the width of its lines."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import _outblas_command

HEAVY = ("torch", "numpy", "triton", "cutlass", "matplotlib", "ray", "pynvml", "tvm_ffi")
COMMAND = [sys.executable, "-c", "from _outblas_command import main; main()", "list", "simt"]

# Runs commands in one process, as the installed script does, and prints which heavy modules there
# are after each. A command's own output goes nowhere.
RUN = """
import contextlib, io, json, sys
from _outblas_command import main

commands, heavy = json.loads(sys.argv[1]), json.loads(sys.argv[2])
for line in commands:
    sys.argv = ["outblas", *line.split()]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
    print(json.dumps([line, [name for name in heavy if name in sys.modules]]))
"""
LIGHT = (
    "--version",
    "--help",
    "bench --help",
    "tune --help",
    "bnch",
    "list",
    "list hopper --long",
    "list --json",
    "cache ls",
    "cache prune --older-than 30d --dry-run",
)


# ---- imports
def imported_by(*lines: str, cache: Path, **environment: str) -> dict[str, list[str]]:
    """The heavy modules that a process has imported after each of these commands."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(lines), json.dumps(HEAVY)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OUTBLAS_CACHE_DIR": str(cache), **environment},
    )
    modules = dict(map(json.loads, done.stdout.splitlines()))
    assert len(modules) == len(lines), done.stderr
    return modules


def test_help_lists_and_the_cache_import_nothing_heavy(tmp_path: Path) -> None:
    assert imported_by(*LIGHT, cache=tmp_path) == {line: [] for line in LIGHT}
    completed = {"_OUTBLAS_COMPLETE": "complete_bash", "COMP_WORDS": "outblas ", "COMP_CWORD": "1"}
    assert imported_by("in", cache=tmp_path, **completed) == {"in": []}


# ---- streams and widths
@pytest.mark.parametrize(
    ("line", "encoding"), [("list hopper --long", "ascii"), ("bench --help", "cp1252")]
)
def test_what_cannot_be_encoded_costs_a_character(
    line: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    monkeypatch.setattr(sys, "argv", ["outblas", *line.split()])

    with pytest.raises(SystemExit) as done:
        _outblas_command.main()

    assert not done.value.code
    assert "hopper." in written.getvalue().decode(encoding)


@pytest.mark.parametrize(
    ("columns", "kept"),
    [
        ("0", None),
        ("-1", None),
        ("wide", None),
        pytest.param("9" * 5000, None, id="digits"),
        ("", None),
        ("100", "100"),
    ],
)
def test_a_width_that_is_none_is_that_of_no_setting(
    columns: str, kept: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)

    _outblas_command._make_ready()

    assert os.environ.get("COLUMNS") == kept


@pytest.mark.parametrize("closed", ["2>&-", "0<&- 1>&- 2>&-"], ids=["err", "all"])
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

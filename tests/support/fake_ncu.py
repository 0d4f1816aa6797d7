"""A program that stands for ncu, and `outblas profile` with it on a machine without a GPU."""

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .ncu_recording import RECORDING, recorded
from .paths import DATA
from .profiles import invoke

PAGE = DATA / "ncu_source_h100.csv"

# What stands for ncu: it logs its arguments, then acts. `status` and `request` are those of the
# process to watch.
FAKE = f"""#!{sys.executable}
import json, os, subprocess, sys, time
from pathlib import Path
if sys.argv[1:] == ["--version"]:
    print("NVIDIA (R) Nsight Compute Command Line Profiler")
    sys.exit(print("Version 2025.3.1.0 (build 36398880)"))
here = Path(__file__).parent
with open(here / "calls", "a") as log:
    log.write(json.dumps([*sys.argv[1:], os.environ["LC_ALL"]]) + "\\n")
if sys.argv[1] == "--import":
    sys.exit(print(Path(sys.argv[2]).read_text(), end=""))
status, request = Path(sys.argv[-2]), json.loads(sys.argv[-1])
"""
# A second run makes a report if there is a page, which `--import` prints.
REPLAY = """
status.write_text('{"done": true}')
if "-o" not in sys.argv:
    lines = (here / "recording").read_text().splitlines(keepends=True)
    print("".join(lines[:5] + (lines[5:8] if request["shape"][0] == 4096 else lines[8:])), end="")
elif (here / "page").exists():
    Path(sys.argv[sys.argv.index("-o") + 1] + ".ncu-rep").write_text((here / "page").read_text())
"""


def printed(*arguments: str) -> str:
    """What `outblas profile` prints where it succeeds."""
    return invoke(*arguments, code=0).stdout


def results(*arguments: str) -> Any:
    """The results of `outblas profile --json`."""
    return json.loads(printed(*arguments, "--json"))["results"]


def check_stops(code: int, message: str, *arguments: str) -> None:
    """`outblas profile` ends with the code and the message, and shows no figures."""
    result = invoke(*arguments, code=code)

    assert message in result.stderr
    assert "µs" not in result.stdout


def cells(output: str) -> list[list[str]]:
    """The rows of all tables that were printed."""
    return [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in output.splitlines()
        if "│" in line
    ]


def calls(log: Path) -> list[list[str]]:
    """The arguments of each start of ncu, and LC_ALL."""
    return [json.loads(line) for line in log.read_text().splitlines()]


def pretend_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch tells what it would tell of an H100. No GPU is touched: the fake ncu starts nothing."""
    properties = SimpleNamespace(name="H100", multi_processor_count=132, major=9, minor=0)
    told = {
        "is_available": True,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": "H100",
        "get_device_properties": properties,
    }
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program called ncu, first on PATH, for tests to write, on a machine with an H100."""
    pretend_h100(monkeypatch)
    program = folder / "ncu"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return program


def install_replay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ncu that replays the copy of the recording beside it. Returns the log of its calls."""
    program = install(folder, monkeypatch)
    shutil.copy(RECORDING, program.with_name("recording"))
    program.write_text(FAKE + REPLAY)
    return program.with_name("calls")


def write_source_page(folder: Path) -> Path:
    """What the source page of 4096³ by cublas and portable would be, with the rows of two other
    kernels.
    """
    sections = PAGE.read_text().split('"Kernel Name",')[1:3]
    names = (launch.kernel for launch in recorded("4096")[:2])
    bodies = (section.partition("\n")[2] for section in sections)
    page = folder / "page"
    page.write_text(
        "".join(
            f'"Kernel Name","{name}",\n{body}' for name, body in zip(names, bodies, strict=True)
        )
    )
    return page

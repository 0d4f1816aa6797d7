"""What runs on this machine, by /proc: the descendants of a driver, and what it has left behind."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .kernel import MARK

ORPHAN_SECONDS = 5.0  # within which all that a driver started has to be gone after it


@dataclass(frozen=True)
class Process:
    """A process of this moment; `command` is its command line, `state` as in /proc (Z: dead, not
    yet waited for).
    """

    pid: int
    parent: int
    state: str
    command: str


def running() -> list[Process]:
    """All processes that are not dead."""
    found = (_process(int(name)) for name in os.listdir("/proc") if name.isdecimal())
    return [process for process in found if process is not None and process.state not in "ZX"]


def descendants(pid: int) -> list[Process]:
    """Of a process, to any depth."""
    processes = running()
    family, found = {pid}, []
    grown = True
    while grown:
        grown = False
        for process in processes:
            if process.parent in family and process.pid not in family:
                family.add(process.pid)
                found.append(process)
                grown = True
    return found


def marked(mark: str) -> list[Process]:
    """Processes that were started with this mark in their environment, whoever their parent is by
    now.
    """
    wanted = f"{MARK}={mark}".encode()
    found = []
    for process in running():
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(process)
    return found


def orphans(mark: str, seconds: float = ORPHAN_SECONDS) -> list[Process]:
    """What a dead driver has left behind after so many seconds; these processes are ended then."""
    until = time.monotonic() + seconds
    left = marked(mark)
    while left and time.monotonic() < until:
        time.sleep(0.05)
        left = marked(mark)
    for process in left:
        send(process.pid, signal.SIGKILL)
    return left


def send(pid: int, number: int) -> bool:
    """Whether the process was there to get the signal."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def soon(condition: Callable[[], bool], seconds: float) -> bool:
    """Waits for the condition, so many seconds at most; whether it holds."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _process(pid: int) -> Process | None:
    try:
        facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        command = (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()
        )
    except OSError:
        return None
    return Process(pid, int(facts[1]), facts[0], command)

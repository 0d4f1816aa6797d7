"""A kernel whose configs are known to be sound or guilty: torch's product, after a pause and
perhaps a fault.

`CHAOS_CONFIGS` has the configs of the space, separated by semicolons. Each compile and each
measurement adds a line to the file `CHAOS_NOTES`: what is done, the config, the process that does
it, and the driver that it works for.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from outblas.autotune.store.records import Status
from outblas.core.configs import from_text, to_text
from outblas.core.space import Footprint, Space

# The statuses that a config may get because of its fault. "" and the fault "child" are sound.
MEASURED: dict[str, tuple[Status, ...]] = {
    "": ("ok",),
    "child": ("ok",),
    "segfault": ("crash",),
    "abort": ("crash",),
    "exit": ("crash",),
    "hang": ("hang",),
    "gil": ("hang",),
    "wrong": ("wrong",),
    "raise": ("failed",),
    "unprintable": ("failed",),
    "base": ("failed",),
    "refuse": ("refused",),
}
# Whoever measures compiles what was not compiled ahead, and has the fault then.
COMPILED: dict[str, tuple[Status, ...]] = {
    "compile-raise": ("failed",),
    "compile-segfault": ("compile crash", "crash"),
    "compile-exit": ("compile crash", "crash"),
    "compile-hang": ("compile timeout", "hang"),
}
STATUS = MEASURED | COMPILED

MARK = (
    "CHAOS_MARK"  # the driver that a process belongs to, in the environment of all its descendants
)
NOTES = "CHAOS_NOTES"
CONFIGS = "CHAOS_CONFIGS"


@dataclass(frozen=True)
class Config:
    """`load` and `build` are milliseconds: before the first call, and of a compile."""

    number: int = 0
    load: int = 0
    build: int = 0
    fault: str = ""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("this error cannot be shown")


class NotAnException(BaseException):
    """What `except Exception` lets through."""


def unsupported(problem, config=None):
    return "fault is refuse, expected another" if config and config.fault == "refuse" else None


def plan(problem, config=None):
    config = config or Config()
    note("measure", to_text(config))
    if not _built(config).exists():
        note("uncompiled", to_text(config))
        _build(config)
    time.sleep(config.load / 1000)
    if config.fault == "child":
        subprocess.Popen(["sleep", "1000"])

    def launch(a, b, c, out, alpha, beta):
        fail(config.fault)
        torch.mm(a, b, out=out)
        if config.fault == "wrong":
            out[-1, -1] += 1

    return launch


def precompile(problem, config, arch):
    note("compile", to_text(config))
    _build(config)


def _build(config):
    time.sleep(config.build / 1000)
    when, _, fault = config.fault.rpartition("-")
    if when == "compile":
        fail(fault)
    _built(config).parent.mkdir(exist_ok=True)
    _built(config).touch()


def _built(config):
    """The compiled config."""
    return Path(os.environ[NOTES] + ".built") / str(config.number)


def fail(fault):
    match fault:
        case "hang":
            time.sleep(1000)
        case "gil":
            ctypes.PyDLL(None).sleep(1000)  # holds the interpreter's lock, unlike CDLL
        case "segfault":
            ctypes.string_at(0)
        case "abort":
            signal.signal(signal.SIGABRT, signal.SIG_DFL)
            os.abort()
        case "exit":
            os._exit(3)
        case "raise":
            raise RuntimeError("no luck today")
        case "unprintable":
            raise Unprintable
        case "base":
            raise NotAnException("no luck today")


def space(problem, machine):
    own, *others = (from_text(Config, text) for text in os.environ[CONFIGS].split(";"))
    return Space(
        own=own,
        axes={},
        invalid_reason=lambda config: None,
        footprint=footprint,
        also=tuple(others),
    )


def footprint(config):
    return Footprint(
        math="fma",
        tile_m=16,
        tile_n=16,
        tile_k=16,
        stages=1,
        threads=128,
        registers=32,
        shared_memory=2048,
    )


def note(what, text):
    """One write, so that lines of several processes do not mix."""
    line = f"{what} {text} {os.getpid()} {os.environ.get(MARK, 'none')}\n"
    file = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def sound(fault):
    """Whether a config with this fault has to be measured as any other."""
    return STATUS[fault] == ("ok",)


if __name__ == "__main__":
    sys.exit("this is a kernel, for `python -m tests.chaos`")

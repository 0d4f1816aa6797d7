"""A kernel whose configs are known to be sound or guilty: torch's product, after a pause and
perhaps a fault of tests/support/faulty_kernel.py.

`CHAOS_CONFIGS` has the configs of the space, separated by semicolons. Each compile and each
measurement adds a line to the file `CHAOS_NOTES`: what is done, the config, the process that does
it, and the driver that it works for.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support import faulty_kernel
from support.faulty_kernel import footprint, unsupported

from outblas.autotune.store.records import Status
from outblas.core.configs import from_text, to_text
from outblas.core.problem import Problem
from outblas.core.space import Space

__all__ = ["Config", "footprint", "plan", "precompile", "space", "unsupported"]

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


def plan(problem: Problem, config: Config | None = None) -> Callable[..., None]:
    config = config or Config()
    note("measure", to_text(config))
    if not _built(config).exists():
        note("uncompiled", to_text(config))
        _build(config)
    time.sleep(config.load / 1000)
    if config.fault == "child":
        subprocess.Popen(["sleep", "1000"])
    return faulty_kernel.product(config)


def precompile(problem: Problem, config: Config, arch: int) -> None:
    note("compile", to_text(config))
    _build(config)


def _build(config: Config) -> None:
    time.sleep(config.build / 1000)
    faulty_kernel.fail_to_compile(config)
    _built(config).parent.mkdir(exist_ok=True)
    _built(config).touch()


def _built(config: Config) -> Path:
    """The file that stands for the compiled config."""
    return Path(os.environ[NOTES] + ".built") / str(config.number)


def space(problem: Problem, machine: object) -> Space[Config]:
    own, *others = (from_text(Config, text) for text in os.environ[CONFIGS].split(";"))
    return faulty_kernel.space_of(own, {}, others)


def note(what: str, text: str) -> None:
    """One write, so that lines of several processes do not mix."""
    line = f"{what} {text} {os.getpid()} {os.environ.get(MARK, 'none')}\n"
    file = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def sound(fault: str) -> bool:
    """Whether a config with this fault has to be measured as any other."""
    return STATUS[fault] == ("ok",)


if __name__ == "__main__":
    sys.exit("this is a kernel, for `python -m tests.chaos`")

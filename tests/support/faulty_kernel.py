"""A kernel for sweeps without a GPU: torch's product, with configs that fail in every way a config
can.

Whoever measures a config notes that in the file FAULTY_LOG, whoever compiles one in
FAULTY_LOG.compiled. FAULTY_CONFIGS says how many sound configs the space has, FAULTY_SLEEP how many
ms each takes, FAULTY_FAULTS which faults others have.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from outblas.core.configs import to_text
from outblas.core.problem import Problem
from outblas.core.space import Footprint, Space

# What becomes of a config with a fault: of its measurement, and where it is compiled ahead.
MEASURED = {
    "hang": "hang",
    "segfault": "crash",
    "exit": "crash",
    "wrong": "wrong",
    "raise": "failed",
    "oom": "out of memory",
    "refuse": "refused",
}
COMPILED = {
    "compile-hang": "compile timeout",
    "compile-segfault": "compile crash",
    "compile-memory": "compile crash",
    "compile-raise": "failed",
}


@dataclass(frozen=True)
class Config:
    """`number` tells apart configs that are otherwise equal; `sleep`: ms before the first call."""

    number: int = 0
    sleep: int = 0
    fault: str = ""


class Note(NamedTuple):
    """Who did something to a config, and what that process saw in CUDA_VISIBLE_DEVICES."""

    config: str
    process: int
    visible: str


def unsupported(problem: Problem, config: Config | None = None) -> str | None:
    return "fault is refuse, expected another" if config and config.fault == "refuse" else None


def plan(problem: Problem, config: Config | None = None) -> Callable[..., None]:
    config = config or Config()
    _note(config)
    time.sleep(config.sleep / 1000)

    def launch(
        a: torch.Tensor, b: torch.Tensor, c: Any, out: torch.Tensor, alpha: float, beta: float
    ) -> None:
        fail(config.fault, config)
        torch.mm(a, b, out=out)
        if config.fault == "wrong":
            out[-1, -1] += 1

    if config.fault == "exit-idle":
        threading.Timer(0.5, os._exit, [3]).start()
    return launch


def precompile(problem: Problem, config: Config, arch: int) -> None:
    _note(config, ".compiled")
    when, _, fault = config.fault.rpartition("-")
    if when == "compile":
        fail(fault)


def fail(fault: str, config=None) -> None:
    match fault:
        case "wait":  # while there is a file
            while Path(os.environ["FAULTY_LOG"] + ".wait").exists():
                time.sleep(0.02)
        case "killed-once":  # from outside, so to speak
            if sum(note.config == to_text(config) for note in notes()) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(1000)
        case "segfault":
            ctypes.string_at(0)
        case "exit":
            os._exit(3)
        case "quit":
            sys.exit(3)
        case "raise":
            raise RuntimeError("no luck today")
        case "odd":
            raise OddError("cannot be unpickled", 1)
        case "oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB")
        case "memory":
            bytearray(64 << 30)


class OddError(Exception):
    """As those of compilers are that keep a place in the source."""

    def __init__(self, text: str, line: int) -> None:
        super().__init__(text)
        self.line = line


def space(problem: Problem, machine: object) -> Space[Config]:
    return Space(
        own=Config(sleep=int(os.environ.get("FAULTY_SLEEP", "0"))),
        axes={"number": tuple(range(int(os.environ.get("FAULTY_CONFIGS", "3"))))},
        invalid_reason=lambda config: None,
        footprint=footprint,
        also=tuple(Config(fault=fault) for fault in os.environ.get("FAULTY_FAULTS", "").split()),
    )


def footprint(config: Config) -> Footprint:
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


def notes(suffix: str = "") -> list[Note]:
    """What has been measured, in order; with ".compiled", what has been compiled ahead."""
    log = Path(os.environ["FAULTY_LOG"] + suffix)
    lines = log.read_text().splitlines() if log.exists() else []
    parts = (line.split(" ") for line in lines)
    return [Note(config, int(process), visible) for config, process, visible in parts]


def _note(config: Config, suffix: str = "") -> None:
    with open(os.environ["FAULTY_LOG"] + suffix, "a") as log:
        log.write(
            f"{to_text(config)} {os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}\n"
        )

"""A kernel for sweeps without a GPU: torch's product, with configs that fail in every way a config
can.

Whoever measures a config notes that in the file FAULTY_LOG, whoever compiles one in
FAULTY_LOG.compiled. FAULTY_CONFIGS says how many sound configs the space has, FAULTY_SLEEP how many
ms each takes, FAULTY_FAULTS which faults others have.

Kernels with other configs and notes take the faults, the product and the space from here.
"""

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from outblas.base.configs import to_text
from outblas.base.space import Footprint, Space
from outblas.call.problem import Problem

C = TypeVar("C")


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


class FaultyConfig(Protocol):
    """What a config of any faulty kernel says of itself: the fault that it has, "" for none."""

    @property
    def fault(self) -> str: ...


def unsupported(problem: Problem, config: FaultyConfig | None = None) -> str | None:
    return "fault is refuse, expected another" if config and config.fault == "refuse" else None


def plan(problem: Problem, config: Config | None = None) -> Callable[..., None]:
    config = config or Config()
    _note(config)
    time.sleep(config.sleep / 1000)
    return product(config)


def product(config: FaultyConfig) -> Callable[..., None]:
    """Torch's product, for which the fault of a config strikes."""

    def launch(
        a: torch.Tensor, b: torch.Tensor, c: Any, out: torch.Tensor, alpha: float, beta: float
    ) -> None:
        fail(config.fault)
        torch.mm(a, b, out=out)
        if config.fault == "wrong":
            out[-1, -1] += 1

    return launch


def precompile(problem: Problem, config: Config, arch: int) -> None:
    _note(config, ".compiled")
    fail_to_compile(config)


def fail_to_compile(config: FaultyConfig) -> None:
    """Does what a fault of a compile is named for."""
    when, _, fault = config.fault.rpartition("-")
    if when == "compile":
        fail(fault)


def fail(fault: str) -> None:
    """Does what a fault is named for."""
    match fault:
        case "segfault":
            ctypes.string_at(0)
        case "raise":
            raise RuntimeError("no luck today")
        case "unprintable":
            raise Unprintable
        case "base":
            raise NotAnException("no luck today")
        case "oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB")


class Unprintable(Exception):
    """Cannot say what it is about."""

    def __str__(self) -> str:
        raise ValueError("this error cannot be shown")


class NotAnException(BaseException):
    """What `except Exception` lets through."""


def space(problem: Problem, machine: object) -> Space[Config]:
    return space_of(
        Config(sleep=int(os.environ.get("FAULTY_SLEEP", "0"))),
        {"number": tuple(range(int(os.environ.get("FAULTY_CONFIGS", "3"))))},
        [Config(fault=fault) for fault in os.environ.get("FAULTY_FAULTS", "").split()],
    )


def space_of(own: C, axes: Mapping[Any, tuple[Any, ...]], also: Iterable[C]) -> Space[C]:
    """The space of these configs, in which all are valid and of one footprint."""
    return Space(
        own=own,
        axes=axes,
        invalid_reason=lambda config: None,
        footprint=footprint,
        also=tuple(also),
    )


def footprint(config: object) -> Footprint:
    """That of any config of a faulty kernel: a kernel that every GPU can run."""
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

"""What stands for `outblas.autotune.measure.worker` in tests that start many workers: it
multiplies nothing, and its process needs no torch.
"""

import os
import time
from dataclasses import dataclass

CUBLAS_US = 100.0


@dataclass(frozen=True)
class Screened:
    """As the worker's."""

    status: str
    reason: str = ""
    us: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    clock_mhz: float | None = None

    @property
    def lost(self) -> bool:
        return self.status == "wrong"


class NotOpen(Exception):
    """As the worker's."""


NotOpen.__module__ = "outblas.autotune.measure.worker"
_is_open = False


def load() -> None:
    pass


def open_bench() -> float:
    global _is_open
    _is_open = True
    return CUBLAS_US


def screen(config: str) -> Screened:
    fields = dict(field.split("=") for field in config.split(","))
    if not _is_open:
        raise NotOpen
    with open(os.environ["FAULTY_LOG"], "a") as log:
        log.write(f"{config} {os.getpid()} lean\n")
    time.sleep(int(fields["sleep"]) / 1000)
    us = 50.0 + int(fields["number"])
    ratio = CUBLAS_US / us
    return Screened("ok", us=us, ratio=ratio, ratio_low=ratio, ratio_high=ratio)


def race(configs: list[str], rounds: int) -> tuple[list[float], list[list[float]]]:
    if not _is_open:
        raise NotOpen
    return [CUBLAS_US] * rounds, [[50.0 + len(config)] * rounds for config in configs]

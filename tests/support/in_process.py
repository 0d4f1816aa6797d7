"""Sweeps that measure in the process of the test: a worker imports torch, which takes a core for a
second and a half.
"""

from typing import Any

import pytest

from outblas.autotune.measure import worker
from outblas.autotune.measure.isolated import Raced
from outblas.autotune.measure.worker import Entry, Screened
from outblas.autotune.store.records import Gpu, Workload
from outblas.autotune.sweeps import engine


class InProcessWorker:
    """Stands for a `MeasureWorker` of the CPU: the functions of `worker` called here, not in a
    process of their own. For configs that do no harm to the process that runs them.
    """

    def __init__(self, visible: str, **_: Any) -> None:
        assert visible == "cpu", visible
        self.label, self.unlocked = visible, ""
        self._open: Workload | None = None

    def describe(self) -> Gpu:
        return worker.describe()

    def open(self, workload: Workload) -> float:
        if self._open != workload:
            self._us = worker.open_bench(workload, on_gpu=False)
            self._open = workload
        return self._us

    def screen(self, workload: Workload, entry: Entry, best_us: float | None) -> Screened:
        self.open(workload)
        return worker.screen(entry, best_us)

    def race(self, workload: Workload, entries: list[Entry], rounds: int) -> Raced:
        self.open(workload)
        return worker.race(entries, rounds)

    def cancel(self) -> None:
        pass

    stop = cancel


def measure_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the local engine measure in this process from now on."""
    monkeypatch.setattr(engine, "MeasureWorker", InProcessWorker)

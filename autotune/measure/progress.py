"""How far a sweep has come: one snapshot for each workload that is being tuned."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from outblas.autotune.store.records import Workload

Stage = Literal["waiting", "preparing", "screening", "finals", "done", "failed"]


@dataclass
class Progress:
    """A snapshot of the tuning of one workload on one GPU.

    Attributes:
        workload: What is being tuned.
        gpu: The GPU: an index, a UUID, or either with the name of a host.
        stage: "waiting", "preparing", "screening", "finals", "done" or "failed".
        valid: How many configs are to be screened.
        known: How many of them the store had a result of.
        screened: How many have been measured now.
        compiling: How many are being compiled.
        compiled: How many are compiled and wait to be measured.
        failures: How many trials failed, by status.
        best: The kernel and config of the fastest trial so far.
        best_us: The time of a call of it in µs.
        best_ratio: The time of the base over that of the fastest trial.
        base: What ratios compare with: see `records.base_name`.
        cublas_us: The time of cuBLAS in µs.
        rounds: How many rounds of the finals are done.
        started: When it began, on the clock of `time.monotonic`.
        deadline: When its budget ends, on that clock; None without a budget.
        message: What went wrong, if anything did.

    Example:
        >>> from outblas.autotune import Progress, Workload
        >>> def show(progress: Progress) -> None:  # for sweep(..., progress=show)
        ...     print(f"{progress.workload}: {progress.screened} of {progress.valid}")
        >>> show(Progress(Workload(512, 512, 512), stage="screening", valid=40, screened=7))
        512 bfloat16 nt: 7 of 40
    """

    workload: Workload
    gpu: str = ""
    stage: Stage = "waiting"
    valid: int = 0
    known: int = 0
    screened: int = 0
    compiling: int = 0
    compiled: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    best: str = ""
    best_us: float | None = None
    best_ratio: float | None = None
    base: str = "cuBLAS"
    cublas_us: float | None = None
    rounds: int = 0
    started: float = field(default_factory=time.monotonic)
    deadline: float | None = None
    message: str = ""

    def lead(self, best: str, us: float, ratio: float | None) -> None:
        """Set the kernel and config that leads, and its figures.

        Args:
            best: The kernel and config.
            us: The time of a call in µs.
            ratio: The time of the base over it.
        """
        self.best, self.best_us, self.best_ratio = best, us, ratio

    @property
    def elapsed(self) -> float:
        """The seconds since it began."""
        return time.monotonic() - self.started

    @property
    def left(self) -> float | None:
        """The estimated seconds to its end, by the pace so far and the deadline; None where there
        is nothing to estimate from.
        """
        budget = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        missing = self.valid - self.known - self.screened
        if self.stage != "screening" or not self.screened:
            return budget
        pace = self.elapsed / self.screened * missing
        return pace if budget is None else min(pace, budget)


Report = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """Reports nothing."""

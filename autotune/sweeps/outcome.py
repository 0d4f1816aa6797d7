"""The results of a sweep, and its budget."""

import math
import threading
import time
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path

from outblas.autotune.measure.progress import Progress, Report
from outblas.autotune.store.records import BestConfig, Workload
from outblas.autotune.sweeps.tuner import Outcome

LEAST_SECONDS = 5.0  # minimum budget of a workload


@dataclass(frozen=True)
class Failure:
    """A workload that could not be tuned.

    Attributes:
        workload: The workload.
        reason: Why it could not be tuned.

    Example:
        >>> from outblas.autotune import Failure, Sweep, Workload
        >>> found = Sweep(failures=[Failure(Workload(64, 64, 64), "the worker died")])
        >>> for failure in found.failures:
        ...     print(f"{failure.workload}: {failure.reason}")
        64 bfloat16 nt: the worker died
    """

    workload: Workload
    reason: str


@dataclass
class Sweep:
    """The result of a sweep.

    Attributes:
        outcomes: What was found for each workload and GPU model.
        failures: The workloads that could not be tuned.
        seconds: How long the sweep took.
        store: The file of the store.

    Example:
        >>> from outblas.autotune import Sweep
        >>> found = Sweep()  # `sweep` returns it filled
        >>> [winner.config for winner in found.winners], found.finished
        ([], True)
    """

    outcomes: list[Outcome] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    store: Path | None = None

    def add(self, outcome: Outcome) -> None:
        """Add the outcome of a workload, and its failure if it failed.

        Args:
            outcome: What was found for one workload on one GPU model.
        """
        self.outcomes.append(outcome)
        if outcome.failure:
            self.failures.append(Failure(outcome.job.workload, outcome.failure))

    @property
    def winners(self) -> list[BestConfig]:
        """The fastest config of each workload on each GPU model."""
        winners = (outcome.winner for outcome in self.outcomes)
        return [winner for winner in winners if winner is not None]

    @property
    def finished(self) -> bool:
        """Whether every workload was tuned, and none ran out of time."""
        return not self.failures and all(outcome.finished for outcome in self.outcomes)


class Budget:
    """The seconds for many workloads on several workers; each workload gets an equal share of what
    is left.
    """

    def __init__(self, seconds: float | None, workloads: int, workers: int) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._left, self._workers = workloads, workers
        self._lock = threading.Lock()

    def share(self) -> float | None:
        """Returns the seconds for the next workload; None where it may take as long as it needs."""
        with self._lock:
            turns = max(1, math.ceil(self._left / self._workers))
            self._left -= 1
            if self._end is None:
                return None
            return max(LEAST_SECONDS, (self._end - time.monotonic()) / turns)


def one_at_a_time(report: Report) -> Report:
    """Wraps a report so that only one thread calls it at a time, with a copy that stays as it is,
    and never again after it raised.
    """
    lock, broken = threading.Lock(), threading.Event()

    def tell(progress: Progress) -> None:
        with lock:
            if broken.is_set():
                return
            try:
                report(replace(progress, failures=progress.failures.copy()))
            except Exception as error:
                broken.set()
                warnings.warn(f"progress is no longer reported: {error!r}", stacklevel=2)

    return tell

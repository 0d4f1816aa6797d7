"""How far a sweep has come: one snapshot for each workload that is being tuned."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ..store.records import Workload

Stage = Literal["waiting", "preparing", "screening", "finals", "done", "failed"]


@dataclass
class Progress:
    """One workload on one GPU (`gpu`: "0", a UUID or a host's name with it).

    `valid` configs are to be screened, of which `known` were in the store before, `screened` have
    been measured now, `compiling` and `compiled` wait for their turn. `failures` counts trials by
    status; `best` is the label of the fastest so far, `best_ratio` cuBLAS's time over its time.
    `deadline` is on the clock of `time.monotonic` (None: no budget). `rounds`: of the finals.
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
    best_ratio: float | None = None
    cublas_us: float | None = None
    rounds: int = 0
    started: float = field(default_factory=time.monotonic)
    deadline: float | None = None
    message: str = ""

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.started

    @property
    def left(self) -> float | None:
        """Seconds, as far as anyone can say: by the pace so far, within the deadline. None: nobody
        can.
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

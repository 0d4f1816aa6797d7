"""What a sweep is to do for a workload, and what came of it."""

from dataclasses import dataclass, field
from pathlib import Path

from outblas.autotune.search.prune import Plan
from outblas.autotune.search.strategy import ModelRanked, Strategy
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import BestConfig, Gpu, Trial, Workload
from outblas.autotune.sweeps.options import SweepOptions


@dataclass(frozen=True)
class Job:
    """What to tune: competing kernels, one workload, and how.

    Attributes:
        targets: the kernels.
        options: the options of the sweep.
        seconds: the time for the whole job; None: no limit.
        strategy: decides which configs are measured, and in which order.
    """

    targets: tuple[TuneTarget, ...]
    workload: Workload
    options: SweepOptions = field(default_factory=SweepOptions)
    seconds: float | None = None
    strategy: Strategy = field(default_factory=ModelRanked)


@dataclass(frozen=True)
class Unmeasured:
    """A config without a result, because something else went wrong. The next sweep tries it
    again.
    """

    kernel: str
    config: str
    reason: str


@dataclass
class Outcome:
    """What a sweep found for one workload on one GPU.

    Attributes:
        job: The kernels, the workload and the options.
        gpu: Where it was measured.
        plan: What was to be measured, and what was pruned.
        trials: All trials of the plan, those that the store had before included.
        new: How many of the trials were measured now.
        winners: The fastest config of each kernel.
        finished: Whether every config of the plan has a trial.
        failure: Why the job could not go on; "" where it did.
        unmeasured: Configs that could not be measured because something else went wrong, such as
            a worker that was killed. The next sweep tries them again.
        unlocked: Why the GPU was measured without a lock; "" where it was locked.

    Example:
        >>> from outblas.autotune import Outcome, Sweep
        >>> def report(found: Sweep) -> None:
        ...     for outcome in found.outcomes:  # Outcome records
        ...         print(outcome.job.workload, outcome.gpu.name, len(outcome.trials))
        >>> report(Sweep())
    """

    job: Job
    gpu: Gpu
    plan: Plan
    trials: list[Trial] = field(default_factory=list)
    new: int = 0
    winners: list[BestConfig] = field(default_factory=list)
    finished: bool = True
    failure: str = ""
    unmeasured: list[Unmeasured] = field(default_factory=list)
    unlocked: str = ""

    @property
    def winner(self) -> BestConfig | None:
        """The fastest config of all kernels; None where nothing could be measured."""
        return max(self.winners, key=lambda winner: winner.ratio, default=None)


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

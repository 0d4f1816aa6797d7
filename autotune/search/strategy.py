"""Search strategies: which valid configs of a workload are measured, and in which order.

A strategy is a class with one method to override, `propose`. Three come with this module: `Grid`,
`ModelRanked` (the default) and `Random`. The idea of a search as a class of one method is Helion's.
"""

import pkgutil
import random
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from outblas.autotune.search.candidates import Candidate
from outblas.autotune.store.records import Gpu, Trial, Workload

NAMES = ("grid", "ranked", "random")
_SEEDED = re.compile(r"random:(\d+)", re.ASCII)
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)


class StrategyError(ValueError):
    """An error for a strategy that proposed what is no candidate, or raised an exception.

    It ends the sweep. Trials that were measured before are in the store.

    Example:
        >>> from outblas.autotune import Gpu, Strategy, StrategyError, TuneTarget, Workload, plan
        >>> class Broken(Strategy):
        ...     def propose(self, search):
        ...         yield ["not a candidate"]
        >>> target = TuneTarget("portable", "outblas.kernels.portable")
        >>> gpu = Gpu("NVIDIA H100 80GB HBM3", 90, 132)
        >>> try:
        ...     plan([target], Workload(512, 512, 512), gpu, strategy=Broken())
        ... except StrategyError as error:
        ...     print(error)
        strategy Broken proposed 'not a candidate', expected one of search.candidates, at ...
    """


class Search:
    """The search for the best config of one workload on one GPU, as a strategy sees it.

    The arguments are attributes of the same names. The tuner makes the search; a strategy receives
    it.

    Args:
        workload: The product that is tuned.
        gpu: The GPU that it is tuned on.
        candidates: All valid configs of all kernels, in the order in which their spaces generate
            them. Configs that cannot run, or cannot be the fastest, have been pruned.
        trials: How many configs of each kernel may be measured; None for all.
        until: When screening ends, on the clock of `time.monotonic`; None without a budget.

    Example:
        >>> from outblas.autotune import Gpu, Search, Workload
        >>> search = Search(Workload(64, 64, 64), Gpu("CPU", 0, 0), candidates=[], trials=8)
        >>> search.best() is None, search.seconds_left, dict(search.measured)
        (True, None, {})
    """

    def __init__(
        self,
        workload: Workload,
        gpu: Gpu,
        candidates: Sequence[Candidate],
        *,
        trials: int | None = None,
        until: float | None = None,
    ) -> None:
        self.workload, self.gpu, self.trials, self.until = workload, gpu, trials, until
        self.candidates = tuple(candidates)
        self._by_text = {
            (candidate.target.name, candidate.text): candidate for candidate in self.candidates
        }
        self._measured: dict[Candidate, Trial] = {}

    @property
    def measured(self) -> Mapping[Candidate, Trial]:
        """The trials so far, by candidate, including those of earlier sweeps in the store.

        Trials that failed are there too: `Trial.ok` says whether `us` has a value.
        """
        return MappingProxyType(self._measured)

    @property
    def seconds_left(self) -> float | None:
        """The seconds that are left for screening; None without a budget."""
        return None if self.until is None else max(0.0, self.until - time.monotonic())

    def ranked(self) -> list[Candidate]:
        """Sort all candidates by the time that the model predicts.

        Returns:
            The candidates, the fastest by prediction first.
        """
        return sorted(self.candidates, key=lambda candidate: candidate.predicted_us)

    def best(self) -> Candidate | None:
        """Find the fastest candidate that was measured so far.

        Returns:
            The candidate; None while no trial is "ok".
        """
        times = {
            candidate: trial.us
            for candidate, trial in self._measured.items()
            if trial.ok and trial.us is not None
        }
        return min(times, key=times.__getitem__, default=None)

    def find(self, kernel: str, config: str) -> Candidate | None:
        """Look a candidate up by its config.

        Args:
            kernel: The name of the kernel.
            config: The config as text, as stores have it.

        Returns:
            The candidate; None where this config is not valid for the workload.
        """
        return self._by_text.get((kernel, config))

    def record(self, trial: Trial) -> None:
        """Add a trial to `measured`; the tuner calls this, not a strategy.

        Args:
            trial: The result of a candidate.
        """
        candidate = self.find(trial.kernel, trial.config)
        if candidate is not None:
            self._measured[candidate] = trial


class Strategy(ABC):
    """The base class of strategies, which decide what is measured and in which order.

    Override `propose`, and pass the class or an instance of it to `sweep(strategy=...)` or
    `outblas.tune(strategy=...)`, or its name to `outblas tune --strategy module:Class`.

    What the tuner does with the proposals:

    - It measures the config that each kernel would choose itself first, whether it is proposed or
      not: every other config has to beat it. It does the same with the config that won at this
      product with the other state of the weights, or without the epilogue.
    - It measures a config once. A config that the store has a result of is not measured again; its
      trial is in `search.measured` like any other.
    - It measures the first `search.trials` proposals of each kernel. When they are used up, or all
      candidates have been proposed, it does not ask for more.
    - A proposal that is not one of `search.candidates`, an exception, and 100 batches in a row
      without a new config raise `StrategyError`, which ends the sweep. What was measured is in the
      store.
    - The fastest configs go to the finals, as with every strategy.

    One object serves all workloads of a sweep, several at a time: keep state in local variables of
    `propose`. Draw random numbers from a seed and the workload, as `Random` does, so that a sweep
    that was killed makes the same proposals again when it resumes. With a Ray cluster the object
    stays in the driver.

    Example:
        Measure the eight configs that the model ranks first, and then all configs with the tile of
        the fastest of them:

        >>> from outblas.autotune import Strategy, SweepOptions
        >>> class SameTile(Strategy):
        ...     def propose(self, search):
        ...         yield search.ranked()[:8]
        ...         best = search.best()
        ...         if best is not None:
        ...             tile = best.footprint.tile_m, best.footprint.tile_n
        ...             yield [
        ...                 candidate
        ...                 for candidate in search.candidates
        ...                 if (candidate.footprint.tile_m, candidate.footprint.tile_n) == tile
        ...             ]
        >>> options = SweepOptions(strategy=SameTile, budget=600)
    """

    @abstractmethod
    def propose(self, search: Search) -> Iterable[Sequence[Candidate]]:
        """Yield batches of candidates, in the order in which they are to be measured.

        The next batch is requested when the last one has been measured, or when the budget left no
        time for the rest of it. The configs of a batch are compiled in parallel, ahead of their
        measurement, so that few large batches are faster than many small ones.

        Args:
            search: The candidates, and the trials so far.

        Returns:
            An iterable of batches; usually this method is a generator.
        """


class Grid(Strategy):
    """A strategy that measures all configs in the order in which the kernels generate them.

    Example:
        >>> from outblas.autotune import Grid, SweepOptions
        >>> options = SweepOptions(strategy=Grid)  # or strategy="grid"
    """

    def propose(self, search: Search) -> Iterable[Sequence[Candidate]]:
        yield search.candidates


class ModelRanked(Strategy):
    """The default strategy: the configs that the model predicts to be fastest come first.

    Example:
        >>> from outblas.autotune import ModelRanked, SweepOptions
        >>> options = SweepOptions(strategy=ModelRanked, trials=32)  # or strategy="ranked"
    """

    def propose(self, search: Search) -> Iterable[Sequence[Candidate]]:
        yield search.ranked()


@dataclass(frozen=True)
class Random(Strategy):
    """A strategy that measures the configs in a random order.

    The order depends on the seed and the workload only.

    Attributes:
        seed: The seed.

    Example:
        >>> from outblas.autotune import Random, SweepOptions
        >>> options = SweepOptions(strategy=Random(seed=7), trials=32)  # or strategy="random:7"
    """

    seed: int = 0

    def propose(self, search: Search) -> Iterable[Sequence[Candidate]]:
        shuffled = sorted(
            search.candidates, key=lambda candidate: (candidate.target.name, candidate.text)
        )
        random.Random(f"{self.seed} {search.workload}").shuffle(shuffled)
        yield shuffled


def strategy_of(strategy: str | Strategy | type[Strategy]) -> Strategy:
    """Returns a strategy from a name, a class, or an instance.

    Names are "grid", "ranked", "random", "random:SEED", and "module:Class" for a user's own
    strategy. Raises ValueError for another name, ImportError for a missing module, TypeError for an
    object that is not a strategy, or a class that cannot be created without arguments.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if isinstance(strategy, str):
        return _named(strategy)
    return _instance(strategy, repr(strategy))


def _named(name: str) -> Strategy:
    simple: dict[str, type[Strategy]] = {"grid": Grid, "ranked": ModelRanked, "random": Random}
    if name in simple:
        return simple[name]()
    if seeded := _SEEDED.fullmatch(name):
        return Random(int(seeded[1]))
    if not _CLASS.fullmatch(name):
        raise ValueError(
            f"strategy is {name!r}, expected one of {', '.join(NAMES)}, random:SEED or module:Class"
        )

    try:
        kind = pkgutil.resolve_name(name)
    except ImportError as error:
        raise ImportError(f"strategy is {name!r}, which cannot be imported: {error}") from error
    except AttributeError as error:
        raise ValueError(f"strategy is {name!r}, expected a class: {error}") from error
    return _instance(kind, repr(name))


def _instance(kind: Any, shown: str) -> Strategy:
    if not (isinstance(kind, type) and issubclass(kind, Strategy)):
        raise TypeError(f"strategy is {shown}, expected a subclass of outblas.autotune.Strategy")
    try:
        return kind()
    except TypeError as error:
        raise TypeError(
            f"strategy is {shown}, expected a class that can be made without arguments, or an "
            f"instance of it: {error}"
        ) from None

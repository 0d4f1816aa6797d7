"""Search strategies: which valid configs of a workload are measured, and in which order.

A strategy is a class with one method to override, `propose`. Three come with this module: `Grid`,
`ModelRanked` (the default) and `Random`. The idea of a search as a class of one method is Helion's.
"""

import importlib
import random
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..store.records import Gpu, Trial, Workload
from .candidates import Candidate

NAMES = ("grid", "ranked", "random")
_SEEDED = re.compile(r"random:(\d+)", re.ASCII)
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)


class StrategyError(ValueError):
    """A strategy proposed what is no candidate, or raised an exception of its own."""


class Search:
    """The search for the best config of one workload on one GPU, as a strategy sees it.

    Attributes:
        workload, gpu: what is tuned, and where.
        candidates: all valid configs of all kernels, in the order in which their spaces generate
            them. Pruning has already taken away what cannot run or cannot be the fastest.
        trials: how many configs of each kernel may be measured; None: as many as there are.
        until: when screening ends, on the clock of `time.monotonic`; None: when all is done.
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
        self._by_text = {(each.target.name, each.text): each for each in self.candidates}
        self._measured: dict[Candidate, Trial] = {}

    @property
    def measured(self) -> Mapping[Candidate, Trial]:
        """The trials so far, those of earlier sweeps that the store has among them.

        A trial that failed is there too: `Trial.ok` says whether its `us` counts.
        """
        return MappingProxyType(self._measured)

    @property
    def seconds_left(self) -> float | None:
        """The seconds that are left for screening; None where there is no budget."""
        return None if self.until is None else max(0.0, self.until - time.monotonic())

    def ranked(self) -> list[Candidate]:
        """All candidates, those first that the ranker predicts to be fastest."""
        return sorted(self.candidates, key=lambda candidate: candidate.predicted_us)

    def best(self) -> Candidate | None:
        """The fastest candidate of those measured so far; None before one is right."""
        times = {
            candidate: trial.us
            for candidate, trial in self._measured.items()
            if trial.ok and trial.us is not None
        }
        return min(times, key=times.__getitem__, default=None)

    def find(self, kernel: str, config: str) -> Candidate | None:
        """The candidate with this text of a config; None where it is not valid here."""
        return self._by_text.get((kernel, config))

    def record(self, trial: Trial) -> None:
        """Notes what became of a candidate. The tuner calls this, not a strategy."""
        candidate = self.find(trial.kernel, trial.config)
        if candidate is not None:
            self._measured[candidate] = trial


class Strategy(ABC):
    """Decides which configs are measured, and in which order.

    Override `propose`, and hand the class, or an instance of it, to `sweep(strategy=...)`,
    `outblas.tune(strategy=...)`, or by its name to `outblas tune --strategy module:Class`. This
    one measures the eight configs that the model likes best, and then all configs with the tile of
    the fastest of them:

        from outblas.autotune import Strategy, sweep

        class SameTile(Strategy):
            def propose(self, search):
                yield search.ranked()[:8]
                best = search.best()
                if best is not None:
                    tile = best.footprint.tile_m, best.footprint.tile_n
                    yield [
                        candidate
                        for candidate in search.candidates
                        if (candidate.footprint.tile_m, candidate.footprint.tile_n) == tile
                    ]

        found = sweep("portable", 4096, strategy=SameTile)

    What the tuner does with the proposals:

    - The kernels' own configs are measured first, whether they are proposed or not: every other
      config has to beat them. So is what won at the same product with the other state of its
      weights, or without its epilogue. A strategy that proposes nothing leaves it at these.
    - A config that is proposed twice is measured once. A config that the store has a result of is
      not measured again: its trial is in `search.measured` like any other.
    - Of each kernel the first `search.trials` proposals are measured, and its own config in any
      case. When they are used up, or when all candidates have been proposed, the strategy is not
      asked any more.
    - A proposal that is not one of `search.candidates`, an exception, and
      `plan.MOST_STALE_BATCHES` batches in a row without a new config raise StrategyError, which
      ends the sweep. What was measured is in the store.
    - The best configs of the screen go to the finals, as with every strategy.

    One object serves all workloads of a sweep, several at a time: keep state in local variables of
    `propose`. Random numbers should come from a seed and the workload, as those of `Random` do:
    a sweep that was killed goes on from the store, and makes the same proposals again. On a Ray
    cluster the object is pickled, and its module has to be importable on every node.
    """

    @abstractmethod
    def propose(self, search: Search) -> Iterable[Sequence[Candidate]]:
        """Yields batches of candidates, in the order in which they are to be measured.

        The next batch is asked for when the last one is measured, or when the budget left no time
        for the rest of it. Within a batch configs are compiled in parallel, ahead of their
        measurement: few large batches are faster than many small ones.
        """


class Grid(Strategy):
    """Measures all configs in the order in which the kernels' spaces generate them."""

    def propose(self, search: Search) -> Iterable[Sequence[Candidate]]:
        yield search.candidates


class ModelRanked(Strategy):
    """Measures the configs first that the ranker predicts to be the fastest. The default."""

    def propose(self, search: Search) -> Iterable[Sequence[Candidate]]:
        yield search.ranked()


@dataclass(frozen=True)
class Random(Strategy):
    """Measures the configs in a random order, which depends on the seed and the workload alone."""

    seed: int = 0

    def propose(self, search: Search) -> Iterable[Sequence[Candidate]]:
        shuffled = sorted(search.candidates, key=lambda each: (each.target.name, each.text))
        random.Random(f"{self.seed} {search.workload}").shuffle(shuffled)
        yield shuffled


def strategy_of(given: str | Strategy | type[Strategy]) -> Strategy:
    """A strategy by its name, a class, or an instance.

    Names are "grid", "ranked", "random", "random:SEED", and "module:Class" for a user's own.
    Raises ValueError for another name, ImportError for a module that is not there, TypeError for
    an object that is no strategy, or a class that cannot be made without arguments.
    """
    if isinstance(given, Strategy):
        return given
    if isinstance(given, str):
        return _named(given)
    return _made(given, repr(given))


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

    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ImportError(f"strategy is {name!r}, which cannot be imported: {error}") from error
    if not hasattr(module, class_name):
        raise ValueError(
            f"strategy is {name!r}, expected a class of {module_name}, which has no {class_name}"
        )
    return _made(getattr(module, class_name), repr(name))


def _made(given: Any, shown: str) -> Strategy:
    if not (isinstance(given, type) and issubclass(given, Strategy)):
        raise TypeError(f"strategy is {shown}, expected a subclass of outblas.autotune.Strategy")
    try:
        return given()
    except TypeError as error:
        raise TypeError(
            f"strategy is {shown}, expected a class that can be made without arguments, or an "
            f"instance of it: {error}"
        ) from None

"""The options of a sweep, as one record and as keywords."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict

from ...core.steps import Steps
from ..measure.isolated import TRIAL_SECONDS
from ..search import candidates
from ..search.candidates import Ranker
from ..search.strategy import Strategy
from ..store.records import WEIGHTS

Engine = Literal["local", "ray"]
ENGINES: tuple[Engine, ...] = ("local", "ray")
RANKERS = ("model", "heuristics")


@dataclass(frozen=True)
class SweepOptions:
    """How far a sweep goes, where it runs, how it measures, and what it takes from the store.

    Attributes:
        budget: seconds for all of it, of which a workload gets 5 at least; None: until all is done.
            A workload keeps a quarter of its share for the finals.
        trials: configs of each kernel to measure for each workload, the first that the strategy
            proposes; None: all valid ones.
        top_k: configs in the finals.
        strategy: which configs are measured, and in which order: "ranked" (the best by the ranker
            first), "grid", "random" or "random:SEED", "module:Class", or a `Strategy` of your own.
        ranker: what predicts times: "model", the analytic one, or "heuristics", NVIDIA's
            nvMatmulHeuristics.
        resume: whether results that the store has count; without it all is measured anew.
        retry_failed: whether configs that have failed are measured anew; those that are right,
            wrong or refused by the kernel are not.
        gpus: "all", indices ("0,1", 0, [0, 1]), or "cpu": the interpreter, for portable. Ignored
            with engine "ray".
        engine: "local", or "ray": one task a workload on a cluster.
        address: of the Ray cluster; by default the one that there is, or a local one.
        compile_workers: processes that compile; by default as many as the machine carries.
        trial_seconds: the seconds after which a config counts as hanging, besides its calls and
            the start of a worker.
        allow_unsaved: measure even where the store cannot be written, and keep results while the
            process lives.
        weights: "warm", or "cold": calls rotate over copies of B that L2 cannot hold together, as
            those of a model that decodes find none of their weights there.
        epilogue: what follows the product, some of bias, an activation and residual in this order,
            joined by "+"; "" for nothing. torch's own calls that do the same are the base.

    Raises ValueError for a number that is none.
    """

    budget: float | None = None
    trials: int | None = None
    top_k: int = 8
    strategy: str | Strategy | type[Strategy] = "ranked"
    ranker: str = "model"
    resume: bool = True
    retry_failed: bool = False
    gpus: str | int | Sequence[int] = "0"
    engine: Engine = "local"
    address: str | None = None
    compile_workers: int | None = None
    trial_seconds: float = TRIAL_SECONDS
    allow_unsaved: bool = False
    weights: str = "warm"
    epilogue: str = ""

    def __post_init__(self) -> None:
        for name in ("trials", "top_k", "compile_workers"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is {value!r}, expected an integer of at least 1")
        for name in ("budget", "trial_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and not (
                isinstance(seconds, int | float) and 0 < seconds < math.inf
            ):
                raise ValueError(f"{name} is {seconds!r}, expected seconds above 0")
        if self.engine not in ENGINES:
            raise ValueError(f"engine is {self.engine!r}, expected one of {', '.join(ENGINES)}")
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights is {self.weights!r}, expected one of {', '.join(WEIGHTS)}")
        Steps.parse(self.epilogue)


class SweepKeywords(TypedDict, total=False):
    """The fields of `SweepOptions` as keywords of `sweep`, for type checkers."""

    budget: float | None
    trials: int | None
    top_k: int
    strategy: str | Strategy | type[Strategy]
    ranker: str
    resume: bool
    retry_failed: bool
    gpus: str | int | Sequence[int]
    engine: Engine
    address: str | None
    compile_workers: int | None
    trial_seconds: float
    allow_unsaved: bool
    weights: str
    epilogue: str


def options_with(given: SweepOptions | None, keywords: SweepKeywords) -> SweepOptions:
    """Options with some of them changed. Raises TypeError for a keyword that is none of them."""
    known = {field.name for field in fields(SweepOptions)}
    for name in keywords:
        if name not in known:
            raise TypeError(f"sweep() got an unexpected keyword argument {name!r}")
    changes: Any = keywords
    return replace(given or SweepOptions(), **changes)


def ranker_of(name: str) -> Ranker:
    """Raises ValueError for an unknown name, ImportError where the library is missing."""
    if name not in RANKERS:
        raise ValueError(f"ranker is {name!r}, expected one of {', '.join(RANKERS)}")
    if name == "model":
        return candidates.by_model
    from ..search import nvmmh

    return nvmmh.ranker()

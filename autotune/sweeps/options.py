"""The options of a sweep, as one record and as keywords."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from outblas.autotune.measure.isolated import TRIAL_SECONDS
from outblas.autotune.search.strategy import Strategy
from outblas.autotune.store.records import WEIGHTS, Weights
from outblas.call.steps import Steps

Engine = Literal["local", "ray"]
ENGINES: tuple[Engine, ...] = ("local", "ray")


@dataclass(frozen=True)
class SweepOptions:
    """The options of a sweep: its budget, what it measures, where it runs.

    Attributes:
        budget: The seconds for all workloads together; None to measure everything. A workload gets
            5 seconds at least, and keeps a quarter of its share for the finals.
        trials: How many configs of each kernel to measure for each workload, the first that the
            strategy proposes; None for all valid ones.
        top_k: How many configs go to the finals.
        strategy: What orders the configs: "ranked" (by the model's prediction), "grid",
            "random", "random:SEED", "module:Class", or a `Strategy`.
        resume: Whether results in the store count. False measures everything again.
        retry_failed: Whether configs whose earlier trial failed are measured again. Configs that
            were right, wrong or refused by the kernel are not.
        gpus: "all", indices ("0,1", 0 or [0, 1]), or "cpu" for Triton's interpreter, which runs
            the portable kernel only. Ignored with engine "ray".
        engine: "local", or "ray" for one task per workload on a Ray cluster.
        address: The address of the Ray cluster; None for the running one, or else a local one.
        compile_workers: How many processes compile; None for as many as the machine can carry.
        trial_seconds: The seconds after which a config counts as hanging, not counting its own
            calls and the start of a worker.
        weights: "warm", or "cold" to rotate over copies of B that the L2 cache cannot hold
            together, as in a model that decodes.
        epilogue: What follows the product: some of bias, an activation and residual, in this
            order, joined by "+", such as "bias+gelu"; "" for nothing. Ratios are then to torch's
            own calls for the same work.

    Raises:
        ValueError: An option has a value that is none of its choices.

    Example:
        >>> from outblas.autotune import SweepOptions
        >>> options = SweepOptions(budget=600, trials=64, gpus="all")
        >>> SweepOptions(top_k=0)
        Traceback (most recent call last):
        ValueError: top_k is 0, expected an integer of at least 1
    """

    budget: float | None = None
    trials: int | None = None
    top_k: int = 8
    strategy: str | Strategy | type[Strategy] = "ranked"
    resume: bool = True
    retry_failed: bool = False
    gpus: str | int | Sequence[int] = "0"
    engine: Engine = "local"
    address: str | None = None
    compile_workers: int | None = None
    trial_seconds: float = TRIAL_SECONDS
    weights: Weights = "warm"
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
        for name, choices in (("engine", ENGINES), ("weights", WEIGHTS)):
            choice = getattr(self, name)
            if choice not in choices:
                raise ValueError(f"{name} is {choice!r}, expected one of {', '.join(choices)}")
        if self.address is not None and self.engine != "ray":
            raise ValueError(f"address is {self.address!r}, expected none without engine 'ray'")
        Steps.parse(self.epilogue)


class SweepKeywords(TypedDict, total=False):
    """The fields of `SweepOptions` as keywords of `sweep`, for type checkers."""

    budget: float | None
    trials: int | None
    top_k: int
    strategy: str | Strategy | type[Strategy]
    resume: bool
    retry_failed: bool
    gpus: str | int | Sequence[int]
    engine: Engine
    address: str | None
    compile_workers: int | None
    trial_seconds: float
    weights: Weights
    epilogue: str

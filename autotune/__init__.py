"""Autotuning: search spaces, pruning, search strategies, parallel compiles, isolated measurement, a
store of trials, choice of configs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outblas.autotune.automatic import tune
    from outblas.autotune.measure.progress import Progress
    from outblas.autotune.search.candidates import Candidate
    from outblas.autotune.search.plan import plan
    from outblas.autotune.search.strategy import (
        Grid,
        ModelRanked,
        Random,
        Search,
        Strategy,
        StrategyError,
    )
    from outblas.autotune.search.target import TuneTarget
    from outblas.autotune.store.records import BestConfig, Finalist, Gpu, Trial, Workload
    from outblas.autotune.store.store import Store, StoreError
    from outblas.autotune.sweeps.options import SweepOptions
    from outblas.autotune.sweeps.outcome import Failure, Outcome, Sweep
    from outblas.autotune.sweeps.sweep import sweep

_PLACES = {
    "automatic": ("tune",),
    "measure.progress": ("Progress",),
    "search.candidates": ("Candidate",),
    "search.plan": ("plan",),
    "search.strategy": ("Grid", "ModelRanked", "Random", "Search", "Strategy", "StrategyError"),
    "search.target": ("TuneTarget",),
    "store.records": ("BestConfig", "Finalist", "Gpu", "Trial", "Workload"),
    "store.store": ("Store", "StoreError"),
    "sweeps.options": ("SweepOptions",),
    "sweeps.outcome": ("Failure", "Outcome", "Sweep"),
    "sweeps.sweep": ("sweep",),
}
__all__ = [
    "BestConfig",
    "Candidate",
    "Failure",
    "Finalist",
    "Gpu",
    "Grid",
    "ModelRanked",
    "Outcome",
    "Progress",
    "Random",
    "Search",
    "Store",
    "StoreError",
    "Strategy",
    "StrategyError",
    "Sweep",
    "SweepOptions",
    "Trial",
    "TuneTarget",
    "Workload",
    "plan",
    "sweep",
    "tune",
]


# Type checkers know the names above, and must not accept any other name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Imports a name when it is first used, because a call of `matmul` needs only the
        lookup.
        """
        for module, names in _PLACES.items():
            if name in names:
                return getattr(import_module(f".{module}", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

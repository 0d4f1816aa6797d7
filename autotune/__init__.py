"""Autotuning: search spaces, pruning, parallel compiles, isolated measurement, a store of trials,
choice of configs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .automatic import tune
    from .measure.progress import Progress
    from .search.prune import plan
    from .search.target import Subject
    from .store.records import BestConfig, Finalist, Gpu, Trial, Winner, Workload
    from .store.store import Store, StoreError
    from .sweeps.outcome import Failure, Sweep
    from .sweeps.sweep import sweep
    from .sweeps.tuner import Outcome

_PLACES = {
    "automatic": ("tune",),
    "measure.progress": ("Progress",),
    "search.prune": ("plan",),
    "store.records": ("BestConfig", "Finalist", "Gpu", "Trial", "Winner", "Workload"),
    "store.store": ("Store", "StoreError"),
    "search.target": ("Subject",),
    "sweeps.outcome": ("Failure", "Sweep"),
    "sweeps.sweep": ("sweep",),
    "sweeps.tuner": ("Outcome",),
}
__all__ = [
    "BestConfig",
    "Failure",
    "Finalist",
    "Gpu",
    "Outcome",
    "Progress",
    "Store",
    "StoreError",
    "Subject",
    "Sweep",
    "Trial",
    "Winner",
    "Workload",
    "plan",
    "sweep",
    "tune",
]


def __getattr__(name: str) -> Any:
    """Imported when first asked for: a call of `matmul` needs the choice alone."""
    for module, names in _PLACES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

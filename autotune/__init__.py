"""Autotuning: search spaces, pruning, parallel compiles, isolated measurement, a store of trials,
choice of configs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .automatic import tune
    from .progress import Progress
    from .prune import plan
    from .records import Finalist, Gpu, Trial, Winner, Workload
    from .store import Store, StoreError
    from .subjects import Subject
    from .sweeping import Failure, Sweep, sweep
    from .tuning import Outcome

_PLACES = {
    "automatic": ("tune",),
    "progress": ("Progress",),
    "prune": ("plan",),
    "records": ("Finalist", "Gpu", "Trial", "Winner", "Workload"),
    "store": ("Store", "StoreError"),
    "subjects": ("Subject",),
    "sweeping": ("Failure", "Sweep", "sweep"),
    "tuning": ("Outcome",),
}
__all__ = [
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

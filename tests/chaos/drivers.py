"""What runs in the processes that campaigns start; functions are called by name, and return an exit
status.

Whatever a driver has stored it acknowledges in a file, at the moment when the store's call returns:
what is acknowledged has to be in the store from then on.
"""

import functools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outblas.autotune.measure import isolated
from outblas.autotune.measure.compile_pool import Compilers
from outblas.autotune.measure.progress import Progress
from outblas.autotune.search import gpu as gpus
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import to_record
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps import sweep as sweeping

from . import kernel
from .examine import examine, stock
from .objects import use_objects

__all__ = ["command", "examine", "say_time", "stock", "sweep", "use_objects"]

# Functions that start nothing: where they have returned, nothing is left to end in order.
ALONE = ("examine", "say_time", "stock", "use_objects")
NOT_FINISHED = (
    4  # exit status of a sweep that ended by itself, and not with all that was asked of it
)
SUBJECT = TuneTarget("chaos", kernel.__name__)
SHAPE = (16, 16, 16)
COMPILE_SECONDS = 5.0


def sweep(
    store: str,
    acknowledged: str,
    compiled: bool = True,
    trial_seconds: float = 6.0,
    shapes: Sequence[Sequence[int]] | None = None,
    **options: Any,
) -> int:
    """One sweep of the chaos kernel. `compiled`: as if for an H100, so that configs are compiled
    ahead.
    """
    acknowledge(Path(acknowledged))
    if compiled:
        pretend_h100()
    wanted = [(m, n, k) for m, n, k in shapes or [SHAPE]]
    common: dict[str, Any] = {
        "dtype": "float32",
        "layout": "nn",
        "gpus": "cpu",
        "top_k": 2,
        "compile_workers": 1,
    }
    found = sweeping.sweep(
        SUBJECT,
        wanted,
        store=store,
        trial_seconds=trial_seconds,
        progress=Stages(),
        **(common | options),
    )
    answer = {
        "finished": found.finished,
        "new": sum(outcome.new for outcome in found.outcomes),
        "trials": sum(len(outcome.trials) for outcome in found.outcomes),
        "winners": len(found.winners),
        "failures": [failure.reason for failure in found.failures],
    }
    print(json.dumps(answer), flush=True)
    return 0 if found.finished else NOT_FINISHED


def command(arguments: list[str], acknowledged: str | None = None) -> int:
    """The command line, in which "portable" is the chaos kernel."""
    from outblas.cli import app

    if acknowledged is not None:
        acknowledge(Path(acknowledged))
    sweeping.target_of = lambda name: SUBJECT  # type: ignore[assignment]
    sys.argv = ["outblas", *arguments]
    app(arguments)  # ends with SystemExit
    return 0


def acknowledge(path: Path) -> None:
    """Notes what the store has taken: each trial and each winner, in full, with the driver that
    measured it.
    """
    driver = os.environ[kernel.MARK]
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    add, record_best = Store.add, Store.record_best

    def tell(kind: str, record: Any) -> None:
        os.write(file, json.dumps({"driver": driver, kind: to_record(record)}).encode() + b"\n")

    @functools.wraps(add)
    def add_and_tell(self: Store, trial: Any, **options: Any) -> Any:
        added = add(self, trial, **options)
        if added:
            tell("trial", trial)
        return added

    @functools.wraps(record_best)
    def record_best_and_tell(self: Store, winner: Any, **options: Any) -> Any:
        found = record_best(self, winner, **options)
        tell("winner", winner)
        return found

    Store.add = add_and_tell  # type: ignore[method-assign]
    Store.record_best = record_best_and_tell  # type: ignore[assignment, method-assign]


def pretend_h100() -> None:
    """A sweep compiles ahead where there is a GPU: the CPU measures under the name of one."""
    h100 = gpus.imagined("h100")
    isolated.MeasureWorker.describe = lambda self: h100  # type: ignore[method-assign]
    # Only for ["cpu"] alone there are no compilers. The second finds nothing to do, and starts no
    # worker.
    sweeping.visible_gpus = lambda gpus: ["cpu", "cpu"]
    assert Compilers.__init__.__kwdefaults__ is not None
    Compilers.__init__.__kwdefaults__["timeout"] = COMPILE_SECONDS


def say_time() -> int:
    """Seconds since 1970, by this process's clock."""
    print(json.dumps({"time": time.time()}))
    return 0


class Stages:
    """Notes beside the measurements when this driver begins its finals: what follows is measured
    again on purpose.
    """

    def __init__(self) -> None:
        self._racing = False

    def __call__(self, progress: Progress) -> None:
        racing = progress.stage in ("finals", "done")
        if racing and not self._racing:
            kernel.note("finals", "-")
        self._racing = racing

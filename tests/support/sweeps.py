"""Sweeps of tests/support/faulty_kernel.py without a GPU, in this process and in ones that can be
killed.
"""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outblas.autotune.search import gpu
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import Workload
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps.sweep import Sweep, sweep

SUBJECT = TuneTarget("faulty", "support.faulty_kernel")
WORKLOAD = Workload(16, 16, 16, "float32", layout="nn")
H100 = gpu.imagined("h100")
OPTIONS: dict[str, Any] = {"dtype": "float32", "layout": "nn", "gpus": "cpu"}


def run(path: Path | Store, **options: Any) -> Sweep:
    return sweep(SUBJECT, 16, store=path, **({"top_k": 2} | OPTIONS | options))


def descendants(ancestor: int) -> list[int]:
    """The processes below one, however far."""
    parents: dict[int, int] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError):
            parents[int(name)] = int(
                Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]
            )
    below = [ancestor]
    for process in below:
        below += [child for child, parent in parents.items() if parent == process]
    return below[1:]


def gone(process: int) -> bool:
    """Whether a process has ended, reaped by somebody or not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def soon(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()

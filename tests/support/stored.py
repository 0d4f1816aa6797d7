"""Trials and winners to keep, and what tests do to the file that keeps them."""

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import outblas
from outblas import autotune
from outblas.autotune.store.records import BestConfig, Finalist, Gpu, Trial, Workload
from outblas.autotune.store.store import Store

H100 = Gpu("NVIDIA H100 80GB HBM3", 90, 132, 700, "570.1", "12.8", "2.11.0", "3.6.0", "4.8.1")
H200 = Gpu("NVIDIA H200", 90, 132)
INTERPRETED = Gpu("CPU, interpreted, x86_64", 0, 0)
WORKLOAD = Workload(4096, 4096, 4096)
FINALIST = Finalist(
    kernel="hopper.hilbert",
    config="tile_m=128,sms=4",
    us=200.5,
    ratio=1.047,
    ratio_low=1.04,
    ratio_high=1.05,
)
OTHER = Workload(16, 4096, 4096, "float16", "float32", "nn")
# The beginning of a program that uses `outblas.autotune` without what `import outblas` imports
# besides: torch takes seconds.
BARE = f"""
import sys, types
places = {{"outblas": {outblas.__path__[0]!r}, "outblas.autotune": {autotune.__path__[0]!r}}}
for name, place in places.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [place]
"""


def trial(i: int = 0, **changes: Any) -> Trial:
    fields: dict[str, Any] = {
        "gpu": H100,
        "workload": WORKLOAD,
        "kernel": "hopper.hilbert",
        "source": "abc",
        "config": f"tile_m=128,sms={i},order=hilbert,phases=False",
        "status": "ok",
        "us": 100.0 + i,
        "ratio": 1.01,
        "ratio_low": 1.0,
        "ratio_high": 1.02,
        "clock_mhz": 1700.0,
        "when": f"2026-01-{1 + i // 1440 % 28:02}T{i // 60 % 24:02}:{i % 60:02}:00+00:00",
    }
    return Trial(**fields | changes)


def failed(i: int = 0, **changes: Any) -> Trial:
    none = dict.fromkeys(("us", "ratio", "ratio_low", "ratio_high", "clock_mhz"))
    return trial(i, **{"status": "hang", "reason": "not done in 30 s"} | none | changes)


def winner(**changes: Any) -> BestConfig:
    fields = vars(FINALIST) | {
        "gpu": H100,
        "workload": WORKLOAD,
        "source": "abc",
        "cublas_us": 210.0,
        "rounds": 30,
        "runner_up": "tile_m=64",
        "lead": 1.01,
        "lead_low": 1.005,
        "lead_high": 1.02,
        "confidence": 0.99,
        "screened": 60,
        "valid": 80,
        "finalists": (FINALIST, FINALIST),
        "when": "2026-02-01T00:00:00+00:00",
    }
    return BestConfig(**fields | changes)


def fill(path: Path, count: int = 3) -> list[Trial]:
    trials = [trial(i) for i in range(count)]
    with Store(path) as store:
        store.merge(trials, [winner()])
    return trials


def kept(path: Path, **options: bool) -> list[Trial]:
    """The trials of a store that nothing is wrong with."""
    with Store(path, **options) as store:
        store.verify()
        return store.trials()


def sql(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def set_aside(path: Path) -> list[Path]:
    return list(path.parent.glob(f"{path.name}.damaged-*Z"))


DAMAGES = (
    "a byte",
    "some bytes",
    "a page overwritten",
    "a page of zeros",
    "pages swapped",
    "cut off",
)


def damage(path, random):
    """Does something to a store's file that disks, file systems and people do; returns what, in
    words.

    `random` is a `random.Random`, so that a seed repeats it.
    """
    data = bytearray(path.read_bytes())
    page = int.from_bytes(data[16:18], "big") or 4096
    pages = max(len(data) // page, 1)
    what = random.choice(DAMAGES)
    place = random.randrange(len(data))
    first, second = random.randrange(pages) * page, random.randrange(pages) * page
    if what == "a byte":
        data[place] ^= random.randrange(1, 256)
    elif what == "some bytes":
        data[place : place + 40] = random.randbytes(len(data[place : place + 40]))
    elif what == "a page overwritten":
        data[first : first + page] = random.randbytes(page)
    elif what == "a page of zeros":
        data[first : first + page] = bytes(page)
    elif what == "pages swapped":
        data[first : first + page], data[second : second + page] = (
            data[second : second + page],
            data[first : first + page],
        )
    else:
        del data[place:]
    path.write_bytes(data)
    return f"{what} at {first}, {second} or {place}"

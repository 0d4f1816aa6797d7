"""Entries of results on the Hopper ladder."""

from typing import Any

from outblas.report import rungs
from support.reports import Entry, counted, entry

CLIMB = rungs.names("hopper")[:10]  # up to hopper.hilbert


def profile(provider: str, rate: float, n: int = 4096, **changes: Any) -> Entry:
    """A profile with a hit rate of L2."""
    of_ladder = {"dtype": "bfloat16", "layout": "nt"}
    return counted(provider, "", n, **of_ladder, l2_hit_rate=rate, registers=168) | changes


# cuBLAS, whose clock falls with the size.
_CUBLAS = [
    entry("cublas", 1.0, n, check="–", clock_mhz=mhz)
    for n, mhz in ((1024, 1780), (4096, 1640), (8192, 1600))
]
# Each rung is 0.07 of cuBLAS faster than the one before.
_RUNGS = [
    entry(rung, 0.4 + 0.07 * place, n) for place, rung in enumerate(CLIMB) for n in (4096, 8192)
]
_OTHER_SIZES = [
    *(entry(CLIMB[-1], 1.2, n, ratio_apart=1.1, us_apart=3.5, us=3.0) for n in (512, 1024)),
    entry(CLIMB[-1], 1.05, 2048),
    entry(CLIMB[-1], 0.99, 16384),
]
# Every rung at two sizes, and the last at all.
CLIMBED = [*_CUBLAS, *_RUNGS, *_OTHER_SIZES]

PERSISTENT = profile("hopper.persistent", 0.84, resolved="tile_m=128,tile_n=256,stages=3")
COUNTED = [
    profile("cublas", 0.70),
    PERSISTENT,
    profile("hopper.persistent", 0.6, config="order=consecutive"),
    profile("hopper.hilbert", 0.88, 8192),
]

"""Entries of results on the CUDA-core ladder."""

from typing import Any

from outblas.report import rungs
from support import reports
from support.reports import Entry

CLIMB = rungs.names("simt")

# Configs of simt.vectorized by which of its accesses to shared memory have bank conflicts.
BOTH_CONFLICT, LOADS_CONFLICT, STORES_CONFLICT = "pad=0,piece_n=8", "piece_n=8", "pad=0"
# 003's own form of its v06, a simt.warptile.
V06 = (
    "block_m=64,block_n=64,block_k=8,warp_m=32,warp_n=16,thread_m=4,thread_n=4,piece_m=4,"
    "prefetch=False"
)


def timed(provider: str, ratio: float, n: int = 4096, **changes: Any) -> Entry:
    """A timing in the ladder's own dtype and layout, where cuBLAS takes 2700 µs for 50 TFLOP/s."""
    of_ladder = {"dtype": "float32", "layout": "nn"}
    figures = {"tflops": 50 * ratio, "us": 2700 / ratio, "utilisation": 0.85 * ratio}
    return reports.entry(provider, ratio, n, **of_ladder | figures | changes)


# Every rung at both sizes, each 0.12 of cuBLAS faster than the one before.
CLIMBED = [
    *(timed("cublas", 1.0, n, check="–") for n in (2048, 4096)),
    *(
        timed(rung, 0.02 + 0.12 * place, n)
        for place, rung in enumerate(CLIMB)
        for n in (2048, 4096)
    ),
]
MIXED_REGISTER = timed("simt.register", 0.05, dtype="bfloat16", tflops=20.0)
COUNTED_REGISTER = reports.counted(
    "simt.register", ipc=2.97, fma_active=0.64, occupancy=0.18, registers=165
)

"""The budgets and bounds that the documents reason with: sizes in bytes, intensities in FLOP per
byte of memory, bandwidths in TB/s.
"""

import math
from collections.abc import Iterable
from functools import partial

from outblas.core.machines import MACHINES
from outblas.device.access import of_request

from ..claim import number

H100, T4 = MACHINES["H100"], MACHINES["T4"]
LANES = 32
N = 4096
SMALL_N = 2048  # the size of 003 up to v09; from v10 on it is N
CTA_THREADS = 256
BF16, FP16, FP32 = 2, 2, 4  # bytes

exact = partial(number, within=0)


def stage_bytes(tile_m: int, tile_n: int, tile_k: int, itemsize: int) -> int:
    """Bytes of shared memory of one stage: a k tile of A and one of B."""
    return (tile_m + tile_n) * tile_k * itemsize


def stages_that_fit(tile_m: int, tile_n: int, tile_k: int, beside: int = 0) -> int:
    """The bf16 stages that fit in the shared memory of an H100's CTA beside other bytes."""
    return (H100.shared_memory_per_cta - beside) // stage_bytes(tile_m, tile_n, tile_k, BF16)


def warp_lines(bytes_a_lane: int) -> int:
    """The 128-byte lines that a warp touches when its lanes load so many adjacent bytes each."""
    return math.ceil(LANES * bytes_a_lane / 128)


def strided_lines(stride: int) -> int:
    """The 128-byte lines that a warp touches when its lanes load words this many bytes apart (0:
    all lanes load the same word).
    """
    return len({lane * stride // 128 for lane in range(LANES)})


def conflict_ways(starts: Iterable[int], width: int = 1) -> float:
    """The wavefronts of a warp's request to shared memory over those that it needs at least.

    Every lane requests `width` words from its start on.
    """
    wavefronts, needed = of_request(tuple(starts), width)
    return wavefronts / needed


def tile_traffic(n: int, tile_m: int, tile_n: int, itemsize: int = FP32) -> float:
    """The bytes that all CTAs load for an n×n product: every k tile of A and B once for each tile
    of C.
    """
    return itemsize * n**3 * (1 / tile_m + 1 / tile_n)

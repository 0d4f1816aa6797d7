"""Budgets and bounds that the seed documents reason with, as formulas.

Sizes are in bytes, intensities in FLOP per byte of memory, bandwidths in TB/s.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from ..device.access import of_request
from ..inspect.occupancy import occupancy
from ..machines import MACHINES

H100, T4 = MACHINES["H100"], MACHINES["T4"]
LANES = 32
N = 4096
BF16, FP16, FP32 = 2, 2, 4


def intensity(tile_m: int, tile_n: int, itemsize: int) -> float:
    """FLOP per byte of operands of a CTA tile, each slice of A and B fetched once."""
    return 2 * tile_m * tile_n / ((tile_m + tile_n) * itemsize)


def slice_bytes(tile_m: int, tile_n: int, tile_k: int, itemsize: int) -> int:
    """Shared memory of one slot: a slice of A and one of B."""
    return (tile_m + tile_n) * tile_k * itemsize


def slots_that_fit(tile_m: int, tile_n: int, tile_k: int, beside: int = 0) -> int:
    """bf16 slots that fit in an H100's CTA beside other bytes of shared memory."""
    return (H100.shared_memory_per_cta - beside) // slice_bytes(tile_m, tile_n, tile_k, BF16)


def v10_shared_bytes() -> int:
    """003 v10: two slots of 32×16 and 16×64 halves, and the 32×64 fp32 tile of its epilogue, unpadded."""
    return 2 * slice_bytes(32, 64, 16, FP16) + 32 * 64 * FP32


def v11_shared_bytes() -> int:
    """003 v11: A as 128 rows of 40 halves, B as 32 rows of 136, padding included."""
    return (128 * 40 + 32 * 136) * FP16


def warptile_share() -> float:
    """000 kernel 7: share of an H100's warps at 165 registers, four warps and 128×16 tiles of A and B in fp32."""
    return occupancy(H100, 165, slice_bytes(128, 128, 16, FP32), 128).share


def v11_ctas() -> int:
    """003 v11 on a T4: 116 registers, 256 threads."""
    return occupancy(T4, 116, v11_shared_bytes(), 256).ctas_per_sm


def fragment_bandwidth() -> float:
    """TB/s of operands that 65 TFLOP/s of 16×16×16 fragments read, none reused: 003 v07."""
    return 65 / (2 * 16**3 / (2 * 16 * 16 * FP16))


def warp_lines(bytes_a_lane: int) -> int:
    """128-byte lines that a warp touches when its lanes load so many bytes each, side by side."""
    return ceil(LANES * bytes_a_lane / 128)


def strided_lines(stride: int) -> int:
    """128-byte lines that a warp touches when its lanes load words this many bytes apart; 0: all the same one."""
    return len({lane * stride // 128 for lane in range(LANES)})


def ways(starts: Iterable[int], width: int = 1) -> float:
    """Wavefronts of a warp's request to shared memory over those that it needs: every lane asks for `width` words from
    its own on."""
    wavefronts, needed = of_request(tuple(starts), width)
    return wavefronts / needed


def transposed_ways(block_k: int, stride: int) -> float:
    """Bank conflicts of storing A's tile transposed, rows `stride` words apart: a lane has four values along K, and as
    many lanes as a row of the tile needs stand side by side. 000, kernels 6 and 7."""
    across = block_k // 4
    return ways((lane % across) * 4 * stride + lane // across for lane in range(LANES))


def store_ways(block_k: int, stride: int) -> float:
    """Wavefronts a request of storing both 128-wide tiles: A's as in `transposed_ways`, word by word; B's in requests
    of 128 bits, four wavefronts each, and a quarter as many."""
    return (4 * transposed_ways(block_k, stride) + 4) / 5


def tile_traffic(n: int, tile_m: int, tile_n: int, itemsize: int = FP32) -> float:
    """Bytes that all CTAs load for an n×n product, every slice of A and B once for each tile of C."""
    return itemsize * n**3 * (1 / tile_m + 1 / tile_n)


def tiles_limit_tflops(n: int, tile_m: int, tile_n: int) -> float:
    """TFLOP/s of an H100 on which each tile of an n×n product keeps one SM busy, at the data sheet's clock."""
    tiles = ceil(n / tile_m) * ceil(n / tile_n)
    return min(1.0, tiles / H100.sms) * H100.peak_tflops("bfloat16")


def ridge_share(n: int) -> float:
    """Intensity of an n×n bf16 product, each matrix moved once, over an H100's ridge point of DRAM and tensor cores."""
    return (2 * n**3 / (3 * n * n * BF16)) * H100.dram_gbs / (H100.peak_tflops("bfloat16") * 1e3)

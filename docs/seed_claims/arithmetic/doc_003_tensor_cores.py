"""Document 003 on a T4: its kernels on tensor cores (v07 to v11) and its thesis."""

import math
from statistics import NormalDist

from outblas.core.machines import KIB
from outblas.inspect.occupancy import occupancy

from ..claim import DIFFERS, Claim, number
from .formulas import CTA_THREADS, FP16, FP32, SMALL_N, T4, N, exact, stage_bytes, tile_traffic


def v10_shared_bytes() -> int:
    """The shared memory of v10: two stages of 32×16 and 16×64 halves, and the 32×64 fp32 tile
    of its epilogue, unpadded.
    """
    return 2 * stage_bytes(32, 64, 16, FP16) + 32 * 64 * FP32


def v11_shared_bytes() -> int:
    """The shared memory of v11: A is 128 rows of 40 halves, B 32 rows of 136, with padding."""
    return (128 * 40 + 32 * 136) * FP16


def v11_ctas() -> int:
    """The CTAs of v11 that an SM of a T4 holds, with 116 registers and 256 threads."""
    return occupancy(T4, 116, v11_shared_bytes(), 256).ctas_per_sm


def fragment_bandwidth() -> float:
    """The TB/s of operands that v07's 16×16×16 fragments read at 65 TFLOP/s, without reuse."""
    return 65 / (2 * 16**3 / (2 * 16 * 16 * FP16))


def _sector_traffic() -> float:
    """The bytes of the sectors that v07's 16×16 fragments touch: an instruction takes 16 bytes of a
    row, and a sector has 32.
    """
    return 2 * tile_traffic(SMALL_N, 16, 16, FP16)


def _largest_error() -> float:
    """The largest error to expect of v11 if the outputs had nothing to do with the right ones.

    That is the largest of 4096² differences of two independent sums of 4096 products. Operands are
    uniform in [-1, 1], hence products have a variance of 1/9.
    """
    deviation = math.sqrt(2 * N / 9)
    return deviation * NormalDist().inv_cdf(1 - 1 / (2 * N**2))


CLAIMS: tuple[Claim, ...] = (
    number(
        "003 v07",
        "tensor cores at 65 TFLOP/s need 65 TB/s of operands",
        "bytes of 16×16×16 fragments, none reused",
        65,
        fragment_bandwidth,
        "{:.1f} TB/s, 25 times what DRAM gives",
    ),
    exact(
        "003 v10",
        "vectorized loads of a 32×16 tile leave 75% of 256 threads idle",
        "8 halves a thread",
        0.75,
        lambda: 1 - 32 * 16 / 8 / CTA_THREADS,
        "{:.0%} idle",
    ),
    number(
        "003 v10",
        "double buffering takes 37 KB of shared memory",
        "bytes of both stages and the epilogue's tile",
        37,
        lambda: v10_shared_bytes() / KIB,
        "{:.0f} KiB",
    ),
    number(
        "003 v10",
        "it runs at 105% of the bandwidth ceiling of 37 FLOP/byte",
        "12.38 TFLOP/s over 320 GB/s × its 137.44 GFLOP over 1.14 GB",
        1.05,
        lambda: 12380 / (320 * 137.44 / 1.14),
        "{:.0%}: the counters give 120.6 FLOP/byte; 37 is 2048's FLOP over 464 MB",
    ),
    exact(
        "003 v11",
        "its buffers take 18944 bytes",
        "padded rows of A and B",
        18944,
        v11_shared_bytes,
        "{:.0f}",
    ),
    exact(
        "003 v11",
        "116 registers a thread allow two CTAs an SM, 49.4% of the warps",
        "occupancy of 256 threads on a T4",
        2,
        v11_ctas,
        "{:.0f} CTAs an SM, 50% of the warps at most",
    ),
    number(
        "003 conclusion",
        "v11 is 5.7 times v10",
        "both at 4096: 17.058 and 12.380 TFLOP/s",
        5.7,
        lambda: 17.058 / 12.380,
        "{:.2f} times; 5.7 sets v11 at 4096 beside v10 at 2048",
        otherwise=DIFFERS,
    ),
    exact(
        "003 v07",
        "a 16×16×16 product is one instruction of the tensor cores",
        "HMMA.1688, 16×8×8, that a T4 has for it",
        1,
        lambda: 16**3 / (16 * 8 * 8),
        "{:.0f}, of 2048 FLOP each",
    ),
    exact(
        "003 v07",
        "it does 128 times the FLOP of an FFMA's instruction",
        "8192 over 64",
        128,
        lambda: 2 * 16**3 / (2 * 32),
        "{:.0f} times, of four instructions together",
    ),
    number(
        "003 v07",
        "its global loads are 4.29 GB",
        "sectors of 32 bytes that 16×16 fragments touch, 16 bytes of a row at a time",
        4.29,
        lambda: _sector_traffic() / 1e9,
        "{:.2f} GB, twice the bytes that it uses",
    ),
    number(
        "003 v07",
        "its counters give 13.4 FLOP per byte of DRAM",
        "17.18 GFLOP over 1.28 GB",
        13.4,
        lambda: 2 * SMALL_N**3 / 1.28e9,
        "{:.1f} FLOP/byte",
    ),
    number(
        "003 v08",
        "staging in shared memory cuts loads by BN/16 = 4",
        "bytes of fragments over those of 32×64 tiles",
        4,
        lambda: tile_traffic(SMALL_N, 16, 16, FP16) / tile_traffic(SMALL_N, 32, 64, FP16),
        "{:.2f} times: A's fall to a quarter, B's to a half",
    ),
    number(
        "003 v08",
        "its global loads are 801 MB",
        "32×64 tiles at 2048",
        0.801,
        lambda: tile_traffic(SMALL_N, 32, 64, FP16) / 1e9,
        "{:.3f} GB",
    ),
    number(
        "003 v08",
        "DRAM traffic falls 1.9 times from v07",
        "its own counters: 1.28 GB over 662 MB",
        1.9,
        lambda: 1280 / 662,
        "{:.2f} times",
    ),
    number(
        "003 v09",
        "its epilogue executes 4.19 million FFMAs: M·N",
        "2048²",
        4.19e6,
        lambda: SMALL_N**2,
        "{:,.0f}",
        within=0.002,
    ),
    exact(
        "003 v10",
        "a 32×16 tile is 64 loads of 8 halves",
        "elements over 8",
        64,
        lambda: 32 * 16 / 8,
        "{:.0f}, for 256 threads",
    ),
    exact(
        "003 v10",
        "a 16×64 tile is 128 loads of 8 halves",
        "elements over 8",
        128,
        lambda: 16 * 64 / 8,
        "{:.0f}, for 256 threads",
    ),
    exact(
        "003 v10",
        "that is 3 threads per load of A",
        "256 threads over 64 loads",
        3,
        lambda: CTA_THREADS / 64,
        "{:.0f}",
    ),
    exact(
        "003 v10",
        "float4 stores halve the store instructions of the epilogue",
        "floats of one store",
        2,
        lambda: 4,
        "a quarter: {:.0f} floats a store",
    ),
    exact(
        "003 v10",
        "its shared memory limits it to one CTA an SM, 25% of the warps",
        "CTAs of 256 threads and 14 KiB on a T4, registers aside",
        1,
        lambda: occupancy(T4, 64, v10_shared_bytes(), CTA_THREADS).ctas_per_sm,
        "{:.0f} CTAs, every warp: its own counter says 98.3%",
    ),
    number(
        "003 v10",
        "its counters give 120.6 FLOP per byte of DRAM",
        "137.44 GFLOP over the 464 MB that its table has read; its 1.14 GB is in no table",
        120.6,
        lambda: 2 * N**3 / 464e6,
        "{:.0f} FLOP/byte of what is read; 120.6 is 137.44 over 1.14",
        otherwise=DIFFERS,
    ),
    number(
        "003 v10",
        "its global loads, 780 MB, are similar to v08's and v09's",
        "32×64 tiles at 4096",
        0.780,
        lambda: tile_traffic(N, 32, 64, FP16) / 1e9,
        "{:.2f} GB at 4096, where it was counted; 0.81 GB at 2048",
    ),
    exact(
        "003 v11",
        "three CTAs of 18944 bytes fit in a T4's shared memory",
        "64 KiB over them",
        3,
        lambda: T4.shared_memory_per_sm // v11_shared_bytes(),
        "{:.0f}",
    ),
    exact(
        "003 v11",
        "every thread loads twice from A and twice from B",
        "128×32 halves by 8 over 256 threads",
        2,
        lambda: 128 * 32 / 8 / CTA_THREADS,
        "{:.0f}",
    ),
    number(
        "003 v11",
        "residency doubles from v10's 25% to 49.4%",
        "its own counters: 49.4% over v10's 98.3%",
        1.97,
        lambda: 49.4 / 98.3,
        "{:.2f} times: v10's table has 98.3%",
    ),
    exact(
        "003 v11",
        "ldmatrix.x4 brings 256 bits",
        "four matrices of 8×8 halves",
        256,
        lambda: 4 * 8 * 8 * 16,
        "{:.0f} bits: 512 bytes, 8 clocks of a T4's shared memory",
    ),
    number(
        "003 v11",
        "the swapped addresses gave a largest error of 162",
        "largest of 4096² errors, unrelated sums of products of operands uniform in [-1, 1]",
        162,
        _largest_error,
        "{:.0f}: what wrong products come to anyway",
    ),
    number(
        "003 v11",
        "it reaches 26.2% of the tensor peak",
        "17.058 over 65 TFLOP/s",
        0.262,
        lambda: 17.058 / T4.peak_tflops("float16"),
        "{:.1%}",
    ),
    exact(
        "003 thesis",
        "19 KB a CTA force more than 2 CTAs an SM",
        "occupancy of v11 on a T4",
        3,
        v11_ctas,
        "{:.0f}: registers allow no third",
    ),
    number(
        "003 thesis",
        "cuBLAS's 40 TFLOP/s are 62% of the tensor peak",
        "over 65.1",
        0.62,
        lambda: 40 / T4.peak_tflops("float16"),
        "{:.1%}",
    ),
)

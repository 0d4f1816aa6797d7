"""Claims of document 003, the T4, that arithmetic settles."""

from __future__ import annotations

from ..machines import KIB
from .budgets import (
    FP32,
    T4,
    fragment_bandwidth,
    intensity,
    v10_shared_bytes,
    v11_ctas,
    v11_shared_bytes,
    warp_lines,
)
from .claims import DIFFERS, Claim, number

CLAIMS: tuple[Claim, ...] = (
    number(
        "003 hardware",
        "FP16 ridge point of a T4: 203 FLOP/byte",
        "tensor peak over DRAM bandwidth, table of machines",
        203,
        lambda: T4.peak_tflops("float16") * 1e3 / T4.dram_gbs,
        "{:.0f} FLOP/byte",
    ),
    number(
        "003 v01",
        "the naive kernel does 0.25 FLOP per byte it loads",
        "2K FLOP over 2K fp32 values",
        0.25,
        lambda: 2 * 2048 / (2 * 2048 * FP32),
        "{:.2f} FLOP/byte",
        within=0,
    ),
    number(
        "003 v01",
        "its DRAM counter gives 0.25 FLOP/byte too: 17.18 GFLOP over 4.3 GB",
        "divided",
        0.25,
        lambda: 2 * 2048**3 / 4.3e9,
        "{:.1f} FLOP/byte: 16 times the formula, for most loads never reach DRAM",
    ),
    number(
        "003 v02",
        "a T4 has about 164 KB of shared memory per SM",
        "table of machines",
        164,
        lambda: T4.shared_memory_per_sm / KIB,
        "{:.0f} KiB; 164 KiB is an A100's",
    ),
    number(
        "003 v02",
        "32×32 tiles raise fp32 intensity to 8 FLOP/byte",
        "FLOP and bytes of a tile",
        8,
        lambda: intensity(32, 32, FP32),
        "{:.0f} FLOP/byte",
        within=0,
    ),
    number(
        "003 v05",
        "float4 needs 4 transactions where scalar loads need 16",
        "128-byte lines of four scalar loads of a warp",
        16,
        lambda: 4 * warp_lines(FP32),
        "{:.0f} either way: instructions fall to a quarter, transactions do not",
    ),
    number(
        "003 v07",
        "tensor cores at 65 TFLOP/s need 65 TB/s of operands",
        "bytes of 16×16×16 fragments, none reused",
        65,
        fragment_bandwidth,
        "{:.1f} TB/s, 25 times what DRAM gives",
    ),
    number(
        "003 v10",
        "vectorized loads of a 32×16 tile leave 75% of 256 threads idle",
        "8 halves a thread",
        0.75,
        lambda: 1 - 32 * 16 / 8 / 256,
        "{:.0%} idle",
        within=0,
    ),
    number(
        "003 v10",
        "double buffering takes 37 KB of shared memory",
        "bytes of both slots and the epilogue's tile",
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
    number(
        "003 v11", "its buffers take 18944 bytes", "padded rows of A and B", 18944, v11_shared_bytes, "{:.0f}", within=0
    ),
    number(
        "003 v11",
        "116 registers a thread allow two CTAs an SM, 49.4% of the warps",
        "occupancy of 256 threads on a T4",
        2,
        v11_ctas,
        "{:.0f} CTAs an SM, 50% of the warps at most",
        within=0,
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
)

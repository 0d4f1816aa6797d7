"""Document 003 on a T4: its hardware, its kernels on CUDA cores (v01 to v06), its conclusion."""

from outblas.core.machines import KIB
from outblas.inspect.occupancy import occupancy
from outblas.inspect.roofline import of_tile as intensity

from ..claim import DIFFERS, Claim, number
from .formulas import (
    FP32,
    LANES,
    SMALL_N,
    T4,
    conflict_ways,
    exact,
    strided_lines,
    tile_traffic,
    warp_lines,
)

_WIDE = 32  # threads of a block along N


def _swapped_transactions() -> float:
    """The lines of A and B that a warp of v01 loads for a step along K if its lanes go down a
    column of C, over the lines that it loads if they go along a row.
    """
    same = strided_lines(0)
    return (strided_lines(SMALL_N * FP32) + same) / (same + strided_lines(FP32))


CLAIMS: tuple[Claim, ...] = (
    number(
        "003 hardware",
        "FP16 ridge point of a T4: 203 FLOP/byte",
        "tensor peak over DRAM bandwidth, table of machines",
        203,
        lambda: T4.peak_tflops("float16") * 1e3 / T4.dram_gbs,
        "{:.0f} FLOP/byte",
    ),
    exact(
        "003 v01",
        "the naive kernel does 0.25 FLOP per byte it loads",
        "2K FLOP over 2K fp32 values",
        0.25,
        lambda: 2 * 2048 / (2 * 2048 * FP32),
        "{:.2f} FLOP/byte",
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
        "003 v01",
        "the naive kernel executes 8.59e9 FMAs",
        "M·N·K at 2048",
        8.59e9,
        lambda: SMALL_N**3,
        "{:.3e}",
        within=0.001,
    ),
    exact(
        "003 v01",
        "at 0.25 FLOP/byte the DRAM of a T4 allows 80 GFLOP/s",
        "bandwidth times intensity",
        80,
        lambda: T4.dram_gbs * 0.25,
        "{:.0f} GFLOP/s; its 465 are served by caches",
    ),
    number(
        "003 v01",
        "the fp32 ridge point of a T4 lies at 10 to 15 FLOP/byte",
        "fp32 peak over DRAM bandwidth, table of machines",
        15,
        lambda: T4.peak_tflops("float32") * 1e3 / T4.dram_gbs,
        "{:.0f} FLOP/byte, as its own v02 has it",
    ),
    number(
        "003 v01",
        "only 6 to 10% of the warps are active: they wait for memory",
        "residency of 1024-thread CTAs on a T4",
        0.1,
        lambda: occupancy(T4, 64, 0, 1024).share,
        "{:.0%}: the counter counts resident warps, and a waiting warp is one",
    ),
    number(
        "003 v01",
        "with the indices swapped, 32 transactions in place of 1 make it 32 times slower",
        "128-byte lines of A and B, a warp and step along K",
        32,
        lambda: _swapped_transactions(),
        "{:.1f} times the transactions: B takes one line as A took one",
        otherwise=DIFFERS,
    ),
    number(
        "003 v02",
        "a T4 has about 164 KB of shared memory per SM",
        "table of machines",
        164,
        lambda: T4.shared_memory_per_sm / KIB,
        "{:.0f} KiB; 164 KiB is an A100's",
    ),
    exact(
        "003 v02",
        "32×32 tiles raise fp32 intensity to 8 FLOP/byte",
        "FLOP and bytes of a tile",
        8,
        lambda: intensity(32, 32, FP32),
        "{:.0f} FLOP/byte",
    ),
    number(
        "003 v02",
        "its global loads are about 270 MB, as many as reach DRAM",
        "32×32 tiles at 2048",
        0.270,
        lambda: tile_traffic(SMALL_N, 32, 32) / 1e9,
        "{:.2f} GB: every tile loads its k tiles",
    ),
    number(
        "003 v03",
        "a strip of 8 does 1.78 FLOP per load from shared memory",
        "16 FLOP over 9 loads",
        1.78,
        lambda: 2 * 8 / (8 + 1),
        "{:.2f}",
    ),
    number(
        "003 v03",
        "each thread does 8 FMAs per load from shared memory, not 1",
        "8 FMAs over 9 loads",
        8,
        lambda: 8 / (8 + 1),
        "{:.2f}; v02 does 0.50",
    ),
    number(
        "003 v03",
        "the lanes of a warp conflict 8-way on a column of A",
        "banks of row ty·8 of 32-word rows, ty and tx of threads 0 to 31 of a block 32 wide",
        8,
        lambda: conflict_ways(thread // _WIDE * 8 * 32 for thread in range(LANES)),
        "{:.0f} word, which all lanes share: one ty, a broadcast",
    ),
    exact(
        "003 v04",
        "8×8 outputs a thread do 8 FLOP per load from shared memory",
        "128 FLOP over 16 loads",
        8,
        lambda: 2 * 8 * 8 / (8 + 8),
        "{:.0f}",
    ),
    number(
        "003 v05",
        "its global loads are 276 MB, as many as reach DRAM",
        "128×128 tiles at 2048",
        0.276,
        lambda: tile_traffic(SMALL_N, 128, 128) / 1e9,
        "{:.2f} GB",
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
        "003 v05",
        "a partition of an SM has 16 load/store units",
        "bytes of shared memory in a clock, a word a unit, over 4 partitions",
        16,
        lambda: T4.shared_bytes_per_clock / FP32 / 4,
        "{:.0f}: 16 are the whole SM's",
    ),
    number(
        "003 v06",
        "global loads of 64×64 tiles are 1.11 GB",
        "at 2048",
        1.11,
        lambda: tile_traffic(SMALL_N, 64, 64) / 1e9,
        "{:.2f} GB",
        within=0.05,
    ),
    exact(
        "003 v06",
        "64×64 tiles move twice the bytes of 128×128",
        "bytes that all CTAs load",
        2,
        lambda: tile_traffic(SMALL_N, 64, 64) / tile_traffic(SMALL_N, 128, 128),
        "{:.0f} times from L2; what reaches DRAM is the cache's affair",
    ),
    number(
        "003 v06",
        "it generates twice the DRAM traffic of v05",
        "its own counters: 485 over 276 MB",
        2,
        lambda: 485 / 276,
        "{:.2f} times",
        otherwise=DIFFERS,
    ),
    number(
        "003 v06",
        "BK = 8 is the root cause of the traffic",
        "bytes at BK = 8 over those at 16, 64×64 tiles: K / BK steps of BK each",
        2,
        lambda: (SMALL_N / 8 * 8) / (SMALL_N / 16 * 16),
        "{:.0f} times: BK cancels, tiles of 64 in place of 128 are the cause",
    ),
    number(
        "003 conclusion",
        "v06 reads 543 MB of DRAM",
        "its own table",
        543,
        lambda: 485,
        "{:.0f} MB",
        otherwise=DIFFERS,
    ),
    number(
        "003 conclusion",
        "v05 runs near the peak of the CUDA cores",
        "3.3 TFLOP/s over a T4's peak",
        1,
        lambda: 3.3 / T4.peak_tflops("float32"),
        "{:.0%} of it",
        within=0.2,
    ),
)

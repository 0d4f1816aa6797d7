"""Claims of the seed documents that arithmetic settles: tile sizes, budgets, limits of the
machines.

Each is a number, a function that computes it from what the document itself states, and how closely
the two must agree. The budgets and bounds that documents reason with come first, as formulas: sizes
in bytes, intensities in FLOP per byte of memory, bandwidths in TB/s.
"""

import math
from collections.abc import Iterable
from functools import partial
from statistics import NormalDist

from ..core.machines import KIB, MACHINES
from ..device.access import of_request
from ..inspect.occupancy import occupancy
from ..inspect.roofline import of_tile as intensity
from .claims import CONFIRMED, DIFFERS, REFUTED, Claim, Finding, number

H100, T4 = MACHINES["H100"], MACHINES["T4"]
LANES = 32
N = 4096
BF16, FP16, FP32 = 2, 2, 4
_SMALL = 2048  # N of 003 to v09, from v10 on N
_K6, _K7 = "000 kernel 6", "000 kernel 7"
_COLUMNS = [lane % 16 for lane in range(LANES)]  # kernel 6: half a warp goes along N
_TILED = [
    divmod(lane, 4) for lane in range(LANES)
]  # kernel 7: row and column of a lane, four along N
_REQUEST = "wavefronts of a 128-bit request over those it needs: 8 lanes a time"
_WIDE = 32  # threads of a block along N
_THREADS = 256


def slice_bytes(tile_m: int, tile_n: int, tile_k: int, itemsize: int) -> int:
    """Shared memory of one slot: a slice of A and one of B."""
    return (tile_m + tile_n) * tile_k * itemsize


def slots_that_fit(tile_m: int, tile_n: int, tile_k: int, beside: int = 0) -> int:
    """bf16 slots that fit in an H100's CTA beside other bytes of shared memory."""
    return (H100.shared_memory_per_cta - beside) // slice_bytes(tile_m, tile_n, tile_k, BF16)


def v10_shared_bytes() -> int:
    """003 v10: two slots of 32×16 and 16×64 halves, and the 32×64 fp32 tile of its epilogue,
    unpadded.
    """
    return 2 * slice_bytes(32, 64, 16, FP16) + 32 * 64 * FP32


def v11_shared_bytes() -> int:
    """003 v11: A as 128 rows of 40 halves, B as 32 rows of 136, padding included."""
    return (128 * 40 + 32 * 136) * FP16


def warptile_share() -> float:
    """000 kernel 7: share of an H100's warps at 165 registers, four warps and 128×16 tiles of A and
    B in fp32.
    """
    return occupancy(H100, 165, slice_bytes(128, 128, 16, FP32), 128).share


def v11_ctas() -> int:
    """003 v11 on a T4: 116 registers, 256 threads."""
    return occupancy(T4, 116, v11_shared_bytes(), 256).ctas_per_sm


def fragment_bandwidth() -> float:
    """TB/s of operands that 65 TFLOP/s of 16×16×16 fragments read, none reused: 003 v07."""
    return 65 / (2 * 16**3 / (2 * 16 * 16 * FP16))


def warp_lines(bytes_a_lane: int) -> int:
    """128-byte lines that a warp touches when its lanes load so many bytes each, side by side."""
    return math.ceil(LANES * bytes_a_lane / 128)


def strided_lines(stride: int) -> int:
    """128-byte lines that a warp touches when its lanes load words this many bytes apart; 0: all
    the same one.
    """
    return len({lane * stride // 128 for lane in range(LANES)})


def ways(starts: Iterable[int], width: int = 1) -> float:
    """Wavefronts of a warp's request to shared memory over those that it needs: every lane asks for
    `width` words from its own on.
    """
    wavefronts, needed = of_request(tuple(starts), width)
    return wavefronts / needed


def transposed_ways(block_k: int, stride: int) -> float:
    """Bank conflicts of storing A's tile transposed, rows `stride` words apart: a lane has four
    values along K, and as many lanes as a row of the tile needs stand side by side. 000, kernels 6
    and 7.
    """
    across = block_k // 4
    return ways((lane % across) * 4 * stride + lane // across for lane in range(LANES))


def store_ways(block_k: int, stride: int) -> float:
    """Wavefronts a request of storing both 128-wide tiles: A's as in `transposed_ways`, word by
    word; B's in requests of 128 bits, four wavefronts each, and a quarter as many.
    """
    return (4 * transposed_ways(block_k, stride) + 4) / 5


def tile_traffic(n: int, tile_m: int, tile_n: int, itemsize: int = FP32) -> float:
    """Bytes that all CTAs load for an n×n product, every slice of A and B once for each
    tile of C.
    """
    return itemsize * n**3 * (1 / tile_m + 1 / tile_n)


def tiles_limit_tflops(n: int, tile_m: int, tile_n: int) -> float:
    """TFLOP/s of an H100 on which each tile of an n×n product keeps one SM busy, at the data
    sheet's clock.
    """
    tiles = math.ceil(n / tile_m) * math.ceil(n / tile_n)
    return min(1.0, tiles / H100.sms) * H100.peak_tflops("bfloat16")


def ridge_share(n: int) -> float:
    """Intensity of an n×n bf16 product, each matrix moved once, over an H100's ridge point of DRAM
    and tensor cores.
    """
    return (2 * n**3 / (3 * n * n * BF16)) * H100.dram_gbs / (H100.peak_tflops("bfloat16") * 1e3)


def _steps_of_warps() -> float:
    """v01: lines of A and B that a warp loads for a step along K if its lanes go down a column of
    C, over those if they go along a row.
    """
    same = strided_lines(0)
    return (strided_lines(_SMALL * FP32) + same) / (same + strided_lines(FP32))


def _sector_traffic() -> float:
    """v07: bytes of the sectors that 16×16 fragments touch: an instruction takes 16 bytes of a row,
    of 32 a sector.
    """
    return 2 * tile_traffic(_SMALL, 16, 16, FP16)


def _largest_error() -> float:
    """v11: what the largest of 4096² differences of sums of 4096 products comes to, if the sums
    have nothing to do with each other and operands are uniform in [-1, 1], whose products have a
    variance of 1/9.
    """
    deviation = math.sqrt(2 * N / 9)
    return deviation * NormalDist().inv_cdf(1 - 1 / (2 * N**2))


def memory_bound(n: int) -> Finding:
    """Whether DRAM, not the tensor cores, bounds an n×n product in bf16."""
    share = ridge_share(n)
    side = "above" if share > 1 else "below"
    return Finding(
        f"{share:.2f} of the ridge point: {side} it", REFUTED if share > 1 else CONFIRMED, share
    )


exact = partial(number, within=0)

# The CUDA cores of an H100.
_000: tuple[Claim, ...] = (
    exact(
        _K6,
        "transposing stores meet in pairs on a bank: rows of 128 words are a multiple of 32 banks",
        "banks of a warp's 32 words of A",
        2,
        lambda: transposed_ways(8, 128),
        "{:.0f} words a bank",
    ),
    exact(
        _K6,
        "rows padded to 132 words take the stores' conflicts away",
        "banks of a warp's 32 words of A",
        1,
        lambda: transposed_ways(8, 132),
        "{:.0f} word a bank",
    ),
    number(
        _K6,
        "all its stores to shared memory average 2.6 ways",
        "A's word by word, B's 128 bits at a time",
        2.6,
        lambda: store_ways(8, 128),
        "{:.1f} wavefronts a request, 1.6 of them without a conflict",
        otherwise=DIFFERS,
    ),
    exact(
        _K6,
        "loads of B, eight columns a thread, conflict 4-way: 4 lanes of 16 want the same banks",
        _REQUEST,
        4,
        lambda: ways((8 * column for column in _COLUMNS), 4),
        "{:.0f} for each it needs: 128-bit reads go 8 lanes at a time, conflicts or none",
        otherwise=DIFFERS,
    ),
    exact(
        _K6,
        "padding B's rows to 132 words does not mend its loads",
        "the same in row 1 of 132 words over that in rows of 128",
        1,
        lambda: (
            ways((132 + 8 * each for each in _COLUMNS), 4)
            / ways((128 + 8 * each for each in _COLUMNS), 4)
        ),
        "as many wavefronts: {:.0f} times",
    ),
    number(
        _K7,
        "165 registers a thread hold achieved occupancy at 18%",
        "occupancy of 128 threads on an H100",
        0.18,
        warptile_share,
        "{:.1%} at most: 3 CTAs of 4 warps; 18% achieved agrees",
        within=0.05,
    ),
    number(
        _K7,
        "unpadded, its stores to shared memory average 4 ways",
        "A's word by word, B's 128 bits at a time",
        4,
        lambda: store_ways(16, 128),
        "{:.1f} wavefronts a request",
    ),
    number(
        _K7,
        "padding lowers that to 2.5",
        "the same in rows of 132 words",
        2.5,
        lambda: store_ways(16, 132),
        "{:.1f}: pairs still meet on a bank",
        within=0.05,
    ),
    exact(
        _K7,
        "four columns a thread keep loads of B free of conflicts",
        _REQUEST,
        1,
        lambda: ways((4 * column for _, column in _TILED), 4),
        "{:.0f} for each it needs",
    ),
    exact(
        _K7,
        "loads of A show no conflicts either",
        _REQUEST,
        1,
        lambda: ways((8 * row for row, _ in _TILED), 4),
        "{:.0f} for each it needs: lanes of a row read the same",
    ),
)

_001: tuple[Claim, ...] = (
    number(
        "001 setup",
        "an H100 holds 1024 threads per SM",
        "table of machines",
        1024,
        lambda: H100.threads_per_sm,
        "{:.0f}; 1024 is the limit of a CTA",
    ),
    number(
        "001 tensor core",
        "operands of one m64n16k16 take 2.5 KB",
        "bytes of its A and B",
        2.5,
        lambda: slice_bytes(64, 16, 16, BF16) / KIB,
        "{:.1f} KiB",
    ),
    number(
        "001 tensor core",
        "n = 256 demands 40 KB of shared memory",
        "bytes of A and B of one m64n256k16",
        40,
        lambda: slice_bytes(64, 256, 16, BF16) / KIB,
        "{:.0f} KiB an instruction; 40 KiB is a slice of 64 along K",
        otherwise=DIFFERS,
    ),
    number(
        "001 tensor core",
        "n = 256 takes 128 accumulator registers a thread",
        "64×256 fp32 over 128 threads",
        128,
        lambda: 64 * 256 / 128,
        "{:.0f}",
    ),
    number(
        "001 kernel 3",
        "the loop over K runs 128 times",
        "4096 over its BK of 64",
        128,
        lambda: N / 64,
        "{:.0f} times",
    ),
    exact(
        "001 kernel 5",
        "168 registers × 384 threads are 64512, just under the SM's 65536",
        "multiplied; held to the register file",
        64512,
        lambda: 168 * 384 if H100.registers_per_sm >= 168 * 384 else 0,
        "{:.0f} of 65536",
    ),
    exact(
        "001 kernel 5",
        "setmaxnreg 240 and 24 keeps the sum at 64512",
        "two consumers and a producer of 128 threads",
        64512,
        lambda: 240 * 256 + 24 * 128,
        "{:.0f}",
    ),
    number(
        "001 kernel 5, 004 kernel D",
        "128×256 tiles force the ring from 5 slots down to 3",
        "slots that fit in 227 KiB",
        3,
        lambda: slots_that_fit(128, 256, 64),
        "{:.0f} slots of 48 KiB fit",
    ),
    number(
        "001 kernel 5",
        "one consumer at 128×256 is a 5x dip",
        "kernel 4's 498 over its 123 TFLOP/s",
        5,
        lambda: 498 / 123,
        "{:.1f} times; 5 is the way from 123 to the 610 of two consumers",
        otherwise=DIFFERS,
    ),
    number(
        "001 kernel 6",
        "4572 / 1415 = 3.2 loads fit in the time of a store",
        "divided",
        3.2,
        lambda: 4572 / 1415,
        "{:.2f}",
    ),
    number(
        "001 kernel 7",
        "lean barriers give a 10% boost",
        "its 704 over kernel 6's 660 TFLOP/s",
        0.10,
        lambda: 704 / 660 - 1,
        "{:.1%}; 10% is the gain over 640",
        otherwise=DIFFERS,
    ),
    number(
        "001 kernel 10",
        "asynchronous stores are another 2%",
        "its 758 over kernel 9's 747 TFLOP/s",
        0.02,
        lambda: 758 / 747 - 1,
        "{:.1%}",
        within=0.25,
        otherwise=DIFFERS,
    ),
    number(
        "001 kernel 11",
        "764 TFLOP/s is 107% of cuBLAS at 716",
        "divided",
        1.07,
        lambda: 764 / 716,
        "{:.1%}",
        within=0.01,
    ),
)

# The CUDA cores of a GH200.
_002: tuple[Claim, ...] = (
    number(
        "002 baseline",
        "cuBLAS at 50058 GFLOP/s is nearly 100 times faster than 502.5",
        "divided",
        100,
        lambda: 50058 / 502.5,
        "{:.1f} times",
    ),
    number(
        "002 baseline",
        "a warp loads A in lines of 128 bytes, and B in scattered words",
        "lines of a step along K",
        1,
        lambda: strided_lines(N * FP32),
        "{:.0f} lines of A, one a lane: each has another row. B's word is the same for all: A is "
        "the scattered one",
    ),
    number(
        "002 coalescing",
        "four 32-bit floats share a 128-byte transaction",
        "128 bytes over 4",
        4,
        lambda: 128 / FP32,
        "{:.0f} floats: a whole warp's",
    ),
    number(
        "002 coalescing",
        "6352 GFLOP/s are nearly 12 times 502.5",
        "divided",
        12,
        lambda: 6352.2 / 502.5,
        "{:.1f} times",
        otherwise=DIFFERS,
    ),
    number(
        "002 coalescing",
        "that is 8 times slower than cuBLAS",
        "divided",
        8,
        lambda: 50058 / 6352.2,
        "{:.1f} times",
    ),
    number(
        "002 shared memory",
        "before it, every warp loads its block's 32 rows of A and 32 columns of B",
        "rows",
        32,
        lambda: len({thread // 32 for thread in range(LANES)}),
        "{:.0f} row of A, and all columns: a warp is one row of the block",
    ),
    number(
        "002 shared memory",
        "9174 GFLOP/s are 1.5 times 6352",
        "divided",
        1.5,
        lambda: 9174.1 / 6352.2,
        "{:.2f} times",
        otherwise=DIFFERS,
    ),
    number(
        "002 1D tile",
        "17041 GFLOP/s are 1.85 times 9174",
        "divided",
        1.85,
        lambda: 17040.9 / 9174.1,
        "{:.2f} times",
        within=0.01,
    ),
    number(
        "002 2D tile",
        "25933 GFLOP/s are half of cuBLAS",
        "divided",
        0.5,
        lambda: 25933 / 50058,
        "{:.0%}",
        within=0.05,
    ),
    number(
        "002 warp tile",
        "41496 GFLOP/s is nearly 84% of cuBLAS at 50058",
        "divided",
        0.84,
        lambda: 41496 / 50058,
        "{:.1%}",
        within=0.006,
        otherwise=DIFFERS,
    ),
)

# The T4: its hardware, its CUDA cores and its conclusion, then its tensor-core kernels, v07 to v11.
_003: tuple[Claim, ...] = (
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
        lambda: _SMALL**3,
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
        lambda: _steps_of_warps(),
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
        lambda: tile_traffic(_SMALL, 32, 32) / 1e9,
        "{:.2f} GB: every tile loads its slices",
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
        lambda: ways(thread // _WIDE * 8 * 32 for thread in range(LANES)),
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
        lambda: tile_traffic(_SMALL, 128, 128) / 1e9,
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
        lambda: tile_traffic(_SMALL, 64, 64) / 1e9,
        "{:.2f} GB",
        within=0.05,
    ),
    exact(
        "003 v06",
        "64×64 tiles move twice the bytes of 128×128",
        "bytes that all CTAs load",
        2,
        lambda: tile_traffic(_SMALL, 64, 64) / tile_traffic(_SMALL, 128, 128),
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
        "bytes at BK = 8 over those at 16, 64×64 tiles: K / BK slices of BK each",
        2,
        lambda: (_SMALL / 8 * 8) / (_SMALL / 16 * 16),
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

_003_TENSOR: tuple[Claim, ...] = (
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
        lambda: 1 - 32 * 16 / 8 / _THREADS,
        "{:.0%} idle",
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
        lambda: 2 * _SMALL**3 / 1.28e9,
        "{:.1f} FLOP/byte",
    ),
    number(
        "003 v08",
        "staging in shared memory cuts loads by BN/16 = 4",
        "bytes of fragments over those of 32×64 tiles",
        4,
        lambda: tile_traffic(_SMALL, 16, 16, FP16) / tile_traffic(_SMALL, 32, 64, FP16),
        "{:.2f} times: A's fall to a quarter, B's to a half",
    ),
    number(
        "003 v08",
        "its global loads are 801 MB",
        "32×64 tiles at 2048",
        0.801,
        lambda: tile_traffic(_SMALL, 32, 64, FP16) / 1e9,
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
        lambda: _SMALL**2,
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
        lambda: _THREADS / 64,
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
        lambda: occupancy(T4, 64, v10_shared_bytes(), _THREADS).ctas_per_sm,
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
        lambda: 128 * 32 / 8 / _THREADS,
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

_004: tuple[Claim, ...] = (
    number(
        "004 introduction",
        "tensor cores peak at 989 TFLOP/s in bf16",
        "table of machines",
        989,
        lambda: H100.peak_tflops("bfloat16"),
        "{:.0f} TFLOP/s at 1830 MHz",
        within=0.01,
    ),
    exact(
        "004 kernel A",
        "one m64n64k16 does 65536 multiply-adds",
        "multiplied",
        65536,
        lambda: 64 * 64 * 16,
        "{:.0f}",
    ),
    number(
        "004 kernel B",
        "a tile of 128 in place of 64 does 4 times the MACs per byte",
        "intensity of both tiles",
        4,
        lambda: intensity(128, 128, BF16) / intensity(64, 64, BF16),
        "{:.0f} times: bytes grow with the edge, MACs with the area",
    ),
    number(
        "004 kernel B",
        "operands of one m64n128k16 take 2.5 KB",
        "bytes of its A and B",
        2.5,
        lambda: slice_bytes(64, 128, 16, BF16) / KIB,
        "{:.0f} KiB; 2.5 KiB is n = 16",
    ),
    number(
        "004 kernel C",
        "setmaxnreg alone is worth 27 TFLOP/s",
        "001's 631 less its 610",
        27,
        lambda: 631 - 610,
        "{:.0f} TFLOP/s",
        otherwise=DIFFERS,
    ),
    exact(
        "004 kernel D",
        "a 128×256 accumulator wants 256 registers a thread, one over the limit",
        "fp32 outputs over 128 threads",
        256,
        lambda: 128 * 256 / 128,
        "{:.0f} of 255",
    ),
    exact(
        "004 store path",
        "5 + 5 + 3 TFLOP/s lead from 734 to 747",
        "added up",
        747 - 734,
        lambda: 5 + 5 + 3,
        "{:.0f} TFLOP/s",
    ),
    number(
        "004 async store",
        "staging C costs the ring another slot",
        "slots of 128×256×64 that fit beside 64 KiB of C; the ring had 3",
        2,
        lambda: slots_that_fit(128, 256, 64, beside=128 * 256 * BF16),
        "{:.0f} still fit",
    ),
    number(
        "004 last note",
        "this kernel reaches 838 TFLOP/s at 1024",
        "128×256 tiles: 32 of them on 132 SMs",
        838,
        lambda: tiles_limit_tflops(1024, 128, 256),
        "{:.0f} TFLOP/s at most: 100 SMs have no tile",
    ),
    Claim(
        "004 last note",
        "the product at 1024 is memory-bound",
        "its FLOP per byte of DRAM held to the H100's ridge point",
        lambda _: memory_bound(1024),
    ),
)

CLAIMS = (*_000, *_001, *_002, *_003, *_003_TENSOR, *_004)

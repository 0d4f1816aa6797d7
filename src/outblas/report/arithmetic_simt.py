"""Claims of documents 000 and 002, the CUDA cores of an H100 and a GH200, that arithmetic settles."""

from __future__ import annotations

from .budgets import FP32, LANES, N, store_ways, strided_lines, transposed_ways, warptile_share, ways
from .claims import DIFFERS, Claim, number

_K6, _K7 = "000 kernel 6", "000 kernel 7"
_COLUMNS = [lane % 16 for lane in range(LANES)]  # kernel 6: half a warp goes along N
_TILED = [divmod(lane, 4) for lane in range(LANES)]  # kernel 7: row and column of a lane, four along N
_REQUEST = "wavefronts of a 128-bit request over those it needs: 8 lanes a time"

OF_000: tuple[Claim, ...] = (
    number(_K6, "transposing stores meet in pairs on a bank: rows of 128 words are a multiple of 32 banks",
           "banks of a warp's 32 words of A", 2, lambda: transposed_ways(8, 128), "{:.0f} words a bank", within=0),
    number(_K6, "rows padded to 132 words take the stores' conflicts away", "banks of a warp's 32 words of A", 1,
           lambda: transposed_ways(8, 132), "{:.0f} word a bank", within=0),
    number(_K6, "all its stores to shared memory average 2.6 ways", "A's word by word, B's 128 bits at a time", 2.6,
           lambda: store_ways(8, 128), "{:.1f} wavefronts a request, 1.6 of them without a conflict",
           otherwise=DIFFERS),
    number(_K6, "loads of B, eight columns a thread, conflict 4-way: 4 lanes of 16 want the same banks", _REQUEST, 4,
           lambda: ways((8 * column for column in _COLUMNS), 4),
           "{:.0f} for each it needs: 128-bit reads go 8 lanes at a time, conflicts or none", within=0,
           otherwise=DIFFERS),
    number(_K6, "padding B's rows to 132 words does not mend its loads",
           "the same in row 1 of 132 words over that in rows of 128", 1,
           lambda: ways((132 + 8 * each for each in _COLUMNS), 4) / ways((128 + 8 * each for each in _COLUMNS), 4),
           "as many wavefronts: {:.0f} times", within=0),
    number(_K7, "165 registers a thread hold achieved occupancy at 18%", "occupancy of 128 threads on an H100", 0.18,
           warptile_share, "{:.1%} at most: 3 CTAs of 4 warps; 18% achieved agrees", within=0.05),
    number(_K7, "unpadded, its stores to shared memory average 4 ways", "A's word by word, B's 128 bits at a time", 4,
           lambda: store_ways(16, 128), "{:.1f} wavefronts a request"),
    number(_K7, "padding lowers that to 2.5", "the same in rows of 132 words", 2.5, lambda: store_ways(16, 132),
           "{:.1f}: pairs still meet on a bank", within=0.05),
    number(_K7, "four columns a thread keep loads of B free of conflicts", _REQUEST, 1,
           lambda: ways((4 * column for _, column in _TILED), 4), "{:.0f} for each it needs", within=0),
    number(_K7, "loads of A show no conflicts either", _REQUEST, 1, lambda: ways((8 * row for row, _ in _TILED), 4),
           "{:.0f} for each it needs: lanes of a row read the same", within=0),
)  # fmt: skip

OF_002: tuple[Claim, ...] = (
    number("002 baseline", "cuBLAS at 50058 GFLOP/s is nearly 100 times faster than 502.5", "divided", 100,
           lambda: 50058 / 502.5, "{:.1f} times"),
    number("002 baseline", "a warp loads A in lines of 128 bytes, and B in scattered words", "lines of a step along K",
           1, lambda: strided_lines(N * FP32),
           "{:.0f} lines of A, one a lane: each has another row. B's word is the same for all: A is the scattered one"),
    number("002 coalescing", "four 32-bit floats share a 128-byte transaction", "128 bytes over 4", 4,
           lambda: 128 / FP32, "{:.0f} floats: a whole warp's"),
    number("002 coalescing", "6352 GFLOP/s are nearly 12 times 502.5", "divided", 12, lambda: 6352.2 / 502.5,
           "{:.1f} times", otherwise=DIFFERS),
    number("002 coalescing", "that is 8 times slower than cuBLAS", "divided", 8, lambda: 50058 / 6352.2,
           "{:.1f} times"),
    number("002 shared memory", "before it, every warp loads its block's 32 rows of A and 32 columns of B", "rows", 32,
           lambda: len({thread // 32 for thread in range(LANES)}),
           "{:.0f} row of A, and all columns: a warp is one row of the block"),
    number("002 shared memory", "9174 GFLOP/s are 1.5 times 6352", "divided", 1.5, lambda: 9174.1 / 6352.2,
           "{:.2f} times", otherwise=DIFFERS),
    number("002 1D tile", "17041 GFLOP/s are 1.85 times 9174", "divided", 1.85, lambda: 17040.9 / 9174.1,
           "{:.2f} times", within=0.01),
    number("002 2D tile", "25933 GFLOP/s are half of cuBLAS", "divided", 0.5, lambda: 25933 / 50058, "{:.0%}",
           within=0.05),
    number("002 warp tile", "41496 GFLOP/s is nearly 84% of cuBLAS at 50058", "divided", 0.84, lambda: 41496 / 50058,
           "{:.1%}", within=0.006, otherwise=DIFFERS),
)  # fmt: skip

"""Document 002: SGEMM on the CUDA cores of a GH200."""

from ..claim import DIFFERS, Claim, number
from .formulas import FP32, LANES, N, strided_lines

CLAIMS: tuple[Claim, ...] = (
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

"""Claims of the seed documents that arithmetic settles: tile sizes, budgets, limits of the machines. Here those of 001
and 004; `arithmetic_simt` has 000's and 002's, `arithmetic_003` and `arithmetic_turing` 003's.

Each is a number, a function that computes it from what the document itself states, and how closely the two must agree.
"""

from __future__ import annotations

from ..machines import KIB
from . import arithmetic_003, arithmetic_simt, arithmetic_turing
from .budgets import (
    BF16,
    H100,
    N,
    intensity,
    ridge_share,
    slice_bytes,
    slots_that_fit,
    tiles_limit_tflops,
)
from .claims import CONFIRMED, DIFFERS, REFUTED, Claim, Finding, number


def memory_bound(n: int) -> Finding:
    """Whether DRAM, not the tensor cores, bounds an n×n product in bf16."""
    share = ridge_share(n)
    side = "above" if share > 1 else "below"
    return Finding(f"{share:.2f} of the ridge point: {side} it", REFUTED if share > 1 else CONFIRMED, share)


_001: tuple[Claim, ...] = (
    number("001 setup", "an H100 holds 1024 threads per SM", "table of machines", 1024, lambda: H100.threads_per_sm,
           "{:.0f}; 1024 is the limit of a CTA"),
    number("001 tensor core", "operands of one m64n16k16 take 2.5 KB", "bytes of its A and B", 2.5,
           lambda: slice_bytes(64, 16, 16, BF16) / KIB, "{:.1f} KiB"),
    number("001 tensor core", "n = 256 demands 40 KB of shared memory", "bytes of A and B of one m64n256k16", 40,
           lambda: slice_bytes(64, 256, 16, BF16) / KIB, "{:.0f} KiB an instruction; 40 KiB is a slice of 64 along K",
           otherwise=DIFFERS),
    number("001 tensor core", "n = 256 takes 128 accumulator registers a thread", "64×256 fp32 over 128 threads", 128,
           lambda: 64 * 256 / 128, "{:.0f}"),
    number("001 kernel 3", "the loop over K runs 128 times", "4096 over its BK of 64", 128, lambda: N / 64,
           "{:.0f} times"),
    number("001 kernel 5", "168 registers × 384 threads are 64512, just under the SM's 65536",
           "multiplied; held to the register file", 64512,
           lambda: 168 * 384 if H100.registers_per_sm >= 168 * 384 else 0, "{:.0f} of 65536", within=0),
    number("001 kernel 5", "setmaxnreg 240 and 24 keeps the sum at 64512",
           "two consumers and a producer of 128 threads", 64512, lambda: 240 * 256 + 24 * 128, "{:.0f}", within=0),
    number("001 kernel 5, 004 kernel D", "128×256 tiles force the ring from 5 slots down to 3",
           "slots that fit in 227 KiB", 3, lambda: slots_that_fit(128, 256, 64), "{:.0f} slots of 48 KiB fit"),
    number("001 kernel 5", "one consumer at 128×256 is a 5x dip", "kernel 4's 498 over its 123 TFLOP/s", 5,
           lambda: 498 / 123, "{:.1f} times; 5 is the way from 123 to the 610 of two consumers", otherwise=DIFFERS),
    number("001 kernel 6", "4572 / 1415 = 3.2 loads fit in the time of a store", "divided", 3.2, lambda: 4572 / 1415,
           "{:.2f}"),
    number("001 kernel 7", "lean barriers give a 10% boost", "its 704 over kernel 6's 660 TFLOP/s", 0.10,
           lambda: 704 / 660 - 1, "{:.1%}; 10% is the gain over 640", otherwise=DIFFERS),
    number("001 kernel 10", "asynchronous stores are another 2%", "its 758 over kernel 9's 747 TFLOP/s", 0.02,
           lambda: 758 / 747 - 1, "{:.1%}", within=0.25, otherwise=DIFFERS),
    number("001 kernel 11", "764 TFLOP/s is 107% of cuBLAS at 716", "divided", 1.07, lambda: 764 / 716, "{:.1%}",
           within=0.01),
)  # fmt: skip

_004: tuple[Claim, ...] = (
    number("004 introduction", "tensor cores peak at 989 TFLOP/s in bf16", "table of machines", 989,
           lambda: H100.peak_tflops("bfloat16"), "{:.0f} TFLOP/s at 1830 MHz", within=0.01),
    number("004 kernel A", "one m64n64k16 does 65536 multiply-adds", "multiplied", 65536, lambda: 64 * 64 * 16,
           "{:.0f}", within=0),
    number("004 kernel B", "a tile of 128 in place of 64 does 4 times the MACs per byte", "intensity of both tiles", 4,
           lambda: intensity(128, 128, BF16) / intensity(64, 64, BF16),
           "{:.0f} times: bytes grow with the edge, MACs with the area"),
    number("004 kernel B", "operands of one m64n128k16 take 2.5 KB", "bytes of its A and B", 2.5,
           lambda: slice_bytes(64, 128, 16, BF16) / KIB, "{:.0f} KiB; 2.5 KiB is n = 16"),
    number("004 kernel C", "setmaxnreg alone is worth 27 TFLOP/s", "001's 631 less its 610", 27, lambda: 631 - 610,
           "{:.0f} TFLOP/s", otherwise=DIFFERS),
    number("004 kernel D", "a 128×256 accumulator wants 256 registers a thread, one over the limit",
           "fp32 outputs over 128 threads", 256, lambda: 128 * 256 / 128, "{:.0f} of 255", within=0),
    number("004 store path", "5 + 5 + 3 TFLOP/s lead from 734 to 747", "added up", 747 - 734, lambda: 5 + 5 + 3,
           "{:.0f} TFLOP/s", within=0),
    number("004 async store", "staging C costs the ring another slot",
           "slots of 128×256×64 that fit beside 64 KiB of C; the ring had 3", 2,
           lambda: slots_that_fit(128, 256, 64, beside=128 * 256 * BF16), "{:.0f} still fit"),
    number("004 last note", "this kernel reaches 838 TFLOP/s at 1024", "128×256 tiles: 32 of them on 132 SMs", 838,
           lambda: tiles_limit_tflops(1024, 128, 256), "{:.0f} TFLOP/s at most: 100 SMs have no tile"),
    Claim("004 last note", "the product at 1024 is memory-bound",
          "its FLOP per byte of DRAM held to the H100's ridge point", lambda _: memory_bound(1024)),
)  # fmt: skip

CLAIMS = (
    *arithmetic_simt.OF_000,
    *_001,
    *arithmetic_simt.OF_002,
    *arithmetic_003.CLAIMS,
    *arithmetic_turing.CLAIMS,
    *_004,
)

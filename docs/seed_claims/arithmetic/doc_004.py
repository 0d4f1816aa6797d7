"""Document 004: the retelling of 001's climb."""

import math

from outblas.core.machines import KIB
from outblas.inspect.roofline import of_tile as intensity

from ..claim import CONFIRMED, DIFFERS, REFUTED, Claim, Finding, number
from .formulas import BF16, H100, exact, stage_bytes, stages_that_fit


def tiles_limit_tflops(n: int, tile_m: int, tile_n: int) -> float:
    """The TFLOP/s that an H100 can reach at the data sheet's clock where each tile of an n×n
    product keeps one SM busy.
    """
    tiles = math.ceil(n / tile_m) * math.ceil(n / tile_n)
    return min(1.0, tiles / H100.sms) * H100.peak_tflops("bfloat16")


def ridge_share(n: int) -> float:
    """The intensity of an n×n bf16 product that moves each matrix once, over an H100's ridge point
    of DRAM and tensor cores.
    """
    return (2 * n**3 / (3 * n * n * BF16)) * H100.dram_gbs / (H100.peak_tflops("bfloat16") * 1e3)


def memory_bound(n: int) -> Finding:
    """Whether DRAM, not the tensor cores, bounds an n×n product in bf16."""
    share = ridge_share(n)
    side = "above" if share > 1 else "below"
    return Finding(
        f"{share:.2f} of the ridge point: {side} it", REFUTED if share > 1 else CONFIRMED, share
    )


CLAIMS: tuple[Claim, ...] = (
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
        lambda: stage_bytes(64, 128, 16, BF16) / KIB,
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
        "staging C costs the pipeline another stage",
        "stages of 128×256×64 that fit beside 64 KiB of C; the pipeline had 3",
        2,
        lambda: stages_that_fit(128, 256, 64, beside=128 * 256 * BF16),
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
        "its FLOP per byte of DRAM beside the H100's ridge point",
        lambda _: memory_bound(1024),
    ),
)

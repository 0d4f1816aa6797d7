"""What ran of the CUDA-core ladder, as its claims name it: configs that documents 000, 002 and 003 (to v06) describe.

Their own forms of a kernel are presets of its rung: theirs of simt.vectorized has bank conflicts, and simt.warptile is
unpadded in 002 and in the first half of 000, and prefetches nothing in any of them.
"""

from __future__ import annotations

from ..bench.record import BASE
from ..kernels.simt_config import PRESETS
from .compare import N, Run

SMALL = 2048  # 003's size; 002's is compare.N, and 000, which states none, is tested there
K6, K7 = "000 kernel 6", "000 kernel 7"


def rung(name: str, config: str = "", n: int = N) -> Run:
    """A rung in a config of brief form, as `outblas bench` writes it: no field that the rung has anyway."""
    return Run(f"simt.{name}", config, n, "simt")


def _preset(name: str, n: int = N) -> Run:
    kernel, config = PRESETS[name]
    return Run(kernel, config, n, "simt")


NAIVE, COALESCED, SHARED, STRIP, REGISTER = map(rung, ("naive", "coalesced", "shared", "strip", "register"))
VECTORIZED, PADDED = _preset("002 float4, 000 kernel 6"), _preset("000 kernel 6, padded")
SPLIT = rung("vectorized", "pad=0")
UNPADDED, PADDED_TILE = _preset("002 warp tile, 000 kernel 7"), _preset("000 kernel 7, padded")
SWAPPED, V01, V02, V03, V04 = (rung(name, n=SMALL) for name in ("naive", "coalesced", "shared", "strip", "register"))
V05, V06 = _preset("003 v05", SMALL), _preset("003 v06", SMALL)
V06_DEEP = Run(V06.provider, V06.config.replace("block_k=8,", ""), SMALL, "simt")  # with the rung's BK = 16
CUBLAS, CUBLAS_SMALL = Run(BASE, ladder="simt"), Run(BASE, "", SMALL, "simt")

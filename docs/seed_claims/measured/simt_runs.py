"""The runs that the claims about the CUDA cores compare.

The documents' own forms of a kernel are presets of its rung: theirs of simt.vectorized has bank
conflicts, and simt.warptile is unpadded in 002 and in the first half of 000, and prefetches nothing
in any of them.
"""

from outblas.bench.record import BASE
from outblas.kernels.simt_config import PRESETS

from ..compare import N, Run

SMALL_N = 2048  # 003's size; 002's is N, and 000, which states none, is tested there
K6, K7 = "000 kernel 6", "000 kernel 7"


def rung(name: str, config: str = "", n: int = N) -> Run:
    """A run of a rung. The config names only the fields that differ from the rung's own, as
    `outblas bench` writes it.
    """
    return Run(f"simt.{name}", config, n, "simt")


def _preset(name: str, n: int = N) -> Run:
    """A run of a document's own form of a kernel."""
    kernel, config = PRESETS[name]
    return Run(kernel, config, n, "simt")


NAIVE, COALESCED, SHARED, STRIP, REGISTER = map(
    rung, ("naive", "coalesced", "shared", "strip", "register")
)
VECTORIZED, PADDED = _preset("002 float4, 000 kernel 6"), _preset("000 kernel 6, padded")
SPLIT = rung("vectorized", "pad=0")
UNPADDED, PADDED_TILE = _preset("002 warp tile, 000 kernel 7"), _preset("000 kernel 7, padded")
SWAPPED, V01, V02, V03, V04 = (
    rung(name, n=SMALL_N) for name in ("naive", "coalesced", "shared", "strip", "register")
)
V05, V06 = _preset("003 v05", SMALL_N), _preset("003 v06", SMALL_N)
V06_DEEP = Run(
    V06.provider, V06.config.replace("block_k=8,", ""), SMALL_N, "simt"
)  # with the rung's BK = 16
CUBLAS, CUBLAS_SMALL = Run(BASE, ladder="simt"), Run(BASE, "", SMALL_N, "simt")

"""The figures of the seed documents, rung by rung, as data.

The documents: 000, an H100 SGEMM worklog; 001, the H100 climb to 107% of cuBLAS (CUDA 12.6); 002, a
GH200 SGEMM; 003, a T4 from CUDA cores to tensor cores; 004, a retelling of 001. A document's
figures can only be compared with its own cuBLAS.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of one document.

    `tflops` are TFLOP/s, lowest and highest where the document gives a range, None where it gives
    only a ratio to cuBLAS. `cublas` is cuBLAS's TFLOP/s in the same document, `stated` the ratio to
    cuBLAS (1.07: 107%) as the document states it, lowest and highest, `n` the edge of the square
    product, None where the document does not give it.
    """

    rung: str
    source: str
    gpu: str
    n: int | None
    dtype: str
    tflops: tuple[float, float] | None = None
    cublas: float | None = None
    stated: tuple[float, float] | None = None
    note: str = ""

    @property
    def ratio(self) -> tuple[float, float] | None:
        """The ratio to the document's cuBLAS: from its two figures where it has both, otherwise as
        stated.
        """
        if self.tflops is not None and self.cublas is not None:
            return self.tflops[0] / self.cublas, self.tflops[1] / self.cublas
        return self.stated

    def record(self) -> dict[str, Any]:
        """The figure as a JSON object."""
        return {
            name: getattr(self, name) for name in ("source", "gpu", "n", "dtype", "tflops", "ratio")
        }


def _span(value: float | tuple[float, float] | None) -> tuple[float, float] | None:
    """Returns a figure as the lowest and the highest value."""
    return (value, value) if isinstance(value, int | float) else value


def _gh200(rung: str, tflops: float, stated: float | None = None) -> Figure:
    """Returns a figure of 002 at 4096 in fp32, where cuBLAS reaches 50.058 TFLOP/s."""
    return Figure(
        rung=f"simt.{rung}",
        source=f"002 {_IN_002[rung]}",
        gpu="GH200",
        n=4096,
        dtype="float32",
        tflops=_span(tflops),
        cublas=50.058,
        stated=_span(stated),
    )


_IN_002 = {
    "naive": "baseline",
    "coalesced": "coalescing",
    "shared": "shared memory",
    "strip": "1D tile",
    "register": "2D tile",
    "vectorized": "float4",
    "warptile": "warp tile",
}


def _t4(
    rung: str,
    version: str,
    tflops: float | tuple[float, float],
    n: int | None = 2048,
    note: str = "",
) -> Figure:
    """Returns a figure of 003. Its cuBLAS figures come from "3985 GFLOP/s is 90%" for fp32 and
    "about 40 TFLOP/s" for fp16; it states the size of neither.
    """
    scalar = rung.startswith("simt")
    return Figure(
        rung=rung,
        source=f"003 {version}",
        gpu="T4",
        n=n,
        dtype="float32" if scalar else "float16",
        tflops=_span(tflops),
        cublas=3.985 / 0.90 if scalar else 40.0,
        note=note,
    )


def _h100(
    rung: str,
    source: str,
    tflops: float | None,
    stated: float | tuple[float, float] | None = None,
    n: int = 4096,
) -> Figure:
    """Returns a figure of 001 and 004 in bf16. Their cuBLAS reaches 716 TFLOP/s at 4096; at other
    sizes they give only the ratio.
    """
    return Figure(
        rung=f"hopper.{rung}",
        source=source,
        gpu="H100",
        n=n,
        dtype="bfloat16",
        tflops=_span(tflops),
        cublas=716.0 if n == 4096 else None,
        stated=_span(stated),
    )


FIGURES: tuple[Figure, ...] = (
    _gh200("naive", 0.5025),
    _gh200("coalesced", 6.3522),
    _t4("simt.coalesced", "v01", 0.465),
    _gh200("shared", 9.1741),
    _t4("simt.shared", "v02", (0.9, 1.2)),
    _gh200("strip", 17.0409),
    _t4("simt.strip", "v03", (1.5, 1.8)),
    _gh200("register", 25.933),
    _t4("simt.register", "v04", (2.1, 2.7)),
    _gh200("vectorized", 31.4208),
    _t4("simt.vectorized", "v05", (3.2, 3.4)),
    _t4(
        "simt.vectorized",
        "v05, as its introduction has it",
        3.985,
        n=None,
        note="end of its fp32 path, 90% of cuBLAS",
    ),
    Figure(
        rung="simt.vectorized",
        source="000 kernel 6",
        gpu="H100",
        n=None,
        dtype="float32",
        stated=_span(0.56 / 0.85),
        note="56% of the fp32 roofline, cuBLAS 85%",
    ),
    _gh200("warptile", 41.496, 0.84),
    _t4("simt.warptile", "v06", 1.568),
    Figure(
        rung="simt.warptile", source="004", gpu="H100", n=None, dtype="float32", stated=_span(0.937)
    ),
    Figure(
        rung="simt.warptile",
        source="001 kernel 1",
        gpu="H100",
        n=4096,
        dtype="bfloat16",
        tflops=_span(32.0),
        cublas=716.0,
        stated=_span(0.04),
        note="the fp32 algorithm on bf16 operands, against cuBLAS on tensor cores",
    ),
    _t4("turing.wmma", "v07", 1.870),
    _t4("turing.shared", "v08", 3.230),
    _t4("turing.double_buffer", "v09", 3.105),
    _t4("turing.vectorized", "v10", 2.984),
    _t4("turing.vectorized", "v10", 12.380, n=4096),
    _t4("turing.ldmatrix", "v11", 17.058, n=4096),
    _h100("tma_wgmma", "001 kernel 2, 004 kernel A", 317, 0.44),
    _h100("large_tile", "001 kernel 3, 004 kernel B", 423, 0.59),
    _h100("warp_specialized", "001 kernel 4, 004 kernel C", 498, 0.70),
    _h100("two_consumers", "001 kernel 5, 004 kernel D", 631, 0.88),
    _h100("two_consumers", "001 kernel 5 before setmaxnreg", 610),
    _h100("persistent", "001 kernel 6, 004", 660, 0.92),
    _h100("lean_barriers", "001 kernel 7, 004", 704, 0.98),
    _h100("cluster_multicast", "001 kernel 8, 004", 734, 1.02),
    _h100("store_tuning", "001 kernel 9, 004", 747, 1.04),
    _h100("tma_store", "001 kernel 10, 004", 758, 1.06),
    _h100("hilbert", "001 kernel 11, 004", 764, 1.07),
    _h100("hilbert", "001 kernel 11", None, 1.02, n=512),
    _h100("hilbert", "001 kernel 11", None, 1.17, n=1024),
    _h100("hilbert", "004", 838, 1.17, n=1024),
    _h100("hilbert", "001 kernel 11", None, (1.07, 1.08), n=2048),
    _h100("hilbert", "001 kernel 11", None, 1.015, n=8192),
    _h100("hilbert", "004", 726, 1.01, n=8192),
)

# 001 kernel 3: mean cycles of loading and of the tensor cores per step of 64 along K, and of
# storing a tile.
PHASES = {"hopper.large_tile": ("001 kernel 3", {"load": 1415.0, "tensor": 703.0, "store": 4572.0})}

# Rungs for which the documents have no figure: beyond the documents, or only planned in them (003
# v12).
WITHOUT_FIGURE = ("simt.pipelined", "portable", "turing.cp_async", "hopper.gemm")


def of_rung(name: str) -> tuple[Figure, ...]:
    """Returns the figures on a rung; its ladder is compared with the first one."""
    return tuple(figure for figure in FIGURES if figure.rung == name)

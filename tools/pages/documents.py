"""The figures of the seed documents, rung by rung, from documents.json beside this file.

The documents: 000, an H100 SGEMM worklog; 001, the H100 climb to 107% of cuBLAS (CUDA 12.6); 002, a
GH200 SGEMM; 003, a T4 from CUDA cores to tensor cores; 004, a retelling of 001. A document's
figures can only be compared with its own cuBLAS. That of 003 comes from "3985 GFLOP/s is 90%" for
fp32 and "about 40 TFLOP/s" for fp16, of unstated size; that of 001 and 004 is given at 4096 alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

Span = Sequence[float]  # the lowest and the highest value


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of one document.

    `tflops` are TFLOP/s, None where the document gives only a ratio to cuBLAS. `cublas` is cuBLAS's
    TFLOP/s in the same document, `stated` the ratio to cuBLAS (1.07: 107%) as the document states
    it, `n` the size of the square GEMM, None where the document does not give it.
    """

    rung: str
    source: str
    gpu: str
    dtype: str
    n: int | None = None
    tflops: Span | None = None
    cublas: float | None = None
    stated: Span | None = None
    note: str = ""

    @property
    def ratio(self) -> Span | None:
        """The ratio to the document's cuBLAS: from its two figures where it has both, otherwise as
        stated.
        """
        if self.tflops is not None and self.cublas is not None:
            return self.tflops[0] / self.cublas, self.tflops[1] / self.cublas
        return self.stated


FIGURES: list[Figure] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8"),
    object_hook=lambda entry: Figure(**entry),
)
# 001 kernel 3: mean cycles of loading and of the tensor cores per step of 64 along K, and of
# storing a tile.
PHASES = {"hopper.large_tile": ("001 kernel 3", {"load": 1415.0, "tensor": 703.0, "store": 4572.0})}


def of_rung(name: str) -> tuple[Figure, ...]:
    """The figures on a rung; its ladder is compared with the first one."""
    return tuple(figure for figure in FIGURES if figure.rung == name)

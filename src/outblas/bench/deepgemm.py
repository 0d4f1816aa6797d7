"""DeepGEMM's products of fp8 operands with block scales, of one matrix and of groups of rows, of
either of its interfaces, where the package `deep_gemm` is installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import pairwise

import torch

from outblas.verify.kernels import Refused

Tensor = torch.Tensor

# Of the releases up to July 2025, and of later ones.
_NAMES = ("gemm_fp8_fp8_bf16_nt", "fp8_gemm_nt")
_NAMES_OF_GROUPS = (
    "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous",
    "m_grouped_fp8_gemm_nt_contiguous",
)
_ALIGNMENT = 4  # the columns of the scales of A start at multiples of 16 bytes
GROUP_ROWS = 128  # of groups, each of which has a multiple


def prepared(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out: Tensor | None = None,
    offs: Tensor | None = None,
) -> Callable[..., Tensor]:
    """Returns a call that writes the product of a (M, K) and b (K, N) to `out`, with scales of
    1x128 and 128x128 blocks, and returns it. With `offs` it multiplies the rows of each group of a,
    which end there, with its matrix of b (experts, K, N). Without an `out` it writes to the same
    bfloat16 result each time.

    Raises ImportError without DeepGEMM, and Refused if it has no such function, or for a group
    whose number of rows is no multiple of 128.
    """
    names, groups = _NAMES, []
    if offs is not None:
        names = _NAMES_OF_GROUPS
        sizes = [end - begin for begin, end in pairwise((0, *offs.tolist()))]
        if refused := [size for size in sizes if size % GROUP_ROWS]:
            raise Refused(
                f"deepgemm takes groups of multiples of {GROUP_ROWS} rows, not {refused[0]}"
            )
        experts = torch.arange(len(sizes), dtype=torch.int32, device=a.device)
        groups = [experts.repeat_interleave(torch.tensor(sizes, device=a.device))]
    deep_gemm = importlib.import_module("deep_gemm")
    product = next((getattr(deep_gemm, name) for name in names if hasattr(deep_gemm, name)), None)
    if product is None:
        raise Refused(f"deep_gemm has neither {' nor '.join(names)}")
    result = (
        a.new_full((a.shape[0], b.shape[-1]), torch.nan, dtype=torch.bfloat16)
        if out is None
        else out
    )
    left, scale_of_weights = (a, _aligned(scale_a)), scale_b.mT.contiguous()

    def call(b: Tensor = b) -> Tensor:
        product(left, (b.mT, scale_of_weights), result, *groups)
        return result

    return call


def _aligned(scales: Tensor) -> Tensor:
    """Returns scales stored by columns, each of which starts where DeepGEMM loads it; otherwise it
    would copy them in every call.
    """
    rows, blocks = scales.shape
    padded = -(-rows // _ALIGNMENT) * _ALIGNMENT
    aligned = torch.zeros((blocks, padded), dtype=scales.dtype, device=scales.device).t()[:rows]
    return aligned.copy_(scales)

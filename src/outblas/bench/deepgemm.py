"""DeepGEMM's products of fp8 operands with block scales, of one matrix and of groups of rows, of
either of its interfaces, where the package `deep_gemm` is installed.
"""

from __future__ import annotations

import importlib
import math
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
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor
) -> Callable[..., Tensor]:
    """Returns a call that writes the product of a (M, K) and b (K, N) to `out`, with scales of
    1x128 and 128x128 blocks, and returns it.

    Raises ImportError without DeepGEMM, and Refused if it has no such function.
    """
    return _prepared(_NAMES, a, b, scale_a, scale_b, out)


def prepared_groups(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor
) -> Callable[..., Tensor]:
    """Returns a call that multiplies the rows of each group of a (M, K), which end at `offs`, with
    its matrix of b (experts, K, N), with scales of 1x128 and 128x128 blocks. It writes to the same
    bfloat16 result each time, and returns it.

    Raises ImportError without DeepGEMM, and Refused if it has no such function, or for a group
    whose number of rows is no multiple of 128.
    """
    sizes = [end - begin for begin, end in pairwise((0, *offs.tolist()))]
    if refused := [size for size in sizes if size % GROUP_ROWS]:
        raise Refused(f"deepgemm takes groups of multiples of {GROUP_ROWS} rows, not {refused[0]}")
    groups = torch.arange(len(sizes), dtype=torch.int32, device=a.device)
    group_of_row = groups.repeat_interleave(torch.tensor(sizes, device=a.device))
    out = a.new_full((a.shape[0], b.shape[2]), math.nan, dtype=torch.bfloat16)
    return _prepared(_NAMES_OF_GROUPS, a, b, scale_a, scale_b, out, group_of_row)


def _prepared(
    names: tuple[str, ...],
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *out_and_groups: Tensor,
) -> Callable[..., Tensor]:
    """Returns the call of the first of these functions that DeepGEMM has."""
    deep_gemm = importlib.import_module("deep_gemm")
    product = next((getattr(deep_gemm, name) for name in names if hasattr(deep_gemm, name)), None)
    if product is None:
        raise Refused(f"deep_gemm has neither {' nor '.join(names)}")
    left = a, _aligned(scale_a)
    scale_of_weights = scale_b.mT.contiguous()

    def call(b: Tensor = b) -> Tensor:
        product(left, (b.mT, scale_of_weights), *out_and_groups)
        return out_and_groups[0]

    return call


def _aligned(scales: Tensor) -> Tensor:
    """Returns scales stored by columns, each of which starts where DeepGEMM loads it; otherwise it
    would copy them in every call.
    """
    rows, blocks = scales.shape
    padded = -(-rows // _ALIGNMENT) * _ALIGNMENT
    aligned = torch.zeros((blocks, padded), dtype=scales.dtype, device=scales.device).t()[:rows]
    return aligned.copy_(scales)

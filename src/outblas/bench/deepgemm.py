"""DeepGEMM's product of fp8 operands with block scales, of either of its interfaces, where the
package `deep_gemm` is installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ..verify.kernels import Refused

Tensor = torch.Tensor

# Of the releases up to June 2025, and of later ones.
_NAMES = ("gemm_fp8_fp8_bf16_nt", "fp8_gemm_nt")
_ALIGNMENT = 4  # the columns of the scales of A start at multiples of 16 bytes


def prepared(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor
) -> Callable[..., Tensor]:
    """Returns a call that writes the product of a (M, K) and b (K, N) to `out`, with scales of
    1x128 and 128x128 blocks, and returns it.

    Raises ImportError without DeepGEMM, and Refused if it has no such function.
    """
    product = _product(importlib.import_module("deep_gemm"))
    left = a, _aligned(scale_a)
    scale_of_weight = scale_b.t().contiguous()

    def call(b: Tensor = b) -> Tensor:
        product(left, (b.t(), scale_of_weight), out)
        return out

    return call


def _product(deep_gemm: Any) -> Callable[..., Any]:
    for name in _NAMES:
        if hasattr(deep_gemm, name):
            function: Callable[..., Any] = getattr(deep_gemm, name)
            return function
    raise Refused(f"deep_gemm has neither {' nor '.join(_NAMES)}")


def _aligned(scales: Tensor) -> Tensor:
    """Returns scales stored by columns, each of which starts where DeepGEMM loads it; otherwise it
    would copy them in every call.
    """
    rows, blocks = scales.shape
    padded = -(-rows // _ALIGNMENT) * _ALIGNMENT
    aligned = torch.zeros((blocks, padded), dtype=scales.dtype, device=scales.device).t()[:rows]
    return aligned.copy_(scales)

"""A stand-in for `torch._scaled_mm` with scales of blocks, which needs an sm_90 GPU: it refuses
what torch and cuBLAS refuse, and computes in float64.
"""

from typing import Any

import torch

Tensor = torch.Tensor

BLOCK = 128
ROWS = 8  # cuBLAS takes multiples of so many, where each has its own scales
SIZES = 16  # multiples of other sizes


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"torch._scaled_mm: {message}")


def _have_strides(t: Tensor, *strides: int) -> bool:
    """Whether a tensor has these strides in the dimensions where they matter."""
    return all(
        size == 1 or own == wanted
        for size, own, wanted in zip(t.shape, t.stride(), strides, strict=True)
    )


class ScaledMm:
    """Notes the operands of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, ...]] = []

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        bias: Any = None,
        *,
        out_dtype: torch.dtype,
        out: Tensor,
        use_fast_accum: bool = False,
    ) -> Tensor:
        assert bias is None
        assert not use_fast_accum
        self.calls.append((a, b, scale_a, scale_b))
        M, K = a.shape
        N, blocks = b.shape[1], -(-K // BLOCK)
        _require(not (M % ROWS or N % SIZES or K % SIZES), f"{M}x{N}x{K}")
        _require(a.stride(1) == 1 and a.stride(0) % SIZES == 0, "a is not by rows")
        _require(b.stride(0) == 1 and b.stride(1) % SIZES == 0, "b is not by columns")
        _require(scale_a.shape == (M, blocks) and _have_strides(scale_a, 1, M), "scale_a")
        if scale_b.shape == (blocks, N):
            _require(_have_strides(scale_b, N, 1), "scale_b of columns")
            columns = 1
        else:
            _require(scale_b.shape == (blocks, -(-N // BLOCK)), "scale_b")
            _require(_have_strides(scale_b, 1, blocks) and blocks % 4 == 0, "scale_b of blocks")
            columns = BLOCK
        _require((out.dtype, out.shape) == (out_dtype, (M, N)), "out")
        x = a.double() * scale_a.double().repeat_interleave(BLOCK, 1)[:, :K]
        of_terms = scale_b.double().repeat_interleave(BLOCK, 0)[:K]
        y = b.double() * of_terms.repeat_interleave(columns, 1)[:, :N]
        return out.copy_(x @ y)

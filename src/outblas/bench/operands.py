"""The operands of every measurement: normal(0, 1), never zeros, because zeros draw less power. fp8
operands with block scales are stored as in checkpoints: A has one scale for each row and 128 terms,
B one for each 128 columns and 128 terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from outblas.base.shapes import Shape
from outblas.call import quantization
from outblas.call.fp8 import BLOCK
from outblas.torch_ops.quantize import quantize

Tensor = torch.Tensor
Fill = Callable[[Tensor], object]

# torch reads the scales of B in steps of 16 bytes along K, and takes no padding.
K_MULTIPLE = 4 * BLOCK

_EXACT = 1 << 24  # float32 represents every integer up to it
_EXACT_BLOCK = 1 << 13  # the same for sums of fp8 products in the tensor cores of sm_90
_EXPONENT = 1  # the scales of integers are powers of two, with exponents from -1 to 1


def normal(
    shape: Shape,
    layout: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
    device: str = "cuda",
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a[M, K] and b[K, N] from normal(0, 1), stored according to `layout`, and an empty
    out[M, N], on the current GPU.
    """
    M, N, K = shape
    generator = torch.Generator(device).manual_seed(0)
    fill = partial(Tensor.normal_, generator=generator)
    a = matrix((M, K), layout[0], dtype, device, fill)
    b = matrix((K, N), layout[1], dtype, device, fill)
    return a, b, torch.empty(M, N, dtype=out_dtype or dtype, device=device)


def matrix(
    shape: tuple[int, ...], letter: str, dtype: torch.dtype, device: torch.device | str, fill: Fill
) -> Tensor:
    """Returns (..., R, C), filled; its matrices are row-major where the letter is n."""
    by_rows = letter == "n"
    stored = shape if by_rows else (*shape[:-2], shape[-1], shape[-2])
    t = torch.empty(stored, dtype=dtype, device=device)
    fill(t)
    return t if by_rows else t.mT


class BlockScaled(NamedTuple):
    """A (M, K) and B (..., K, N), stored by columns, with their float32 scales as `quantize` lays
    them out: `scale_a` (M, K/128), and `scale_b` (..., K/128, N/128), or (K/128, N) where each
    column has its own. Sizes that are not multiples of 128 are rounded up.
    """

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor

    def dequantised(self) -> tuple[Tensor, Tensor]:
        """Returns A and B with their scales applied, in float64."""
        return (
            dequantised(self.a, self.scale_a, (1, BLOCK)),
            dequantised(self.b, self.scale_b, (BLOCK, BLOCK)),
        )


def block_scaled(
    shape: Shape,
    device: torch.device | str,
    *,
    lead: tuple[int, ...] = (),
    recipe_b: str = "128x128",
    exact_terms: int | None = None,
) -> BlockScaled:
    """Returns operands from normal(0, 1), the same every time, quantised as callers do. `lead`: the
    leading sizes of B; `recipe_b`: which of its values share a scale.

    With `exact_terms` the values are small integers with scales that are powers of two: sums of up
    to so many products, in tensor cores and in float32, are exact, whatever their order. Raises
    ValueError if that many terms leave no room for exact sums.
    """
    M, N, K = shape
    generator = torch.Generator(device).manual_seed(0)
    largest = None if exact_terms is None else _largest_integer(exact_terms)

    def draw(sizes: tuple[int, ...], recipe: str) -> tuple[Tensor, Tensor]:
        values = torch.empty(sizes, dtype=torch.bfloat16, device=device)
        if largest is None:
            return quantize(values.normal_(generator=generator), recipe)
        values.random_(-largest, largest + 1, generator=generator)
        scales = quantization.empty_scales(sizes, recipe, torch.device(device))
        scales.random_(-_EXPONENT, _EXPONENT + 1, generator=generator).exp2_()
        return values.to(torch.float8_e4m3fn), scales

    a, scale_a = draw((M, K), "1x128")
    weight, scale_of_weight = draw((*lead, N, K), recipe_b)
    return BlockScaled(a, weight.mT, scale_a, scale_of_weight.mT)


def _largest_integer(terms: int) -> int:
    """Returns the largest integer to multiply. A sum of products is a multiple of the smallest
    product of two scales, and at most 2^24 times it.
    """
    ratio_of_scales = 2 ** (4 * _EXPONENT)
    largest = math.isqrt(min(_EXACT_BLOCK // BLOCK, _EXACT // (ratio_of_scales * max(terms, 1))))
    if not largest:
        raise ValueError(
            f"K is {terms}, expected at most {_EXACT // ratio_of_scales} for exact sums"
        )
    return largest


def by_columns(scales: Tensor) -> Tensor:
    """Returns scales (R, C) whose columns follow one another in memory; torch's product accepts no
    other strides.
    """
    return scales.t().contiguous().t()


def dequantised(values: Tensor, scales: Tensor | None, block: tuple[int, int]) -> Tensor:
    """Returns values (R, C) in float64, times the scales of their blocks of rows and columns, where
    there are any.
    """
    if scales is None:
        return values.double()
    rows, columns = block
    spread = scales.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return values.double() * spread[: values.shape[0], : values.shape[1]]

"""fp8 operands with block scales, as checkpoints store them: A has one scale for each row and 128
terms, B one for each 128 columns and 128 terms.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from outblas.base.shapes import Shape
from outblas.core import quantization
from outblas.core.fp8 import BLOCK
from outblas.torch_ops.quantize import quantize

Tensor = torch.Tensor

# torch reads the scales of B in steps of 16 bytes along K, and takes no padding.
K_MULTIPLE = 4 * BLOCK

_EXACT = 1 << 24  # float32 represents every integer up to it
_EXACT_BLOCK = 1 << 13  # the same for sums of fp8 products in the tensor cores of sm_90
_EXPONENT = 1  # the scales of integers are powers of two, with exponents from -1 to 1


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


def quantised(
    shape: Shape,
    device: torch.device | str,
    *,
    lead: tuple[int, ...] = (),
    recipe_b: str = "128x128",
) -> BlockScaled:
    """Returns operands from normal(0, 1), the same every time, quantised as callers do. `lead`: the
    leading sizes of B; `recipe_b`: which of its values share a scale.
    """
    M, N, K = shape
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        t = torch.empty(sizes, dtype=torch.bfloat16, device=device)
        return t.normal_(generator=generator)

    a, scale_a = quantize(normal(M, K), "1x128")
    weight, scale_of_weight = quantize(normal(*lead, N, K), recipe_b)
    return BlockScaled(a, weight.mT, scale_a, scale_of_weight.mT)


def integers(
    shape: Shape,
    device: torch.device | str,
    *,
    lead: tuple[int, ...] = (),
    recipe_b: str = "128x128",
    terms: int | None = None,
) -> BlockScaled:
    """Returns small integers with scales that are powers of two, as `quantised` lays them out, the
    same every time: sums of up to `terms` products, K unless given, in tensor cores and in float32
    are exact, whatever their order.

    Raises ValueError if that many terms leave no room for exact sums.
    """
    M, N, K = shape
    largest = _largest_integer(K if terms is None else terms)
    generator = torch.Generator(device).manual_seed(0)

    def draw(sizes: tuple[int, ...], recipe: str) -> tuple[Tensor, Tensor]:
        values = torch.empty(sizes, dtype=torch.bfloat16, device=device)
        values.random_(-largest, largest + 1, generator=generator)
        scales = quantization.empty_scales(sizes, recipe, torch.device(device))
        scales.random_(-_EXPONENT, _EXPONENT + 1, generator=generator).exp2_()
        return values.to(torch.float8_e4m3fn), scales

    a, scale_a = draw((M, K), "1x128")
    weight, scale_of_weight = draw((*lead, N, K), recipe_b)
    return BlockScaled(a, weight.mT, scale_a, scale_of_weight.mT)


def _largest_integer(K: int) -> int:
    """Returns the largest integer to multiply. A sum of K products is a multiple of the smallest
    product of two scales, and at most 2^24 times it.
    """
    ratio_of_scales = 2 ** (4 * _EXPONENT)
    largest = math.isqrt(min(_EXACT_BLOCK // BLOCK, _EXACT // (ratio_of_scales * max(K, 1))))
    if not largest:
        raise ValueError(f"K is {K}, expected at most {_EXACT // ratio_of_scales} for exact sums")
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

"""fp8 operands with block scales, as checkpoints store them: A has one scale for each row and 128
terms, B one for each 128 columns and 128 terms.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from outblas.base.shapes import Shape
from outblas.bench.operands import normal
from outblas.core import fp8

Tensor = torch.Tensor

BLOCK = fp8.BLOCK
# torch reads the scales of B in steps of 16 bytes along K, and takes no padding.
K_MULTIPLE = 4 * BLOCK

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
_EXACT = 1 << 24  # float32 represents every integer up to it
_EXACT_BLOCK = 1 << 13  # the same for sums of fp8 products in the tensor cores of sm_90
_EXPONENT = 1  # the scales of integers are powers of two, with exponents from -1 to 1


class BlockScaled(NamedTuple):
    """A (M, K) and B (K, N), stored by columns, with their float32 scales. `scale_a` (M, K/128) is
    stored by columns, and `scale_b` (K/128, N/128) too; torch accepts no other strides. Sizes that
    are not multiples of 128 are rounded up.
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


def quantised(shape: Shape, device: torch.device | str) -> BlockScaled:
    """Returns operands from normal(0, 1), the same every time. The largest magnitude of a block
    becomes the largest that fp8 represents.
    """
    a, b, _ = normal(shape, "nt", torch.bfloat16, device=str(device))
    a, scale_a = _quantised(a, 1)
    weight, scale_of_weight = _quantised(b.t(), BLOCK)
    return BlockScaled(a, weight.t(), by_columns(scale_a), scale_of_weight.t())


def integers(shape: Shape, device: torch.device | str) -> BlockScaled:
    """Returns small integers with scales that are powers of two, the same every time: sums in
    tensor cores and in float32 are exact, whatever their order.

    Raises ValueError if K leaves no room for exact sums.
    """
    M, N, K = shape
    draw, blocks = Integers(K, device), math.ceil(K / BLOCK)
    a, weight = draw.values(M, K), draw.values(N, K)
    scale_a, scale_of_weight = draw.scales(M, blocks), draw.scales(math.ceil(N / BLOCK), blocks)
    return BlockScaled(a, weight.t(), by_columns(scale_a), scale_of_weight.t())


class Integers:
    """Draws small integers and scales that are powers of two, the same every time, for sums of up
    to K products.

    Raises ValueError if K leaves no room for exact sums.
    """

    def __init__(self, K: int, device: torch.device | str) -> None:
        self._largest = _largest_integer(K)
        self._generator = torch.Generator(device).manual_seed(0)

    def values(self, *shape: int) -> Tensor:
        t = torch.empty(shape, dtype=torch.bfloat16, device=self._generator.device)
        return t.random_(-self._largest, self._largest + 1, generator=self._generator).to(_FP8)

    def scales(self, *shape: int) -> Tensor:
        t = torch.empty(shape, device=self._generator.device)
        return t.random_(-_EXPONENT, _EXPONENT + 1, generator=self._generator).exp2_()


def _largest_integer(K: int) -> int:
    """Returns the largest integer to multiply. A sum of K products is a multiple of the smallest
    product of two scales, and at most 2^24 times it.
    """
    ratio_of_scales = 2 ** (4 * _EXPONENT)
    largest = math.isqrt(min(_EXACT_BLOCK // BLOCK, _EXACT // (ratio_of_scales * max(K, 1))))
    if not largest:
        raise ValueError(f"K is {K}, expected at most {_EXACT // ratio_of_scales} for exact sums")
    return largest


def _quantised(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Returns the values of x (R, K) in fp8, and one scale for each block of `rows` × 128."""
    R, K = x.shape
    padded = pad(x.float(), (0, -K % BLOCK, 0, -R % rows))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, rows))
    scales = blocks.abs().amax((1, 3)).clamp_(min=torch.finfo(torch.float32).tiny) / _LARGEST
    values = (blocks / scales[:, None, :, None]).view(padded.shape)
    return values[:R, :K].to(_FP8).contiguous(), scales


def by_columns(scales: Tensor) -> Tensor:
    """Returns scales (R, C) whose columns follow one another in memory."""
    return scales.t().contiguous().t()


def dequantised(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Returns values (R, C) in float64, times the scales of their blocks of rows and columns."""
    rows, columns = block
    spread = scales.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return values.double() * spread[: values.shape[0], : values.shape[1]]

"""Operands of fp8 products, their scales, and the products in float64."""

from typing import Any

import torch
from torch.nn.functional import ScalingType

from outblas.torch_ops import block_scales

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def fp8_operands(
    M: int,
    N: int,
    K: int,
    a: torch.dtype = E4M3,
    b: torch.dtype = E4M3,
    device: str = "cpu",
    most: int = 0,
) -> Any:
    """A (M, K) and B (K, N) of normal values, or of integers up to `most`; B lies as a transposed
    weight does.
    """
    generator = torch.Generator(device).manual_seed(M + N + K)

    def made(rows: int, dtype: torch.dtype) -> torch.Tensor:
        t = torch.randn(rows, K, generator=generator, device=device)
        return (t.round().clamp(-most, most) if most else t).to(dtype)

    return made(M, a), made(N, b).t()


BLOCK = 128
BY_ROW, SQUARE = "1x128", "128x128"
ROW, ALL = "rowwise", "tensorwise"
RECIPES = {
    BY_ROW: ScalingType.BlockWise1x128,
    SQUARE: ScalingType.BlockWise128x128,
    ROW: ScalingType.RowWise,
    ALL: ScalingType.TensorWise,
}
ORDERS = "by rows", "by columns", "padded", "every second"  # how the elements of scales lie


def block_scale(
    rows: int, K: int, recipe: str, order: str = "by rows", device: str = "cpu"
) -> torch.Tensor:
    """Powers of two, one for each block of an operand that is stored with one row for each row of A
    or column of B.
    """
    shape = -(-rows // (BLOCK if recipe == SQUARE else 1)), -(-K // BLOCK)
    generator = torch.Generator().manual_seed(rows + K)
    values = 2.0 ** torch.randint(-2, 3, shape, generator=generator)
    if order == "by columns":
        values = values.t().contiguous().t()
    elif order == "padded":
        wide = torch.full((shape[0], shape[1] + 3), float("nan"))
        wide[:, : shape[1]] = values
        values = wide[:, : shape[1]]
    elif order == "every second":
        values = values.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2]
    if device == "cpu":
        return values
    moved = torch.empty_strided(shape, values.stride(), device=device)
    return moved.copy_(values)


def scaled(operand: torch.Tensor, scale: torch.Tensor, recipe: str) -> torch.Tensor:
    """An operand that is stored with one row for each row of A or column of B, in float64 and times
    the scales of its blocks.
    """
    rows, terms = (torch.arange(n, device=operand.device) for n in operand.shape)
    each = scale[rows // BLOCK if recipe == SQUARE else rows][:, terms // BLOCK]
    return operand.double() * each.double()


def with_recipes(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, ScalingType, torch.Tensor, ScalingType]:
    """The first arguments of `scaled_mm` for scales that tell by their shapes what they are of, as
    those of its operator.
    """
    (M, K), N = a.shape, b.shape[1]
    pair = block_scales.recipes(M, N, K, scale_a, scale_b)
    if pair is None:
        kinds = [RECIPES[ALL if scale.numel() == 1 else ROW] for scale in (scale_a, scale_b)]
        return a, b, scale_a, kinds[0], scale_b, kinds[1]
    scale_a = scale_a.t() if pair[0] == SQUARE else scale_a
    scale_b = scale_b.t() if pair[1] == BY_ROW else scale_b
    return a, b, scale_a, RECIPES[pair[0]], scale_b, RECIPES[pair[1]]

"""Operands of fp8 products, their scales, and the products in float64."""

from typing import Any

import torch

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

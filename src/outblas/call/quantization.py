"""Quantization to fp8: its recipes, the only checker of its arguments, and the layout of what it
returns.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch.nn.functional import ScalingType

from outblas.call.errors import OperandError
from outblas.call.fp8 import BLOCK
from outblas.call.problem import DTYPES

Tensor = torch.Tensor

# recipe -> the name that torch's enumeration ScalingType has for it
RECIPES = {
    "tensorwise": "TensorWise",
    "rowwise": "RowWise",
    "1x128": "BlockWise1x128",
    "128x128": "BlockWise128x128",
}

FORMATS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}  # the largest finite values
# The least scale of values that are not all zero: the smallest one whose reciprocal is a normal
# float32, as it is itself.
LEAST_SCALE = 2.0**-126
# TMA reads columns of scales that begin at multiples of 16 bytes.
ROWS_MULTIPLE = 4


def recipe_name(
    recipe: Any, argument: str = "recipe", covered: Collection[str] = tuple(RECIPES)
) -> str:
    """Returns the name of a recipe, which is given by it or as a member of torch's ScalingType.
    Raises TypeError or ValueError, which name the argument, for another one.
    """
    of_members = {RECIPES[name]: name for name in covered}
    if isinstance(recipe, str):
        if recipe not in covered:
            raise ValueError(f"{argument} is {recipe!r}, expected {_listed(covered)}")
        return recipe
    if not isinstance(recipe, ScalingType):
        raise TypeError(
            f"{argument} is {type(recipe).__name__}, expected a str or a member of torch's "
            "ScalingType"
        )
    if recipe.name not in of_members:
        raise ValueError(f"{argument} is {recipe.name}, expected {_listed(of_members)}")
    return of_members[recipe.name]


def _listed(names: Collection[str]) -> str:
    return f"{'one of ' if len(names) > 1 else ''}{', '.join(names)}"


def check(x: Tensor, recipe: str, dtype: torch.dtype) -> None:
    """Raises OperandError for a tensor or a dtype that a recipe cannot take."""
    if x.dtype not in DTYPES:
        raise OperandError(f"x.dtype is {x.dtype}, expected one of {', '.join(map(str, DTYPES))}")
    if dtype not in FORMATS:
        raise OperandError(f"dtype is {dtype}, expected one of {', '.join(map(str, FORMATS))}")
    least = {"tensorwise": 0, "128x128": 2}.get(recipe, 1)
    if x.dim() < least:
        raise OperandError(f"x has {x.dim()} dimensions, expected at least {least} with {recipe}")


def blocks(size: int) -> int:
    """Returns how many blocks cover a dimension."""
    return (size + BLOCK - 1) // BLOCK


def empty(x: Tensor, recipe: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns memory for the quantized tensor, in rows, and for its scales."""
    quantized = torch.empty(x.shape, dtype=dtype, device=x.device)
    return quantized, empty_scales(x.shape, recipe, x.device)


def empty_scales(of: tuple[int, ...], recipe: str, device: torch.device) -> Tensor:
    """Returns memory for the scales of a tensor of this shape. Those of 1x128 lie by columns, each
    of which begins at a multiple of 16 bytes.
    """
    if recipe == "1x128":
        *leading, columns = of
        rows = 1
        strides: list[int] = []
        for size in reversed(leading):
            strides.insert(0, rows)
            rows = rows * size
        padded = (rows + ROWS_MULTIPLE - 1) // ROWS_MULTIPLE * ROWS_MULTIPLE
        memory = torch.empty(blocks(columns), padded, dtype=torch.float32, device=device)
        return memory.as_strided((*leading, blocks(columns)), (*strides, padded))
    shape: tuple[int, ...] = ()
    if recipe == "rowwise":
        shape = (*of[:-1], 1)
    elif recipe == "128x128":
        shape = (*of[:-2], blocks(of[-2]), blocks(of[-1]))
    return torch.empty(shape, dtype=torch.float32, device=device)


def spread(scale: Tensor, recipe: str, shape: tuple[int, ...]) -> Tensor:
    """Returns scales as a tensor that broadcasts to the quantized one, of the shape given."""
    if recipe in ("1x128", "128x128"):
        scale = scale.repeat_interleave(BLOCK, -1)[..., : shape[-1]]
    if recipe == "128x128":
        scale = scale.repeat_interleave(BLOCK, -2)[..., : shape[-2], :]
    return scale

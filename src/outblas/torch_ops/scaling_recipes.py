"""The arguments of `torch.nn.functional.scaled_mm`, which names a recipe for each scale, in the
form of `torch._scaled_mm`.

Recipes and swizzles are members of torch's enumerations, which an older torch does not have. They
are told by the names of their types, so that none of them has to exist.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..core.errors import OperandError

Tensor = torch.Tensor

TENSOR_WISE, ROW_WISE = "TensorWise", "RowWise"
_COVERED = f"expected {TENSOR_WISE} or {ROW_WISE}"
_ENUMERATIONS = ("_ScalingType", "ScalingType", "_SwizzleType", "SwizzleType")
# The keywords that only this form has.
KEYWORDS = frozenset(
    (
        "mat_a",
        "mat_b",
        "scale_recipe_a",
        "scale_recipe_b",
        "swizzle_a",
        "swizzle_b",
        "output_dtype",
        "contraction_dim",
    )
)
_PLACE_OF_RECIPE = 3  # scale_recipe_a follows mat_a, mat_b and scale_a


def is_given(positional: Sequence[Any], named: Any) -> bool:
    """Returns whether the arguments of a call are those of `torch.nn.functional.scaled_mm`."""
    fourth = positional[_PLACE_OF_RECIPE] if len(positional) > _PLACE_OF_RECIPE else None
    if isinstance(fourth, Tensor):  # most calls, so it is looked at first
        return False
    if not KEYWORDS.isdisjoint(named):
        return True
    first = fourth[0] if isinstance(fourth, list | tuple) and fourth else fourth
    return _is_member(first)


def check_scale(name: str, scale: Any, recipe: Any, by_row: tuple[int, int] | None) -> Any:
    """Returns `scale_a` or `scale_b`, if its recipe is covered and fits its shape.

    `by_row`: the shape of a scale that has one element for each row of A, or column of B; None
    where the operand is no matrix.

    Raises OperandError for a recipe that is not covered or does not fit, and TypeError for what is
    no recipe.
    """
    of_recipe = name.replace("scale", "scale_recipe")
    kind = _name(of_recipe, _only(of_recipe, recipe))
    if kind not in (TENSOR_WISE, ROW_WISE):
        raise OperandError(f"{of_recipe} is {kind}, {_COVERED}")
    found = _only(name, scale)
    if isinstance(found, Tensor) and by_row is not None:
        shape = tuple(found.shape)
        if kind == TENSOR_WISE and found.numel() != 1:
            raise OperandError(f"{name}.shape is {shape}, expected one element with {kind}")
        if kind == ROW_WISE and shape != by_row:
            raise OperandError(f"{name}.shape is {shape}, expected {by_row} with {kind}")
    return found


def check_swizzle(name: str, swizzle: Any) -> None:
    """Raises OperandError for scales that do not lie as they are numbered."""
    given = _only(name, swizzle)
    if given is not None and _name(name, given) != "NO_SWIZZLE":
        raise OperandError(f"{name} is {_name(name, given)}, expected NO_SWIZZLE or None")


def check_contraction(dimensions: Sequence[int]) -> None:
    """Raises OperandError for products along other dimensions than those of a matrix product."""
    if tuple(dim % 2 for dim in dimensions) not in ((), (1, 0)):
        raise OperandError(
            f"contraction_dim is {tuple(dimensions)}, expected () or (1, 0): the columns of mat_a "
            "and the rows of mat_b"
        )


def _only(name: str, given: Any) -> Any:
    """Returns a value, or the only one of a list; None for an empty list. Raises OperandError for
    several, which recipes of two levels have.
    """
    if not isinstance(given, list | tuple):
        return given
    if len(given) > 1:
        raise OperandError(f"{name} has {len(given)} entries, expected one")
    return given[0] if given else None


def _name(name: str, member: Any) -> str:
    """Returns the name of a member of an enumeration. Raises TypeError for another value."""
    if not _is_member(member):
        raise TypeError(
            f"{name} is {type(member).__name__}, expected a member of torch's enumeration"
        )
    return str(member.name)


def _is_member(given: Any) -> bool:
    """Returns whether a value is a member of torch's enumerations of recipes and of swizzles."""
    return type(given).__name__ in _ENUMERATIONS

"""The arguments of `torch.nn.functional.scaled_mm`, which names a recipe for each scale, in the
form of `torch._scaled_mm`.

Recipes and swizzles are members of torch's enumerations, which an older torch does not have. They
are told by the names of their types, so that none of them has to exist.
"""

from collections.abc import Sequence
from typing import Any

import torch

from outblas.call.errors import OperandError
from outblas.call.quantization import blocks
from outblas.torch_ops import block_scales

Tensor = torch.Tensor

TENSOR_WISE, ROW_WISE = "TensorWise", "RowWise"
BLOCK_WISE = {
    "BlockWise1x128": block_scales.BY_ROW,
    "BlockWise128x128": block_scales.SQUARE,
}
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


def check_scales(
    a: Any,
    b: Any,
    scale_a: Any,
    recipe_a: Any,
    scale_b: Any,
    recipe_b: Any,
    use_fast_accum: Any,
) -> tuple[Any, Any]:
    """Returns both scales in the form of `torch._scaled_mm`, if their recipes are covered and fit
    their shapes. The shapes of scales of operands that are no matrices are not checked.

    Raises OperandError for a recipe that is not covered or does not fit, and TypeError for what is
    no recipe.
    """
    kind_a, kind_b = _recipe("scale_recipe_a", recipe_a), _recipe("scale_recipe_b", recipe_b)
    in_blocks = kind_a in BLOCK_WISE
    if in_blocks != (kind_b in BLOCK_WISE):
        fitting = BLOCK_WISE if in_blocks else (TENSOR_WISE, ROW_WISE)
        raise OperandError(
            f"scale_recipe_b is {kind_b}, expected {' or '.join(fitting)} with {kind_a} as "
            "scale_recipe_a"
        )
    if in_blocks and use_fast_accum is True:
        raise OperandError(block_scales.NO_FAST_SUMS)
    scale_a, scale_b = _only("scale_a", scale_a), _only("scale_b", scale_b)
    if not (_is_matrix(a) and _is_matrix(b)):
        return scale_a, scale_b
    (M, K), N = a.shape, b.shape[1]
    if not in_blocks:
        _check_whole("scale_a", scale_a, kind_a, (M, 1))
        _check_whole("scale_b", scale_b, kind_b, (1, N))
        return scale_a, scale_b
    scale_a = _in_blocks("scale_a", scale_a, kind_a, M, K)
    scale_b = _in_blocks("scale_b", scale_b, kind_b, N, K)
    return scale_a, scale_b.t() if isinstance(scale_b, Tensor) else scale_b


def _check_whole(name: str, scale: Any, kind: str, by_row: tuple[int, int]) -> None:
    """Raises OperandError for a scale that does not have the shape of its recipe. `by_row` is the
    shape with one element for each row of A, or column of B.
    """
    if not isinstance(scale, Tensor):  # the types of arguments are checked later
        return
    shape = tuple(scale.shape)
    if kind == TENSOR_WISE and scale.numel() != 1:
        raise OperandError(f"{name}.shape is {shape}, expected one element with {kind}")
    if kind == ROW_WISE and shape != by_row:
        raise OperandError(f"{name}.shape is {shape}, expected {by_row} with {kind}")


def _in_blocks(name: str, scale: Any, kind: str, rows: int, K: int) -> Any:
    """Returns a scale of blocks of an operand that is stored with this number of rows, as
    `block_scales.from_torch` does. Raises OperandError where it does not fit.
    """
    if not isinstance(scale, Tensor):
        return scale
    recipe = BLOCK_WISE[kind]
    found = block_scales.from_torch(scale, recipe, rows, K)
    if found is None:
        expected = [(rows, blocks(K))]
        if recipe == block_scales.SQUARE:
            expected = block_scales.square_shapes(rows, K)
        raise OperandError(
            f"{name}.shape is {tuple(scale.shape)}, expected {' or '.join(map(str, expected))} "
            f"with {kind}"
        )
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


def _recipe(name: str, recipe: Any) -> str:
    """Returns the name of a recipe that is covered. Raises as `check_scales`."""
    kind = _name(name, _only(name, recipe))
    covered = TENSOR_WISE, ROW_WISE, *BLOCK_WISE
    if kind not in covered:
        raise OperandError(f"{name} is {kind}, expected one of {', '.join(covered)}")
    return kind


def _is_matrix(operand: Any) -> bool:
    return isinstance(operand, Tensor) and operand.dim() == 2


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

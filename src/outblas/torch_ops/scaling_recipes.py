"""Scales with recipes, as `torch.nn.functional.scaled_mm` and `scaled_grouped_mm` take them, in the
form of outblas's operators, whose scales tell by their shapes what they are of.

The forms differ where scales of A are 128x128, which torch has the other way round, and where those
of B are 1x128: torch has them as they belong to the stored weight (N, K).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import ScalingType, SwizzleType
from torch.overrides import handle_torch_function

from outblas.call.errors import OperandError
from outblas.call.quantization import blocks
from outblas.torch_ops import block_scales

Tensor = torch.Tensor
Recipe = ScalingType | Sequence[ScalingType]
Swizzle = SwizzleType | Sequence[SwizzleType] | None

TENSOR_WISE, ROW_WISE = "TensorWise", "RowWise"
BLOCK_WISE = {
    "BlockWise1x128": block_scales.BY_ROW,
    "BlockWise128x128": block_scales.SQUARE,
}
_COVERED = TENSOR_WISE, ROW_WISE, *BLOCK_WISE
# The names of pairs of recipes that fit together, by identity: to hash a member or to read its name
# takes longer than all else that warm calls do here.
_PAIRS = {
    (id(getattr(ScalingType, a)), id(getattr(ScalingType, b))): (a, b)
    for a in _COVERED
    for b in _COVERED
    if (a in BLOCK_WISE) == (b in BLOCK_WISE)
}
_SEQUENCES = list, tuple


def only(name: str, values: Any) -> Any:
    """Returns a value, or the only one of a list; None for an empty list. Raises OperandError for
    several, which recipes of two levels have.
    """
    if not isinstance(values, _SEQUENCES):
        return values
    if len(values) > 1:
        raise OperandError(f"{name} has {len(values)} entries, expected one")
    return values[0] if values else None


def overridden(
    function: Callable[..., Any],
    tensors: Mapping[str, Any],
    recipes: tuple[Any, ...],
    options: Mapping[str, Any],
) -> Any:
    """Hands a call of a public function to the mode or the tensor type that overrides it.

    `tensors`: the tensors by name, both operands and both scales first. `recipes`: the recipes and
    swizzles of both, and the dimensions of the sums. `options`: the other arguments. None, and what
    is not there, is left out.
    """
    a, b, scale_a, scale_b, *_ = tensors.values()
    *_, swizzle_a, swizzle_b, dims = recipes
    how = {"swizzle_a": swizzle_a, "swizzle_b": swizzle_b, "contraction_dim": dims or None}
    keywords = [*[*tensors.items()][4:], *how.items(), *options.items()]
    return handle_torch_function(
        function,
        tuple(tensors.values()),
        *(a, b, scale_a, recipes[0], scale_b, recipes[1]),
        **{name: value for name, value in keywords if value is not None},
    )


def check_layout(
    a: Any, b: Any, swizzle_a: Any, swizzle_b: Any, contraction_dim: Sequence[int]
) -> None:
    """Raises OperandError for scales that do not lie as they are numbered, and for products along
    other dimensions than those of a matrix product; TypeError for what is no swizzle.
    """
    for name, swizzle in (("swizzle_a", swizzle_a), ("swizzle_b", swizzle_b)):
        member = only(name, swizzle)
        if member is not None and _name(name, member, SwizzleType) != "NO_SWIZZLE":
            raise OperandError(f"{name} is {member.name}, expected NO_SWIZZLE or None")
    sizes = [t.dim() if isinstance(t, Tensor) else 2 for t in (a, b)]
    along = tuple(dim % size for dim, size in zip(contraction_dim, sizes, strict=False))
    if len(contraction_dim) not in (0, 2) or along not in ((), (sizes[0] - 1, sizes[1] - 2)):
        raise OperandError(
            f"contraction_dim is {tuple(contraction_dim)}, expected () or "
            f"{sizes[0] - 1, sizes[1] - 2}: the columns of mat_a and the rows of mat_b"
        )


def of_matrices(
    a: Any, b: Any, scale_a: Any, recipe_a: Any, scale_b: Any, recipe_b: Any, use_fast_accum: Any
) -> tuple[Any, Any]:
    """Returns both scales of `scaled_mm` in the form of its operator, if their recipes are covered
    and fit their shapes. What is no tensor is returned as it is, and scales of operands that are no
    matrices are not checked.

    Raises OperandError for a recipe that is not covered or does not fit, and TypeError for what is
    no recipe.
    """
    kind_a, kind_b = _pair(recipe_a, recipe_b)
    in_blocks = kind_a in BLOCK_WISE
    if in_blocks and use_fast_accum is True:
        raise OperandError(block_scales.NO_FAST_SUMS)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() == b.dim() == 2):
        return scale_a, scale_b
    if in_blocks:
        (M, K), N = a.shape, b.shape[1]
        return (
            _in_blocks("scale_a", scale_a, kind_a, M, K, is_b=False),
            _in_blocks("scale_b", scale_b, kind_b, N, K, is_b=True),
        )
    _check_whole("scale_a", scale_a, kind_a, a, 0)
    _check_whole("scale_b", scale_b, kind_b, b, 1)
    return scale_a, scale_b


def of_groups(
    a: Any, b: Any, scale_b: Any, recipe_a: Any, recipe_b: Any, use_fast_accum: Any
) -> Any:
    """Returns the scales of B of `scaled_grouped_mm` in the form of its operator, which checks all
    other shapes. Raises as `of_matrices`.
    """
    kinds = _pair(recipe_a, recipe_b)
    sizes = tuple(t.dim() if isinstance(t, Tensor) else 0 for t in (a, b))
    by_terms = sizes == (2, 2)
    covered = "BlockWise1x128", "BlockWise1x128" if by_terms else "BlockWise128x128"
    if kinds != covered and (by_terms or sizes[1] == 3):
        raise OperandError(
            f"scale_recipe_a and scale_recipe_b are {' and '.join(kinds)}, expected "
            f"{' and '.join(covered)} where mat_b has {sizes[1]} dimensions"
        )
    if use_fast_accum is True:
        raise OperandError(block_scales.NO_FAST_SUMS)
    if not by_terms:
        return scale_b
    return _in_blocks("scale_b", scale_b, kinds[1], b.shape[1], b.shape[0], is_b=True)


def _check_whole(name: str, scale: Any, kind: str, operand: Tensor, dim: int) -> None:
    """Raises OperandError for a scale without blocks that does not have the shape of its recipe.
    `dim`: that of the operand which has a scale for each row or column.
    """
    if not isinstance(scale, Tensor):  # the types of arguments are checked later
        return
    if kind == TENSOR_WISE:
        if scale.numel() == 1:
            return
        expected = "one element"
    else:
        size = operand.shape[dim]
        by_row = (size, 1) if dim == 0 else (1, size)
        if scale.shape == by_row:
            return
        expected = str(by_row)
    raise OperandError(f"{name}.shape is {tuple(scale.shape)}, expected {expected} with {kind}")


def _in_blocks(name: str, scale: Any, kind: str, rows: int, K: int, *, is_b: bool) -> Any:
    """Returns a scale of blocks of an operand that is stored with this number of rows, as
    `block_scales.from_torch` does. Raises OperandError where it does not fit.
    """
    if not isinstance(scale, Tensor):
        return scale
    recipe = BLOCK_WISE[kind]
    view = block_scales.from_torch(scale, recipe, rows, K, is_b=is_b)
    if view is None:
        expected = [(rows, blocks(K))]
        if recipe == block_scales.SQUARE:
            expected = block_scales.square_shapes(rows, K)
        raise OperandError(
            f"{name}.shape is {tuple(scale.shape)}, expected {' or '.join(map(str, expected))} "
            f"with {kind}"
        )
    return view


def _pair(recipe_a: Any, recipe_b: Any) -> tuple[str, str]:
    """Returns the names of two recipes that are covered. Raises as `of_matrices`."""
    if not torch.compiler.is_dynamo_compiling():
        kinds = _PAIRS.get((id(recipe_a), id(recipe_b)))
        if kinds is not None:
            return kinds
    kind_a, kind_b = _kind("scale_recipe_a", recipe_a), _kind("scale_recipe_b", recipe_b)
    if (kind_a in BLOCK_WISE) != (kind_b in BLOCK_WISE):
        fitting = BLOCK_WISE if kind_a in BLOCK_WISE else (TENSOR_WISE, ROW_WISE)
        raise OperandError(
            f"scale_recipe_b is {kind_b}, expected {' or '.join(fitting)} with {kind_a} as "
            "scale_recipe_a"
        )
    return kind_a, kind_b


def _kind(name: str, recipe: Any) -> str:
    """Returns the name of a recipe that is covered. Raises as `of_matrices`."""
    kind = _name(name, only(name, recipe), ScalingType)
    if kind not in _COVERED:
        raise OperandError(f"{name} is {kind}, expected one of {', '.join(_COVERED)}")
    return kind


def _name(argument: str, member: Any, enumeration: Any) -> str:
    """Returns the name of a member of an enumeration. Raises TypeError for another value."""
    if not isinstance(member, enumeration):
        raise TypeError(
            f"{argument} is {type(member).__name__}, expected a member of "
            f"torch.nn.functional.{enumeration.__name__.lstrip('_')}"
        )
    return str(member.name)

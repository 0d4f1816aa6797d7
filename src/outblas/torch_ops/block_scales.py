"""Scales of blocks: one for 128 terms of a row of A or a column of B, or one for 128 by 128 values.

For A (M, K), scales of "1x128" have the shape (M, ceil(K/128)), and those of "128x128" the shape
(ceil(M/128), ceil(K/128)). For B (K, N) they have (ceil(K/128), N) and (ceil(K/128), ceil(N/128)):
like B itself, they are the transposes of what belongs to the stored weight. Strides are free.

Where a shape fits several recipes, all of them mean the same product, so that the choice is one of
speed only:

- K up to 128: (M, 1) with (1, N) is a scale for each row and column, and (1, 1) one for all. The
  kernel then multiplies by them once.
- One row of A is "1x128", so that it has the kernel that several rows have.
- One column of B is "128x128", which has the fewest scales to load.
"""

import torch

from outblas.call import fp8
from outblas.call.errors import OperandError
from outblas.call.quantization import blocks

Tensor = torch.Tensor

BLOCK = fp8.BLOCK
BY_ROW, SQUARE = "1x128", "128x128"
Recipes = tuple[str, str]  # of A and of B

NO_FAST_SUMS = (
    "use_fast_accum is True, expected False with scales of blocks: sums of 128 products are added "
    "in float32"
)


def padded_count(terms: int) -> int:
    """Returns the number of blocks along K in scales of "128x128" that are padded as
    `torch.nn.functional.scaled_mm` requires: a multiple of four.
    """
    return -(-blocks(terms) // 4) * 4


def recipes(M: int, N: int, K: int, scale_a: Tensor, scale_b: Tensor) -> Recipes | None:
    """Returns the recipes of the scales of a product of these sizes, or None if each of them has
    one element, or one for each row of A or column of B.

    Raises OperandError for a scale that fits no recipe, and for scales of blocks of one operand
    only.
    """
    shape_a, shape_b = tuple(scale_a.shape), tuple(scale_b.shape)
    whole_a = shape_a == (M, 1) or _is_single(shape_a)
    whole_b = shape_b == (1, N) or _is_single(shape_b)
    if whole_a and whole_b:
        return None
    by_row_a, square_a = (M, blocks(K)), (blocks(M), blocks(K))
    by_row_b, square_b = (blocks(K), N), (blocks(K), blocks(N))
    of_a = BY_ROW if shape_a == by_row_a else SQUARE if shape_a == square_a else ""
    of_b = SQUARE if shape_b == square_b else BY_ROW if shape_b == by_row_b else ""
    if of_a and of_b:
        return of_a, of_b
    for name, shape, known, whole, in_blocks in (
        ("scale_a", shape_a, whole_a or of_a, (M, 1), f"{by_row_a} or {square_a}"),
        ("scale_b", shape_b, whole_b or of_b, (1, N), f"{by_row_b} or {square_b}"),
    ):
        if not known:
            raise OperandError(
                f"{name}.shape is {shape}, expected one element or {whole}, or {in_blocks} with "
                f"blocks of {BLOCK}"
            )
    name, shape, other, in_blocks = (
        ("scale_a", shape_a, "scale_b", f"{by_row_a} or {square_a}")
        if whole_a
        else ("scale_b", shape_b, "scale_a", f"{by_row_b} or {square_b}")
    )
    raise OperandError(
        f"{name}.shape is {shape}, expected {in_blocks}, because {other} has blocks of {BLOCK}"
    )


def _is_single(shape: tuple[int, ...]) -> bool:
    """Returns whether a tensor of this shape has one element. A program that is compiled may not
    know its number of rows, so it is compared last.
    """
    return all(size == 1 for size in reversed(shape))


def has_blocks(formats: str) -> bool:
    """Returns whether the `formats` of a call name recipes of blocks."""
    return bool(formats) and fp8.formats(formats).block_a > 0


def expanded(scale: Tensor, recipe: str, shape: tuple[int, int], terms: int) -> Tensor:
    """Returns the scale of each value of an operand of this shape, whose dimension `terms` is along
    K.
    """
    for dim in (0, 1):
        if dim == terms or recipe == SQUARE:
            scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, shape[dim])
    return scale


def from_torch(
    scale: Tensor, recipe: str, rows: int, K: int, *, is_b: bool = False
) -> Tensor | None:
    """Returns a view of a scale that `torch.nn.functional.scaled_mm` takes, of A or of a B that is
    stored with this number of rows: one row for each row (or 128 rows) of the operand as it is
    stored, and one column for each block along K; or the transpose of that, if it `is_b`. Returns
    None where the shape does not fit.

    That function has scales of "128x128" the other way round, padded to `padded_count` rows. Those
    without the padding are taken, too.
    """
    shape = tuple(scale.shape)
    if recipe == BY_ROW:
        if shape != (rows, blocks(K)):
            return None
        return scale.t() if is_b else scale
    if shape != (blocks(K), blocks(rows)):
        if shape not in square_shapes(rows, K):
            return None
        scale = scale.narrow(0, 0, blocks(K))
    return scale if is_b else scale.t()


def square_shapes(rows: int, K: int) -> list[tuple[int, int]]:
    """Returns the shapes of scales of "128x128" that `from_torch` takes, torch's own first."""
    padded, needed = (padded_count(K), blocks(rows)), (blocks(K), blocks(rows))
    return [padded] if padded == needed else [padded, needed]


def torch_accepts(scale: Tensor, recipe: str, K: int) -> bool:
    """Returns whether torch accepts the strides of a scale that has one row for each row (or 128
    rows) of the stored operand.
    """
    rows, columns = scale.shape
    by_row, by_block = scale.stride()
    if recipe == BY_ROW:
        return (by_row == 1 or rows == 1) and (by_block == rows or columns == 1)
    return (by_block == 1 or columns == 1) and (by_row in (blocks(K), padded_count(K)) or rows == 1)

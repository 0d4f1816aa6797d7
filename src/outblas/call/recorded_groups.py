"""Products that groups divide, in the words of a line of a pack."""

from dataclasses import replace

from outblas.call import recorded_scaling
from outblas.call.fp8 import BLOCK
from outblas.call.grouped import GroupedProblem
from outblas.call.grouped_scales import GroupScales
from outblas.call.problem import Strides, dtype_name
from outblas.call.product_groups import Form, Groups
from outblas.call.products import DTYPES, Products
from outblas.call.scaling import Scaling
from outblas.call.steps import Steps


def products_of(problem: GroupedProblem, top: int = 0) -> Products:
    """Returns the products, without their rows, of a problem that no `unpacked_reason` excludes.
    `top`: as in `Groups`.
    """
    scales, epilogue = problem.scales, problem.epilogue
    result = dtype_name(problem.out_dtype)
    return Products(
        (),
        problem.N,
        problem.M if problem.form == "ragged_k" else problem.K,
        dtype_of(problem),
        _layout(problem),
        Steps(epilogue.bias is not None, epilogue.activation, epilogue.residual is not None),
        scaling=None if scales is None else Scaling(*_recipes(problem, scales), result=result),
        groups=replace(groups_of(problem), top=top),
    )


def rows_of(problem: GroupedProblem) -> int:
    """Returns the rows of a line: the terms where these are divided, and those of one group where
    each has places of its own.
    """
    if problem.form == "ragged_k":
        return problem.K
    return problem.capacity or problem.M


def groups_of(problem: GroupedProblem) -> Groups:
    """Returns how groups divide a product."""
    form: Form = "terms" if problem.form == "ragged_k" else "rows"
    return Groups(
        problem.groups,
        "masked" if problem.capacity else form,
        problem.gathers,
        problem.scatters,
        problem.weighted,
        problem.zero_tail and form == "rows",
    )


def dtype_of(problem: GroupedProblem) -> str:
    """Returns the dtype of the operands, as a line says it."""
    if problem.scales is None:
        return dtype_name(problem.dtype)
    return recorded_scaling.DTYPES[problem.scales.formats]


def unpacked_reason(problem: GroupedProblem) -> str:
    """Returns why a line cannot describe a product; "" if it can."""
    if problem.exchanged:
        return "groups of columns"
    if problem.scales is None and dtype_name(problem.dtype) not in DTYPES:
        return "a dtype of Triton's kernels"
    if problem.scales is None and problem.out_dtype != problem.dtype:
        return "a result of another dtype"
    if problem.epilogue.aux is not None:
        return "aux"
    if 0 in (problem.M, problem.N, problem.K):
        return "nothing is multiplied"
    if any(alignment < 16 for alignment in problem.alignment):
        return "operands at addresses that are no multiples of 16"
    if not _layout(problem):
        return "operands that TMA cannot load"
    bias, residual = problem.epilogue.bias, problem.epilogue.residual
    if bias is not None and (bias.strides[-1] != 1 or bias.alignment < 16):
        return "a bias whose rows are not contiguous"
    if residual is not None and (residual.strides != problem.out or residual.alignment < 16):
        return "a residual that does not lie as the result"
    return ""


def _layout(problem: GroupedProblem) -> str:
    """Returns how A and each matrix of B are stored, where a line can say it, else ""."""
    rows = problem.rows_of_a if problem.gathers else problem.M
    letters = {
        "a": _letters((rows, problem.K), problem.a, problem),
        "b": _letters((problem.K, problem.N), problem.b, problem),
    }
    if problem.scales is not None:
        wanted = ["nt"]
    else:
        wanted = ["tn"] if problem.form == "ragged_k" else ["nt", "nn"]
    known = (each for each in wanted if each[0] in letters["a"] and each[1] in letters["b"])
    return next(known, "")


def _letters(shape: tuple[int, int], strides: Strides, problem: GroupedProblem) -> str:
    """Returns the letters of the ways in which TMA can load a matrix."""
    granule = 8 if problem.scales is None else 16
    *outer, row, column = strides
    if any(step % granule for step in outer):
        return ""
    rows, columns = shape
    by_rows = (column == 1 or columns == 1) and (row % granule == 0 or rows == 1)
    by_columns = (row == 1 or rows == 1) and (column % granule == 0 or columns == 1)
    return "n" * by_rows + "t" * by_columns


def _recipes(problem: GroupedProblem, scales: GroupScales) -> tuple[str, str]:
    """Returns the recipes of the scales of A and B."""
    _, row, block = scales.a
    wide = problem.capacity % 4 == 0 if problem.capacity else problem.M % 4 == 0
    a = recorded_scaling.recipe_by_row(row, block, scales.alignment[0], may_be_wide=wide)
    if scales.columns == BLOCK:
        return a, "128x128"
    _, block, column = scales.b
    wide = problem.columns % 4 == 0
    return a, recorded_scaling.recipe_by_row(column, block, scales.alignment[1], may_be_wide=wide)

"""How the fp8 operands of a recorded product are scaled, in the words of a line of a pack."""

from outblas.call import fp8
from outblas.call import problem as operands
from outblas.call.epilogue import View
from outblas.call.problem import Problem
from outblas.call.scaling import BY_ROWS, FP8_DTYPES, RESULTS, Scaling

TERMS = 2  # fp8 values in an element of a problem
DTYPES = {formats: dtype for dtype, formats in FP8_DTYPES.items()}
_GRANULE = 4  # scales in 16 bytes, which TMA loads together


def dtype_of(problem: Problem) -> str:
    """Returns the dtype of the operands, one of `FP8_DTYPES`."""
    formats = fp8.formats(problem.formats)
    return DTYPES[formats.a, formats.b]


def unpacked_reason(problem: Problem) -> str:
    """Returns why a line cannot describe the scales of a product; "" if it can."""
    if fp8.formats(problem.formats).block_a:
        return ""
    epilogue = problem.epilogue
    for view, across in (
        (epilogue.scale_a, problem.columns),
        (_by_columns(epilogue.scale_b), problem.M),
    ):
        assert view, "a product of fp8 operands has scales"
        if not any(view.strides):
            continue
        along, repeats = view.strides[-2:]
        if along != 1 or (repeats and across > 1):
            return "scales that do not lie one after the other"
        if view.alignment < 16:
            return "scales at addresses that are no multiples of 16"
    return ""


def scaling_of(problem: Problem) -> Scaling:
    """Returns how the operands are scaled. A scale of the only row or column of an operand is of
    the recipe of the other operand.
    """
    formats, epilogue = fp8.formats(problem.formats), problem.epilogue
    if formats.block_a:
        a = _recipe_of_blocks(formats.block_a, epilogue.scale_a, problem.M)
        b = _recipe_of_blocks(formats.block_b, _by_columns(epilogue.scale_b), problem.columns)
    else:
        by_row = [
            view is not None and any(view.strides) for view in (epilogue.scale_a, epilogue.scale_b)
        ]
        singles = problem.M == 1, problem.columns == 1
        a, b = (
            "rowwise" if by_row[i] or (singles[i] and by_row[1 - i]) else "tensorwise"
            for i in range(2)
        )
    result = operands.dtype_name(problem.out_dtype)
    if epilogue.scale_out is not None:
        result = "e4m3-pow2" if epilogue.power_of_two else "e4m3"
    assert result in RESULTS, "no other results are planned"
    return Scaling(a, b, not formats.promoted, result)


def _by_columns(view: View | None) -> View | None:
    """Returns the view of the scales of the transposed operand."""
    return None if view is None else view.transposed()


def _recipe_of_blocks(rows: int, view: View | None, extent: int) -> str:
    """Returns the recipe of scales of which `rows` rows share one, of an operand with `extent`
    rows. Where TMA cannot load them, however they lie, they count as those that `quantize` makes.
    """
    assert view, "a product of fp8 operands has scales"
    if rows > 1:
        return "128x128"
    may_be_wide = extent % _GRANULE == 0
    row, block = view.strides
    return recipe_by_row(row, block, view.alignment, may_be_wide=may_be_wide)


def recipe_by_row(row: int, block: int, alignment: int, *, may_be_wide: bool) -> str:
    """Returns the recipe of scales of single rows, of which neighbouring ones are `row` apart and
    those of neighbouring blocks `block`. `may_be_wide`: whether TMA can load some of as many rows.
    """
    by_columns = row == 1 and block % _GRANULE == 0 and alignment >= 16
    return "1x128" if by_columns or not may_be_wide else BY_ROWS

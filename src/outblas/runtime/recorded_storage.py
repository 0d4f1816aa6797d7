"""How the matrices of a recorded product lie in memory, in the words of a line of a pack."""

from outblas.core.problem import Problem, Strides
from outblas.core.product_storage import PACKED, Storage
from outblas.core.tensor_memory import LINE
from outblas.runtime.recorded_scaling import TERMS


def storage_of(problem: Problem) -> Storage:
    """Returns how the matrices of a product lie in memory, whose operands have a unit stride.

    Where they begin within a cache line is told of a GPU alone, where memory begins at whole lines.
    """
    terms = TERMS if problem.formats else 1
    M, K = problem.M, problem.K
    aligned = LINE if problem.device.type == "cuda" else 16
    a, b, out = problem.alignment[:3]
    return Storage(
        terms * _apart(problem.a, (M, K)),
        terms * _apart(problem.b, (K, problem.columns)),
        _apart(problem.out, (M, problem.N)),
        a if a < aligned else 0,
        b if b < aligned else 0,
        out if out < 16 else 0,
    )


def overlaps(problem: Problem) -> bool:
    """Returns whether rows, or columns that are contiguous, share memory, as repeated ones do."""
    shapes = (problem.M, problem.K), (problem.K, problem.columns), (problem.M, problem.N)
    of_each = zip((problem.a, problem.b, problem.out), shapes, strict=True)
    return any(
        count > 1 and apart < length
        for apart, count, length in (_walk(strides, shape) for strides, shape in of_each)
    )


def has_bias_by_columns(problem: Problem) -> bool:
    """Returns whether a bias, if there is one, has a value for each column, one after the other."""
    bias = problem.epilogue.bias
    if bias is None:
        return True
    extents = *problem.batch, problem.M
    *apart, column = bias.strides
    varies = any(step and size > 1 for step, size in zip(apart, extents, strict=True))
    return column == 1 and not varies


def unpacked_batch_reason(problem: Problem) -> str:
    """Returns why a line cannot describe the matrices of a batch: they, or those of a residual, do
    not follow one another; "" if it can.
    """
    if len(problem.batch) > 1:
        return "a batch of several dimensions that do not follow one another"
    M, N, K = problem.M, problem.N, problem.K
    sizes = M * K, K * problem.columns, M * N
    of_each = zip((problem.a, problem.b, problem.out), sizes, strict=True)
    if storage_of(problem) != PACKED or any(strides[0] != size for strides, size in of_each):
        return "a batch of matrices that do not follow one another"
    residual = problem.epilogue.residual
    if residual is not None and residual.strides != problem.out:
        return "a batch with a residual that does not lie as the result"
    return ""


def _apart(strides: Strides, shape: tuple[int, int]) -> int:
    """Returns how far rows, or columns that are contiguous, are apart; 0 where they follow one
    another, or there is one.
    """
    apart, count, length = _walk(strides, shape)
    return apart if count > 1 and apart != length else 0


def _walk(strides: Strides, shape: tuple[int, int]) -> tuple[int, int, int]:
    """Returns how far rows, or columns that are contiguous, are apart, their number and length."""
    if strides[-1] == 1 or shape[1] == 1:
        return strides[-2], *shape
    return strides[-1], shape[1], shape[0]

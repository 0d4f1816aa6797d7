"""Records which products a program calls, so that a pack can be built for them."""

from dataclasses import replace
from pathlib import Path

from outblas.call import problem as operands
from outblas.call import recorded_groups, recorded_scaling
from outblas.call.grouped import GroupedProblem
from outblas.call.problem import Problem, Strides
from outblas.call.product_storage import PACKED, Storage
from outblas.call.products import DTYPES, TF32, WIDE, Products, ranges
from outblas.call.recorded_shapes import lock
from outblas.call.steps import Steps
from outblas.call.tensor_memory import LINE


class RecordedShapes:
    """The products that were called while `record_shapes` was in effect.

    Example:
        >>> import torch, outblas
        >>> with outblas.record_shapes() as recorded:
        ...     y = outblas.matmul(torch.ones(2, 8).bfloat16(), torch.ones(8, 4).bfloat16())
        >>> recorded.lines
        ['2x4x8 bfloat16 nn']
    """

    def __init__(self) -> None:
        self._rows: dict[Products, set[int]] = {}  # by the products without their rows
        self._others: dict[str, None] = {}

    @property
    def lines(self) -> list[str]:
        """One line for the products that differ in the number of rows only, as `outblas pack build
        --shapes` reads them.
        """
        with lock:  # other threads may record
            found = [(kind, set(M)) for kind, M in self._rows.items()]
        return [str(replace(kind, rows=ranges(M))) for kind, M in found]

    @property
    def others(self) -> list[str]:
        """The products that a pack does not hold, and why."""
        with lock:
            return list(self._others)

    def save(self, path: str | Path) -> None:
        """Write the lines to a file, with the other products as comments.

        Args:
            path: The file, which is replaced.

        Raises:
            OSError: It cannot be written.
        """
        comments = [f"# not packed: {other}" for other in self.others]
        Path(path).write_text("\n".join([*self.lines, *comments, ""]), encoding="utf-8")

    def _note(self, problem: Problem) -> None:
        is_fp8 = bool(problem.formats)
        K, dtype = problem.K, TF32 if problem.tf32 else operands.dtype_name(problem.dtype)
        if is_fp8:
            K, dtype = recorded_scaling.TERMS * K, recorded_scaling.dtype_of(problem)
        reason = _unpacked_reason(problem)
        if reason:
            shape = "x".join(map(str, (*problem.batch, problem.M, problem.columns, K)))
            self._others[f"{shape} {dtype}, {reason}"] = None
            return
        epilogue = problem.epilogue
        kind = Products(
            (),
            problem.columns,
            K,
            dtype,
            operands.layout_of(problem),
            Steps(epilogue.bias is not None, epilogue.activation, epilogue.residual is not None),
            problem.batch_invariant,
            "" if is_fp8 or problem.out_dtype == problem.dtype else "float32",
            problem.batch[0] if problem.batch else 0,
            recorded_scaling.scaling_of(problem) if is_fp8 else None,
            storage=storage_of(problem),
        )
        self._rows.setdefault(kind, set()).add(problem.M)

    def _note_groups(self, problem: GroupedProblem, top: int) -> None:
        rows = recorded_groups.rows_of(problem)
        if reason := recorded_groups.unpacked_reason(problem):
            dtype, groups = recorded_groups.dtype_of(problem), recorded_groups.groups_of(problem)
            K = problem.M if problem.form == "ragged_k" else problem.K
            words = " ".join((f"{rows}x{problem.N}x{K}", dtype, *groups.words))
            self._others[f"{words}, {reason}"] = None
            return
        kind = recorded_groups.products_of(problem, top)
        self._rows.setdefault(kind, set()).add(rows)


def _unpacked_reason(problem: Problem) -> str:
    """Returns why a line cannot describe a product; "" if it can."""
    if operands.dtype_name(problem.dtype) not in (*DTYPES, *WIDE):
        return "a dtype that torch multiplies"
    if problem.formats and (reason := recorded_scaling.unpacked_reason(problem)):
        return reason
    if problem.epilogue.aux is not None:
        return "aux"
    if problem.c is not None or problem.scaled:
        return "alpha, beta and an addend"
    if problem.weights_ready:
        return "weights_ready"
    if problem.out[-1] != 1 and problem.N > 1:
        return "a result whose columns are contiguous"
    if not has_bias_by_columns(problem):
        return "a bias that is not one contiguous row"
    residual = problem.epilogue.residual
    if residual is not None and 0 in residual.strides and residual.strides != problem.out:
        return "a residual that repeats"
    if 0 in (problem.M, problem.N, problem.K):
        return "nothing is multiplied"
    if len(operands.layout_of(problem)) < 2:
        return "operands without a unit stride"
    if problem.batch and (reason := unpacked_batch_reason(problem)):
        return reason
    return "rows that overlap" if overlaps(problem) else ""


# ---- how matrices lie in memory
def storage_of(problem: Problem) -> Storage:
    """Returns how the matrices of a product lie in memory, whose operands have a unit stride.

    Where they begin within a cache line is told of a GPU alone, where memory begins at whole lines.
    """
    terms = recorded_scaling.TERMS if problem.formats else 1
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

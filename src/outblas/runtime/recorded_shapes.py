"""Records which products a program calls, so that a pack can be built for them."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from outblas.base import forks
from outblas.core import problem as operands
from outblas.core.grouped import GroupedProblem
from outblas.core.problem import Problem
from outblas.core.products import DTYPES, TF32, WIDE, Products, ranges
from outblas.core.steps import Steps
from outblas.runtime import recorded_groups, recorded_scaling, recorded_storage


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
        with _lock:  # other threads may record
            found = [(kind, set(M)) for kind, M in self._rows.items()]
        return [str(replace(kind, rows=ranges(M))) for kind, M in found]

    @property
    def others(self) -> list[str]:
        """The products that a pack does not hold, and why."""
        with _lock:
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
            storage=recorded_storage.storage_of(problem),
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


_active: list[RecordedShapes] = []
_lock = forks.Lock()
_chosen = threading.local()


@contextlib.contextmanager
def recorded() -> Iterator[RecordedShapes]:
    """Records the products that are planned meanwhile."""
    shapes = RecordedShapes()
    with _lock:
        _active.append(shapes)
    try:
        yield shapes
    finally:
        with _lock:
            _active.remove(shapes)


def is_recording() -> bool:
    """Returns whether anybody records."""
    return bool(_active)


def note(problem: Problem) -> None:
    """Tells everybody who records of a product that is planned."""
    if not _active:
        return
    with _lock:
        for shapes in _active:
            shapes._note(problem)


def note_groups(problem: GroupedProblem) -> None:
    """Tells everybody who records of a product that groups divide."""
    with _lock:
        for shapes in _active:
            shapes._note_groups(problem, getattr(_chosen, "top", 0))


@contextlib.contextmanager
def chosen_by_tokens(top: int) -> Iterator[None]:
    """Says of the products that this thread plans meanwhile that their rows are tokens, each of
    which chooses so many groups.
    """
    _chosen.top = top
    try:
        yield
    finally:
        _chosen.top = 0


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
    if not recorded_storage.has_bias_by_columns(problem):
        return "a bias that is not one contiguous row"
    residual = problem.epilogue.residual
    if residual is not None and 0 in residual.strides and residual.strides != problem.out:
        return "a residual that repeats"
    if 0 in (problem.M, problem.N, problem.K):
        return "nothing is multiplied"
    if len(operands.layout_of(problem)) < 2:
        return "operands without a unit stride"
    if problem.batch and (reason := recorded_storage.unpacked_batch_reason(problem)):
        return reason
    return "rows that overlap" if recorded_storage.overlaps(problem) else ""

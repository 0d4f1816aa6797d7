"""Records which products a program calls, so that a pack can be built for them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..core import forks
from ..core import problem as operands
from ..core.problem import Problem
from ..core.steps import Steps

_DTYPES = ("bfloat16", "float16")  # of the operands that kernels of a pack multiply


class _Kind(NamedTuple):
    """What products of a line have in common."""

    N: int
    K: int
    dtype: str
    layout: str
    steps: str
    batch_invariant: bool


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
        self._rows: dict[_Kind, set[int]] = {}
        self._others: dict[str, None] = {}

    @property
    def lines(self) -> list[str]:
        """One line for the products that differ in the number of rows only, as `outblas pack build
        --shapes` reads them.
        """
        found = []
        for kind, rows in self._rows.items():
            words = [f"{_ranges(rows)}x{kind.N}x{kind.K}", kind.dtype, kind.layout, kind.steps]
            words += ["batch-invariant"] * kind.batch_invariant
            found.append(" ".join(word for word in words if word))
        return found

    @property
    def others(self) -> list[str]:
        """The products that a pack does not hold, and why."""
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
        reason = _unpacked_reason(problem)
        if reason:
            dtype = operands.dtype_name(problem.dtype)
            shape = "x".join(map(str, (*problem.batch, problem.M, problem.columns, problem.K)))
            self._others[f"{shape} {dtype}, {reason}"] = None
            return
        epilogue = problem.epilogue
        steps = Steps(epilogue.bias is not None, epilogue.activation, epilogue.residual is not None)
        kind = _Kind(
            problem.columns,
            problem.K,
            operands.dtype_name(problem.dtype),
            _layout(problem),
            str(steps),
            problem.batch_invariant,
        )
        self._rows.setdefault(kind, set()).add(problem.M)


_active: list[RecordedShapes] = []
_lock = forks.Lock()


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


def note(problem: Problem) -> None:
    """Tells everybody who records of a product that is planned."""
    if not _active:
        return
    with _lock:
        for shapes in _active:
            shapes._note(problem)


def _unpacked_reason(problem: Problem) -> str:
    """Returns why a line cannot describe a product; "" if it can."""
    if problem.batch:
        return "a batch"
    if problem.formats:
        return "fp8 operands"
    if operands.dtype_name(problem.dtype) not in _DTYPES:
        return "a dtype of Triton's kernels"
    if problem.out_dtype != problem.dtype:
        return "a result of another dtype"
    if problem.epilogue.aux is not None:
        return "aux"
    if problem.c is not None or problem.scaled:
        return "alpha, beta and an addend"
    if 0 in (problem.M, problem.N, problem.K):
        return "nothing is multiplied"
    return "" if len(_layout(problem)) == 2 else "operands without a unit stride"


def _layout(problem: Problem) -> str:
    letters = {(False, True): "n", (True, True): "n", (True, False): "t", (False, False): ""}
    return "".join(
        letters[row == 1, column == 1] for row, column in (problem.a[-2:], problem.b[-2:])
    )


def _ranges(rows: set[int]) -> str:
    """1, 2, 3 and 8 → `1-3,8`."""
    found: list[list[int]] = []
    for M in sorted(rows):
        if found and found[-1][1] + 1 == M:
            found[-1][1] = M
        else:
            found.append([M, M])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)

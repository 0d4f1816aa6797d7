"""Prepares operands for TMA: decides which operands TMA cannot load and must be copied first, and
how rows lie in cache lines of L2.
"""

import math
from dataclasses import replace

import torch

from outblas.call.problem import Problem, Strides, with_row_major_output
from outblas.call.tensor_memory import LINE
from outblas.device import l2
from outblas.hopper.parts.config import HopperConfig
from outblas.hopper.parts.tma_views import tma_strides

_LINE_ELEMENTS = LINE // 2
_GRANULE = 8  # elements in the 16 bytes that TMA requires


def needs_copy(problem: Problem) -> tuple[bool, bool]:
    """Returns whether A and B are copied first. TMA needs 16-byte addresses and strides, and one
    stride of 1.
    """
    return (
        not _tma_can_load(problem.M, problem.K, problem.a, problem.alignment[0]),
        not _tma_can_load(problem.K, problem.columns, problem.b, problem.alignment[1]),
    )


def _tma_can_load(rows: int, columns: int, strides: Strides, alignment: int) -> bool:
    if alignment < 16 or any(stride % _GRANULE for stride in strides[:-2]):
        return False
    return tma_strides(rows, columns, strides[-2:]) is not None


def cache_lines_per_row(problem: Problem) -> tuple[int, int]:
    """Returns `l2.lines` of A and B as the kernel loads them, or of their copies where it makes
    some.
    """
    return l2.lines(aligned(problem))


def contiguous_columns(problem: Problem) -> tuple[bool, bool]:
    """Returns whether the columns of a tile are contiguous in memory: those of B, and the rows of
    A, which are its columns where the operands are exchanged.
    """
    row_major = with_row_major_output(problem)[0]
    return row_major.b[-1] == 1, row_major.a[-2] == 1


def lines_of_columns(config: HopperConfig) -> int:
    """Returns the cache lines that loads request per 128 bytes of contiguous columns, for 16-bit
    elements. TMA loads boxes of 64, 32 or 16 columns, the most that divide the columns of a stage,
    and each box requests its lines anew.
    """
    return 64 // math.gcd(64, config.stage_n)


def remarks(problem: Problem) -> list[str]:
    """Returns remarks for the user about the costs of a call besides the product."""
    operands = zip(
        "ab",
        (problem.a, problem.b),
        problem.alignment[:2],
        needs_copy(problem),
        cache_lines_per_row(problem),
        strict=True,
    )
    copies, requests = [], []
    for name, strides, alignment, is_copied, cache_lines in operands:
        if is_copied:
            copies.append(
                f"{name} is copied first: TMA needs 16-byte addresses, one stride of 1 and others "
                f"in multiples of 8, but {name} has strides {strides} at an address that is a "
                f"multiple of {alignment}"
            )
        if cache_lines > 1:
            requests.append(
                f"{name} needs twice the requests to L2: its rows begin inside cache lines of "
                f"{LINE} bytes"
            )
    return copies + requests


def aligned(problem: Problem) -> Problem:
    """Returns the problem with copied operands in place of those that TMA cannot load."""
    return with_copies(problem, needs_copy(problem))


def with_copies(problem: Problem, copies: tuple[bool, bool]) -> Problem:
    """Returns the problem with copies of A, of B, of both or of none."""
    copy_a, copy_b = copies
    if not (copy_a or copy_b):
        return problem
    a, b = problem.a, problem.b
    alignment_a, alignment_b, *others = problem.alignment
    if copy_a:
        a, alignment_a = copy_strides(problem, a, problem.M, problem.K), LINE
    if copy_b:
        b, alignment_b = copy_strides(problem, b, problem.K, problem.columns), LINE
    return replace(problem, a=a, b=b, alignment=(alignment_a, alignment_b, *others))


def copy_strides(problem: Problem, strides: Strides, rows: int, columns: int) -> Strides:
    """Returns the strides of an operand's copy. Columns are contiguous if those of the operand are,
    otherwise rows, padded to whole cache lines, or to 16 bytes if shorter than a line. An operand
    that is broadcast over the batch stays so.
    """
    by_columns = strides[-2] == 1 and strides[-1] != 1
    length = rows if by_columns else columns
    whole = _LINE_ELEMENTS if length >= _LINE_ELEMENTS else _GRANULE
    outer = -(-length // whole) * whole
    size = outer * (columns if by_columns else rows)
    batch: list[int] = []
    for extent, stride in zip(problem.batch[::-1], strides[-3::-1], strict=True):
        batch.insert(0, size if stride else 0)
        size *= extent if stride else 1
    return (*batch, 1, outer) if by_columns else (*batch, outer, 1)


def copy(t: torch.Tensor, shape: tuple[int, ...], source: Strides, target: Strides) -> torch.Tensor:
    """Copies an operand of this shape and strides `source` into new memory with strides `target`.
    Repeated batches are copied once.
    """
    distinct = [
        1 if stride == 0 else extent for extent, stride in zip(shape[:-2], target[:-2], strict=True)
    ]
    distinct += shape[-2:]
    span = 1 + sum((extent - 1) * step for extent, step in zip(distinct, target, strict=True))
    memory = torch.empty(span + _GRANULE, dtype=t.dtype, device=t.device)
    memory.as_strided(distinct, target).copy_(t.as_strided(distinct, source))
    return memory.as_strided(shape, target)

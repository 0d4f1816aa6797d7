"""Operands as TMA takes them: which it cannot stride over and are copied first, and how rows lie in
lines of L2.
"""

from dataclasses import replace

import torch

from ...core.problem import Problem, Strides
from ...core.tensor_memory import LINE
from ...device import l2
from ..core import host

_LINE = LINE // 2  # elements
_GRANULE = 8  # of them, TMA's 16 bytes


def copied(problem: Problem) -> tuple[bool, bool]:
    """Whether A and B are copied first: TMA needs 16-byte addresses and strides, and a
    stride of 1.
    """
    a = (
        host.tma_strides(problem.M, problem.K, problem.a[-2:])
        if problem.alignment[0] >= 16
        else None
    )
    b = (
        host.tma_strides(problem.K, problem.columns, problem.b[-2:])
        if problem.alignment[1] >= 16
        else None
    )
    ragged = [
        any(stride % _GRANULE for stride in strides[:-2]) for strides in (problem.a, problem.b)
    ]
    return a is None or ragged[0], b is None or ragged[1]


def lines(problem: Problem) -> tuple[int, int]:
    """`l2.lines` of the operands as their copies are."""
    return l2.lines(aligned(problem))


def remarks(problem: Problem) -> list[str]:
    """What a call costs beside the product, for people."""
    said = [
        f"{name} is copied first: TMA needs 16-byte addresses, one stride of 1 and others in "
        "multiples of 8, and "
        f"{name} has strides {strides} at an address that is a multiple of {alignment}"
        for name, strides, alignment, is_copied in zip(
            "ab", (problem.a, problem.b), problem.alignment[:2], copied(problem), strict=True
        )
        if is_copied
    ]
    return said + [
        f"{name} takes twice the requests to L2: its rows begin inside of lines of {LINE} bytes"
        for name, asked in zip("ab", lines(problem), strict=True)
        if asked > 1
    ]


def aligned(problem: Problem) -> Problem:
    """The problem with the operands that are copied as their copies will be."""
    a, b = copied(problem)
    strides_a = _strides(problem, problem.a, problem.M, problem.K) if a else problem.a
    strides_b = _strides(problem, problem.b, problem.K, problem.columns) if b else problem.b
    alignment = (
        LINE if a else problem.alignment[0],
        LINE if b else problem.alignment[1],
        *problem.alignment[2:],
    )
    return replace(problem, a=strides_a, b=strides_b, alignment=alignment)


def _strides(problem: Problem, strides: Strides, rows: int, columns: int) -> Strides:
    """Of a copy: columns or rows contiguous, as they are nearer to it, and padded to whole lines,
    those shorter than one to 16 bytes; what is broadcast over the batch stays so.
    """
    by_columns = strides[-2] == 1 and strides[-1] != 1
    length = rows if by_columns else columns
    whole = _LINE if length >= _LINE else _GRANULE
    outer = -(-length // whole) * whole
    size, lead = outer * (columns if by_columns else rows), []
    for extent, stride in zip(problem.batch[::-1], strides[-3::-1], strict=True):
        lead.append(size if stride else 0)
        size *= extent if stride else 1
    return (*lead[::-1], 1, outer) if by_columns else (*lead[::-1], outer, 1)


def copy(t: torch.Tensor, shape: tuple[int, ...], source: Strides, made: Strides) -> torch.Tensor:
    """The operand in memory of its own, batches that it repeats once."""
    kept = [
        1 if stride == 0 else extent for extent, stride in zip(shape[:-2], made[:-2], strict=True)
    ]
    kept += shape[-2:]
    room = 1 + sum((extent - 1) * stride for extent, stride in zip(kept, made, strict=True))
    new = torch.empty(room + _GRANULE, dtype=t.dtype, device=t.device)
    new.as_strided(kept, made).copy_(t.as_strided(kept, source))
    return new.as_strided(shape, made)

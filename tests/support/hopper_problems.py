"""Problems of the rungs of the Hopper ladder, on tensors that are views of one."""

from types import ModuleType
from typing import Any

import torch

from outblas.base import registry
from outblas.call import problem as operands
from outblas.call.problem import Problem

RUNGS = [kernel.name.removeprefix("hopper.") for kernel in registry.ladder("hopper")]
FIRST_AND_LAST = ("tma_wgmma", "hilbert")  # what all rungs share shows in these two
# Of a tile that two share: its sums are more registers than a thread has.
ONE_CONSUMER = "consumers=1,producer_registers=0,consumer_registers=0"
BF16 = torch.bfloat16
MEMORY = torch.empty(1 << 22, dtype=BF16)


def load(rung: str) -> ModuleType:
    """The module of a rung, by its name without the ladder's."""
    return registry.load(f"hopper.{rung}")


def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor of any strides."""
    return MEMORY.as_strided(shape, strides)


def matrix(
    rows: int = 64, columns: int = 64, stride: int | None = None, start: int = 0
) -> torch.Tensor:
    """A matrix whose rows are contiguous, `start` elements from an aligned address."""
    return MEMORY.as_strided((rows, columns), (columns if stride is None else stride, 1), start)


def problem(
    M: int = 64, N: int = 64, K: int = 64, *, a: Any = None, b: Any = None, out: Any = None
) -> Problem:
    """A product of layout nt, with other tensors where they are given."""
    a = matrix(M, K) if a is None else a
    b = matrix(N, K).t() if b is None else b
    return operands.problem(a, b, matrix(M, N) if out is None else out)

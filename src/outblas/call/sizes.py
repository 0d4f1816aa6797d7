"""Conditions on sizes, some of which only a run of a program tells: those of `x[mask]` where it is
compiled. torch calls such sizes unbacked, and does not say of them whether they are 1.
"""

import operator
from collections.abc import Sequence

import torch

from outblas.base.compat.torch_private import assume


def holds(condition: bool | torch.SymBool) -> bool:
    """Returns whether a condition that a call must fulfil holds. What only a run tells is assumed;
    the program then asserts it.
    """
    if isinstance(condition, bool):
        return condition
    # The first import of sympy takes a second.
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    assumed = bool(guard_or_true(condition))
    if assumed:
        assume(condition)
    return assumed


def is_certain(condition: bool | torch.SymBool) -> bool:
    """Returns whether a condition holds in every run."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(condition))


def is_one(size: int) -> bool:
    """Returns whether a size is 1, so that it is broadcast. One that only a run tells is not, as in
    torch's own operators.
    """
    return is_certain(size == 1)


def are_equal(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Returns whether a shape is the one that a call must have, as `holds`."""
    return len(shape) == len(other) and all(map(holds, map(operator.eq, shape, other)))


def broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Returns whether a tensor of a shape can be expanded to the target shape."""
    return len(shape) <= len(target) and all(
        is_one(size) or holds(size == other)
        for size, other in zip(shape[::-1], target[::-1], strict=False)
    )

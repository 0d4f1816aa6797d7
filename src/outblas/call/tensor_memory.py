"""Where strided tensors lie in memory: their addresses, their extent, and whether two of them
overlap.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

LINE = 128  # bytes of a cache line

# Returns the address of a tensor that is only read; `data_ptr` would copy the memory of a lazy
# clone.
read_address: Callable[[torch.Tensor], int] = getattr(
    torch.Tensor, "const_data_ptr", torch.Tensor.data_ptr
)


def alignment_class(operand: torch.Tensor) -> int:
    """Returns the property of A's or B's address that decides how a call runs: 0 for a multiple of
    a cache line, 16 for other multiples of 16 bytes, else the address modulo 16.
    """
    address = read_address(operand)
    return address % LINE and (address % 16 or 16)


def alignment(t: torch.Tensor) -> int:
    """Returns the largest power of two up to 16 that divides a tensor's address."""
    return math.gcd(read_address(t), 16)


def address_range(t: torch.Tensor) -> tuple[int, int]:
    """Returns the address of a tensor's first byte, and the address after its last byte."""
    start = read_address(t)
    return start, start + span_bytes(t)


def span_bytes(t: torch.Tensor) -> int:
    """Returns the number of bytes from the first to the last byte that a tensor touches."""
    return span(t.shape, t.stride()) * t.element_size()


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the number of elements from the first to the last that a strided tensor touches."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def packed_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor."""
    strides = [1]
    for size in sizes[:0:-1]:
        strides.append(strides[-1] * max(size, 1))
    return tuple(strides[::-1])


def overlaps_itself(t: torch.Tensor) -> bool:
    """Returns whether two elements of a tensor may share memory. The test is conservative: False
    only if each dimension steps beyond the extent of all smaller ones (unusual disjoint views
    return True).
    """
    if t.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted(
        (stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1
    ):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def share_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Returns whether two strided tensors share memory, by numpy's exact test of their addresses;
    True where that test exceeds its work limit.
    """
    import numpy as np

    max_work: Any = 100_000  # numpy's stubs know only two of the accepted values

    class View:
        def __init__(self, t: torch.Tensor) -> None:
            size = t.element_size()
            self.__array_interface__ = {
                "version": 3,
                "typestr": f"|V{size}",
                "shape": tuple(t.shape),
                "strides": tuple(stride * size for stride in t.stride()),
                "data": (read_address(t), True),
            }

    try:
        return bool(np.shares_memory(np.asarray(View(x)), np.asarray(View(y)), max_work=max_work))
    except np.exceptions.TooHardError:
        return True

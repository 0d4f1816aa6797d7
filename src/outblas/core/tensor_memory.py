"""Where strided tensors lie in memory: their addresses, how far they reach, whether two of them
overlap.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

LINE = 128  # bytes of a cache line

# The address of a tensor that is only read: `data_ptr` would copy the memory of a lazy clone.
read_address: Callable[[torch.Tensor], int] = getattr(
    torch.Tensor, "const_data_ptr", torch.Tensor.data_ptr
)


def alignment_class(operand: torch.Tensor) -> int:
    """What of the address of A or B decides how a call runs: 0 for a multiple of a cache line, 16
    for other multiples of 16 bytes, else the bytes beyond one.
    """
    address = read_address(operand)
    return address % LINE and (address % 16 or 16)


def address_range(t: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a tensor, and of the one past its last."""
    start = read_address(t)
    return start, start + span_bytes(t)


def span_bytes(t: torch.Tensor) -> int:
    """Bytes from the first to one past the last that a tensor touches."""
    return span(t.shape, t.stride()) * t.element_size()


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to one past the last that a strided tensor touches."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def overlaps_itself(t: torch.Tensor) -> bool:
    """Whether two elements of a tensor may share memory: True unless each dimension steps past all
    that the smaller ones reach (exotic disjoint views count as True).
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
    """Whether two strided tensors share memory, by numpy's exact test of their addresses; True
    where the test is too hard to finish.
    """
    import numpy as np

    max_work: Any = 100_000  # numpy's stubs know two of the values it takes

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

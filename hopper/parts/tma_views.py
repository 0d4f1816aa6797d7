"""The strides with which TMA reads a caller's matrices, and views of tensors with them. Without a
GPU or the DSL.
"""

import torch


def tma_strides(rows: int, columns: int, strides: tuple[int, ...]) -> tuple[int, int] | None:
    """Returns the strides with which TMA can read a matrix, or None. The stride of an extent of 1
    can be chosen freely.
    """
    row, column = strides

    if (column == 1 or columns == 1) and (rows == 1 or row % 8 == 0):
        return (row if rows > 1 else 8), 1
    if (row == 1 or rows == 1) and (columns == 1 or column % 8 == 0):
        return 1, (column if columns > 1 else 8)
    return None


def view(t: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Returns the tensor with this shape and these strides. It returns the tensor itself where they
    match, because a view costs the host microseconds.
    """
    return t if t.shape == shape and t.stride() == strides else t.as_strided(shape, strides)

"""How groups divide a product, and the rows that a call chooses: of A by `a_index`, of the result
by `scatter_index`.
"""

from typing import Literal

import torch

from outblas.call.errors import OperandError
from outblas.call.sizes import are_equal, holds

Tensor = torch.Tensor

# Which dimension is divided among groups: the rows of A and of the result, the columns of B and of
# the result, or the terms of the sums. Where none is, a product of batches is meant, of which
# "masked" computes the first rows of each matrix, as many as `counts` says.
Form = Literal["ragged_m", "ragged_n", "ragged_k", "batch", "masked"]


def check_gather(form: Form, mat_a: Tensor, a_index: Tensor) -> None:
    """Checks the index of the rows of A. Raises OperandError."""
    if form != "ragged_m":
        raise OperandError(
            "a_index is given, expected None where groups are not rows of mat_a: only a mat_a of 2 "
            "dimensions beside a mat_b of 3 has rows to choose from"
        )
    _check_index("a_index", a_index, None, mat_a.device)
    rows, indices = mat_a.shape[0], a_index.shape[0]
    if not holds(indices <= indices * rows):
        raise OperandError(
            f"mat_a.shape[0] is 0 but a_index has {a_index.shape[0]} elements, expected a row "
            "for them to choose"
        )


def check_scatter(
    form: Form,
    M: int,
    index: Tensor | None,
    weights: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Checks the index of the rows of a result of `dtype`, and their weights. Raises
    OperandError.
    """
    if index is not None:
        if form != "ragged_m":
            raise OperandError(
                "scatter_index is given, expected None where groups are not rows of the result: "
                "only a mat_a of 2 dimensions beside a mat_b of 3 makes such rows"
            )
        _check_index("scatter_index", index, M, device)
    if weights is None:
        return
    if index is None:
        raise OperandError("scatter_weights is given without scatter_index, expected both")
    if weights.device != device or not are_equal(weights.shape, (M,)):
        raise OperandError(
            f"scatter_weights has shape {tuple(weights.shape)} on {weights.device}, expected "
            f"{(M,)} on {device}"
        )
    if weights.dtype not in (torch.float32, dtype):
        wanted = " or ".join(dict.fromkeys(("torch.float32", str(dtype))))
        raise OperandError(f"scatter_weights.dtype is {weights.dtype}, expected {wanted}")


def _check_index(name: str, index: Tensor, M: int | None, device: torch.device) -> None:
    """Checks an index of M rows, or of any number of rows for None."""
    fits = index.dim() == 1 and (M is None or holds(index.shape[0] == M))
    if not fits or index.dtype not in (torch.int32, torch.int64) or index.device != device:
        shape = "1 dimension" if M is None else f"shape {(M,)}"
        raise OperandError(
            f"{name} is {index.dtype} of shape {tuple(index.shape)} on {index.device}, expected "
            f"torch.int32 or torch.int64 of {shape} on {device}"
        )


def narrow_index(index: Tensor, low: int, high: int) -> Tensor:
    """Returns an index as int32, contiguous. An int64 index is clamped to `low` and `high`."""
    if index.dtype is not torch.int32:
        index = index.clamp(low, high).to(torch.int32)
    return index.contiguous()

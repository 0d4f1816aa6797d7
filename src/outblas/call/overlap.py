"""Checks whether the tensors that a call writes share memory with those that it reads."""

from typing import Any

from torch import Tensor

from outblas.call import problem as operands
from outblas.call.tensor_memory import read_address


def may_overlap(written: tuple[Tensor | None, int], read: tuple[Tensor | None, int]) -> bool:
    """Returns whether the byte ranges of two tensors, from their first to their last element,
    overlap.

    Each tensor comes with the length of its range in bytes. A tensor that is None overlaps nothing.
    """
    if written[0] is None or read[0] is None or not written[1]:
        return False
    first, second = written[0].data_ptr(), read_address(read[0])
    return first < second + read[1] and second < first + written[1]


def check_separate(a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, beta: Any) -> None:
    """Checks that `out` shares memory with no operand that is read, unless it is `c` itself.

    Raises OperandError.
    """
    operands.check_overlap(out, a=a, b=b)
    if c is None or beta == 0 or not out.numel():
        return
    is_c = out.data_ptr() == read_address(c) and c.shape == out.shape and c.stride() == out.stride()
    if not is_c:
        operands.check_overlap(out, c=c)


def check_epilogue_separate(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    out: Tensor | None,
    beta: Any,
    bias: Tensor | None,
    residual: Tensor | None,
    aux: Tensor | None,
) -> None:
    """Checks that `out` and `aux` share memory with nothing that is read, nor with each other.

    Raises OperandError.
    """
    if out is not None:
        operands.check_overlap(out, bias=bias, residual=residual, aux=aux)
    if aux is not None:
        read_c = c if beta != 0 else None
        operands.check_overlap(aux, "aux", a=a, b=b, c=read_c, bias=bias, residual=residual)

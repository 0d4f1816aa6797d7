"""Two weights that are the halves of one matrix, for GEMMs that take both at once.

They stay tensors of their own, each with a storage of exactly its half. The matrix has no other
owners, so that its memory is free again when both weights have got another.
"""

from __future__ import annotations

from typing import Any

import torch

from outblas.base.compat import torch_private
from outblas.base.compat.torch_private import storage_at
from outblas.base.cuda_graphs import capturing

Tensor = torch.Tensor

# Weak references to the memory of all matrices. A model that is patched again keeps its halves
# where they are, which a captured graph may read.
_matrices: list[Any] = []


class Halves:
    """The matrix of two tensors. A copy is empty, and so is what `torch.load` returns, for the
    copied weights lie apart.
    """

    def __init__(self) -> None:
        self.memory: Any = None  # a weak reference

    def __reduce__(self) -> tuple[type[Halves], tuple[()]]:
        return Halves, ()

    def join(self, first: Tensor, second: Tensor) -> None:
        """Makes two tensors the halves of a matrix, if no `reason` forbids it."""
        self.memory = _matrix_of(first, second)
        if self.memory is None and not (reason(first) or reason(second)):
            self.memory = torch_private.weak_storage(_moved(first, second))
            _matrices[:] = [m for m in _matrices if storage_at(m.cdata) is not None]
            _matrices.append(self.memory)

    def matrix(self, first: Tensor, second: Tensor) -> Tensor | None:
        """Returns the matrix, which records no gradients, or None if the tensors are no longer its
        halves.
        """
        memory = None if self.memory is None else storage_at(self.memory.cdata)
        # While `memory` is referred to, no other tensor has these addresses.
        if memory is None or not _are_halves(memory, first, second):
            return None
        rows, columns = first.shape
        return _view(memory, (2 * rows, columns), first)


def are_joined(first: Tensor, second: Tensor) -> bool:
    """Returns whether two tensors are the halves of a matrix already."""
    return _matrix_of(first, second) is not None


def reason(t: Tensor) -> str:
    """Returns why a tensor must not get other memory, because somebody else uses that which it has,
    for example; "" for nothing.
    """
    if t.device.type not in ("cpu", "cuda"):
        return f"is on {t.device}"
    if capturing(t.device):
        return "cannot be moved while a CUDA graph is captured"
    if t.layout is not torch.strided or not t.is_contiguous() or not t.numel():
        return "is not contiguous"
    if t.is_inference():
        return "was made in inference mode"
    storage = t.untyped_storage()
    if storage.nbytes() != t.nbytes:
        return "is a part of a larger storage"
    # All memory of a GPU can be shared with other processes, and torch notes which is.
    if (not t.is_cuda and t.is_shared()) or torch_private.is_sent(storage):
        return "is shared with other processes"
    if not storage.resizable():
        return "lies in memory that torch did not allocate"
    if not torch_private.is_only_user(storage):
        return "shares its memory with other tensors, as those of a graph of gradients"
    return ""


def _are_halves(memory: Any, first: Tensor, second: Tensor) -> bool:
    """Returns whether two tensors are the halves of a matrix in some memory."""
    size: int = first.nbytes
    begin: int = memory.data_ptr()
    return (
        first.data_ptr() == begin
        and second.data_ptr() == begin + size
        and memory.nbytes() == 2 * size
        and first.shape == second.shape
        and first.dim() == 2
        and first.dtype is second.dtype
        and first.is_contiguous()
        and second.is_contiguous()
    )


def _matrix_of(first: Tensor, second: Tensor) -> Any:
    """Returns a reference to the memory of which two tensors are the halves already, or None."""
    for reference in _matrices:
        memory = storage_at(reference.cdata)
        if memory is not None and _are_halves(memory, first, second):
            return reference
    return None


def _moved(first: Tensor, second: Tensor) -> Any:
    """Copies two tensors into one matrix, gives them its memory, and returns that."""
    with torch.inference_mode(False), torch.no_grad():
        memory = torch.cat((first.detach(), second.detach())).untyped_storage()
        size = memory.nbytes() // 2
        for t, begin in ((first, 0), (second, size)):
            t.data = _view(memory[begin : begin + size], t.shape, t)
    return memory


def _view(memory: Any, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Returns a matrix in some memory."""
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    return empty.set_(memory, 0, shape, (shape[1], 1))

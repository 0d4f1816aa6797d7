"""torch's own samples of its operators (OpInfo), and tensors that lie as a sample's do."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor
# Operators that are computed by products of matrices.
PRODUCTS = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "addbmm",
    "matmul",
    "__rmatmul__",
    "einsum",
    "tensordot",
    "linalg.multi_dot",
    "nn.functional.linear",
    "nn.functional.bilinear",
)


@dataclass(frozen=True)
class Sample:
    """Arguments of one call, by position and by keyword."""

    given: tuple[Any, ...]
    how: dict[str, Any]

    def __str__(self) -> str:
        shapes = [tuple(t.shape) if isinstance(t, Tensor) else t for t in self.given]
        return f"{shapes} {self.how}"

    def relaid(self, change: Callable[[Tensor], Tensor]) -> "Sample":
        """The sample with other tensors in the places of its own."""
        return Sample(
            tuple(change(t) if isinstance(t, Tensor) else t for t in self.given), self.how
        )

    def with_leaves(self) -> "Sample":
        """The sample with tensors that need gradients and share memory with its own."""
        return self.relaid(lambda t: t.detach().requires_grad_())

    def widened(self) -> "Sample":
        """The sample in the widest dtype, with tensors that need gradients."""
        return self.relaid(
            lambda t: (
                t.detach()
                .to(torch.complex128 if t.is_complex() else torch.float64)
                .requires_grad_()
            )
        )

    def kind(self) -> object:
        """What samples that differ only in sizes above 1 have in common: their numbers of
        dimensions, the empty ones, those of one element, the order of the strides, the keywords.
        """
        return _kind_of([*self.given, *self.how.items()])


def _kind_of(given: Any) -> object:
    if isinstance(given, Tensor):
        return given.dtype, tuple(min(n, 2) for n in given.shape), tuple(storage_order(given))
    return tuple(map(_kind_of, given)) if isinstance(given, list | tuple) else given


@functools.cache
def operator(name: str) -> Any:
    """What torch's tests know about an operator."""
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    return next(op for op in op_db if op.name == name and not op.variant_test_name)


def samples(name: str, device: str, dtype: torch.dtype) -> Iterator[Sample]:
    """All of torch's samples of an operator."""
    for sample in operator(name).sample_inputs(device, dtype):
        yield Sample((sample.input, *sample.args), sample.kwargs)


def first_of_each_kind(found: Iterator[Sample]) -> Iterator[Sample]:
    """The samples without those of a kind that came before."""
    seen = set()
    for sample in found:
        if sample.kind() not in seen:
            seen.add(sample.kind())
            yield sample


def one_of_each_kind(found: Iterator[Sample]) -> Iterator[Sample]:
    """The first sample of each kind, with at most two matrices along a dimension of a batch."""
    for sample in first_of_each_kind(found):
        yield sample.relaid(narrowed)


def assert_as_near(got: Tensor, want: Tensor, truth: Tensor, message: str) -> None:
    """A result is as near to float64's as torch's, but for a factor of two. What overflows in
    torch's result does in ours too.
    """
    assert (got.shape, got.dtype) == (want.shape, want.dtype), message
    is_finite = want.isfinite()
    assert torch.equal(got.isfinite(), is_finite), message
    got, want, truth = got[is_finite], want[is_finite], truth[is_finite]
    if truth.numel():
        my_error, their_error, largest = (
            float(t.abs().amax()) for t in (got - truth, want - truth, truth)
        )
        unit = 4 * torch.finfo(want.dtype).eps
        assert my_error <= max(2 * their_error, unit * max(1.0, largest)), message


# ---- tensors of other sizes that lie as a sample's do
def storage_order(t: Tensor) -> list[int]:
    """The dimensions of a tensor from that of the greatest stride to that of the least."""
    return sorted(range(t.dim()), key=lambda i: (-t.stride()[i], i))


def resized(t: Tensor, shape: Sequence[int]) -> Tensor:
    """Random numbers of a shape, laid out as `t` is: the same order of strides, repeats, gaps and
    ones.
    """
    if not t.dim():
        return torch.testing.make_tensor((), device=t.device, dtype=t.dtype, low=-4, high=4)
    stored = [n if stride else 1 for n, stride in zip(shape, t.stride(), strict=True)]
    order = storage_order(t)
    strides = [stride for n, stride in zip(t.shape, t.stride(), strict=True) if stride and n > 1]
    gap = min(strides, default=1)
    memory = torch.testing.make_tensor(
        *(stored[i] for i in order), gap, device=t.device, dtype=t.dtype, low=-4, high=4
    )[..., 0]
    return memory.permute(*(order.index(i) for i in range(t.dim()))).expand(*shape)


def narrowed(t: Tensor) -> Tensor:
    """At most two matrices along each dimension of a batch."""
    batch = max(t.dim() - 2, 0)
    return resized(t, [min(n, 2) if i < batch else n for i, n in enumerate(t.shape)])

"""torch's own samples of its operators (OpInfo), and tensors that lie as a sample's do."""

import functools
from collections.abc import Callable, Iterator
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


@functools.cache
def operator(name: str) -> Any:
    """What torch's tests know about an operator."""
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    return next(op for op in op_db if op.name == name and not op.variant_test_name)


def samples(name: str, device: str, dtype: torch.dtype) -> Iterator[Sample]:
    """All of torch's samples of an operator."""
    for sample in operator(name).sample_inputs(device, dtype):
        yield Sample((sample.input, *sample.args), sample.kwargs)


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

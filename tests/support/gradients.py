"""What tests of gradients share: leaves, gradients of pairs of functions, calls often enough to be
warm.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor

Tensor = torch.Tensor

# The first call of a shape goes through the operator and plans; later ones take the plan.
COLD_THEN_WARM = range(4)


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Random tensors of these shapes that need gradients."""
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def stored_gradient(leaf: Tensor) -> Tensor:
    """The gradient that backward passes have left with a leaf."""
    assert leaf.grad is not None
    return leaf.grad


def present(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """The gradients that there are, without those of tensors that a function does not use."""
    return [gradient for gradient in gradients if gradient is not None]


def gradients(
    function: Callable[..., Tensor], tensors: Sequence[Tensor], grad: Tensor
) -> list[Tensor]:
    """The gradients of those of the tensors that the function uses, where `grad` reaches its
    output.
    """
    return present(torch.autograd.grad(function(*tensors), tensors, grad, allow_unused=True))


def second_order(output: Tensor, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The gradients of the sum of sin(output), and those of the sum of their squares."""
    first = torch.autograd.grad(output.sin().sum(), tensors, create_graph=True)
    loss = torch.stack([gradient.square().sum() for gradient in first]).sum()
    return (*first, *torch.autograd.grad(loss, tensors))


# ---- gradients that are no plain tensors of their own memory
# What autograd passes on as the gradient of an output, from a plain tensor like the output.
GRADIENT_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "wrapper": lambda g: TwoTensor(g, g.clone()),
    "collective": AsyncCollectiveTensor,  # of tensor parallelism
    "fake": lambda g: FakeTensorMode(allow_non_fake_inputs=True).from_tensor(g),
    "batched": lambda g: torch.stack((g, 2 * g, -g)),
    "repeated": lambda g: g.new_full((), 3).expand(g.shape),
    "repeated rows": lambda g: g[..., :1, :].expand(g.shape),
    "by columns": lambda g: g.mT.contiguous().mT,
    "negated": torch._neg_view,
    "zero": lambda g: torch._efficientzerotensor(g.shape, dtype=g.dtype, device=g.device),
}


def assert_gradients_of_a_kind_are_torchs(
    kind: str,
    ours: Callable[..., Tensor],
    torchs: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    create_graph: bool = False,
) -> None:
    """A gradient of a kind passes through a function of ours as through torch's, twice: the second
    pass is warm.
    """
    for _ in range(2):
        found = []
        for function in (ours, torchs):
            y = function(*tensors)
            values = torch.arange(1.0, y.numel() + 1, device=y.device).view(y.shape) % 7 - 3
            g = GRADIENT_KINDS[kind](values.to(y.dtype))
            found.append(
                torch.autograd.grad(
                    y, tensors, g, create_graph=create_graph, is_grads_batched=kind == "batched"
                )
            )
        for got, want in zip(*found, strict=True):
            assert type(got) is type(want)
            assert got.shape == want.shape
            assert got.requires_grad == want.requires_grad
            if isinstance(got, TwoTensor):
                torch.testing.assert_close((got.a, got.b), (want.a, want.b))
            elif not isinstance(got, FakeTensor):
                torch.testing.assert_close(got, want)

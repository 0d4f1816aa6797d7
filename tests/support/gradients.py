"""What tests of gradients share: leaves, gradients of pairs of functions, calls often enough to be
warm.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

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

"""Models of linear layers, and what libraries do to such layers: weights of other types,
wrappers of `forward`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from outblas import Linear

X = torch.randn(3, 8)


class Net(nn.Module):
    """Three linear layers: one is called twice and has two names, two share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.tied = self.up
        self.back = nn.Linear(16, 8)
        self.back.weight = self.down.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(torch.relu(self.up(self.down(torch.relu(self.tied(x))))))


class Quantized(torch.Tensor):
    """A weight as torchao's: torch.nn.functional.linear takes it, and little else does."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            return func(*(t.as_subclass(torch.Tensor) for t in args))
        if func in (torch.Tensor.t, torch.matmul, torch.Tensor.dim):
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def quantized(layer: nn.Module, name: str = "weight") -> nn.Module:
    """Gives a layer a parameter of that type, of the same values."""
    values = getattr(layer, name).detach().as_subclass(Quantized)
    setattr(layer, name, nn.Parameter(values, requires_grad=False))
    return layer


def wrap_forward(layer: Any, function: Callable[[Any], Any]) -> None:
    """Has a function change what a layer's forward returns, as accelerate's hooks do."""
    layer._old_forward = layer.forward
    wrapper = functools.partial(lambda module, *given: function(module._old_forward(*given)), layer)
    layer.forward = functools.update_wrapper(wrapper, layer._old_forward)


def unwrap_forward(layer: Any) -> None:
    """Takes the wrapper off, as accelerate does: the bound method stays with the instance."""
    layer.forward = layer._old_forward
    del layer._old_forward


def names_of_ours(model: nn.Module) -> list[str]:
    """The names of modules of a model that have a class of ours."""
    return [name for name, module in model.named_modules() if isinstance(module, Linear)]

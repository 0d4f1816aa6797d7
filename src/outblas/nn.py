"""`Linear`, and `patch`, which makes every `torch.nn.Linear` of a model one."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from . import epilogue, operands
from .api import linear


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` by `outblas.linear`, with its `activation`. Of a gated pair out_features are the rows of the
    weight, those of the gate first, and half as many columns come out."""

    activation: str | None = None  # instances of torch.nn.Linear that become ones of this class have no other

    def __init__(self, in_features: int, out_features: int, *given: Any, activation: str | None = None, **how: Any):
        operands.check_activation(activation)
        if out_features % epilogue.halves(activation or ""):
            raise ValueError(f"out_features is {out_features}, expected an even number for activation {activation!r}")
        super().__init__(in_features, out_features, *given, **how)
        self.activation = activation

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias, activation=self.activation)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", activation={self.activation!r}" if self.activation else "")


@dataclass(frozen=True)
class Report:
    """What `patch` or `unpatch` made of the linear layers of a model, by name ("(root)" for the model itself).

    `swapped`: of the other class now, or before. `kept`: not, and why. `remarks`: what keeps a swapped one from our
    kernels for the time being. `str` makes a table.
    """

    swapped: tuple[str, ...] = ()
    kept: dict[str, str] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [(name, "swapped", self.remarks.get(name, "")) for name in self.swapped]
        rows += [(name, "kept", why) for name, why in self.kept.items()]
        width = max((len(name) for name, *_ in rows), default=0)
        lines = [f"{name:{width}}  {what:7}  {why}".rstrip() for name, what, why in rows]
        return "\n".join([f"{len(self.swapped)} swapped, {len(self.kept)} kept", *lines])


def patch(model: torch.nn.Module) -> Report:
    """Makes every `torch.nn.Linear` in a model, in place, an `outblas.Linear`: only its class changes, and parameters,
    hooks, ties, optimizers and whoever holds the module stay as they are. Subclasses of `torch.nn.Linear` are left
    alone, and layers whose `forward` was replaced or whose dtype no kernel takes. Raises TypeError for no module.
    """
    swapped: list[str] = []
    kept: dict[str, str] = {}
    remarks: dict[str, str] = {}
    for name, module in _linears(model):
        if type(module) is not Linear:
            if reason := _reason(module):
                kept[name] = reason
                continue
            module.__class__ = Linear
        swapped.append(name)
        if not module.weight.is_cuda:
            remarks[name] = f"on {module.weight.device}: torch takes it until it moves to an NVIDIA GPU"
    return Report(tuple(swapped), kept, remarks)


def unpatch(model: torch.nn.Module) -> Report:
    """Makes every `outblas.Linear` in a model, in place, a `torch.nn.Linear`, but for those with an activation."""
    swapped: list[str] = []
    kept: dict[str, str] = {}
    for name, module in _linears(model):
        if type(module) is Linear and module.activation is not None:
            kept[name] = f"has the activation {module.activation!r}, which torch.nn.Linear has not"
        elif type(module) is Linear:
            module.__class__ = torch.nn.Linear  # type: ignore[assignment]
            swapped.append(name)
    return Report(tuple(swapped), kept)


def _linears(model: object) -> Iterator[tuple[str, torch.nn.Linear]]:
    """Each once, by its first name."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {type(model).__name__}, expected a torch.nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            yield name or "(root)", module


def _reason(module: torch.nn.Linear) -> str | None:
    """Why a layer is not swapped."""
    kind = type(module)
    if isinstance(module, LazyModuleMixin):
        return "has no weight before its first call"
    if kind is not torch.nn.Linear:
        parametrized = torch.nn.utils.parametrize.is_parametrized(module)
        return "its parameters are computed (parametrized)" if parametrized else f"is a {kind.__name__}"
    if "forward" in vars(module):
        return "its forward was replaced"
    if module.weight.dtype not in operands.DTYPES:
        return f"has a weight of {module.weight.dtype}, which no kernel takes"
    return None

"""`Linear`, and `patch`, which makes every `torch.nn.Linear` of a model one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from . import epilogue
from .api import linear

_COMPUTED = torch.float16, torch.bfloat16, torch.float32


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` by `outblas.linear`, and what often follows it: activation(x @ weight.T + bias).

    Args:
        in_features, out_features, bias, device, dtype: as in `torch.nn.Linear`.
        activation: as in `outblas.matmul`. Of a gated pair out_features are the rows of the weight, those of the gate
            first, and half as many columns come out.
    """

    activation: str | None = None  # instances of torch.nn.Linear that become ones of this class have no other

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
    ) -> None:
        epilogue.check_activation(activation)
        if activation in epilogue.GATED and out_features % 2:
            raise ValueError(f"out_features is {out_features}, expected an even number for activation {activation!r}")
        super().__init__(in_features, out_features, bias, device, dtype)
        if activation is not None:
            self.activation = activation

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias, activation=self.activation)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", activation={self.activation!r}" if self.activation else "")


@dataclass(frozen=True)
class Report:
    """What `patch` or `unpatch` made of the linear layers of a model, by name; the root's is "(root)". `str` of it is a
    table.

    `swapped`: they are of the other class now, or were before. `kept`: they are not, and why. `remarks`: what keeps a
    swapped one from our kernels for the time being.
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
    """Makes every `torch.nn.Linear` in a model, in place, an `outblas.Linear`: only its class changes.

    Parameters, hooks, the state dict, ties, optimizers and whoever holds the module stay as they are. Modules of other
    classes, subclasses of `torch.nn.Linear` too, are left alone, and so are those whose `forward` was replaced, whose
    dtype no kernel takes, and those of a scripted model. Patching twice is patching once.

    Raises TypeError for what is no module.
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
        elif module.weight.dtype not in _COMPUTED:
            remarks[name] = f"{module.weight.dtype}: torch takes it"
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
    if module.weight.dtype not in _COMPUTED:
        return f"has a weight of {module.weight.dtype}, which no kernel takes"
    return None

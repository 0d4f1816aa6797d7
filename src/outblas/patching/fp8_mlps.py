"""Gated MLPs of fp8 layers of transformers, for `patch(model, fuse=True)`: gate and up are one
product, whose result is quantized at once (`out_recipe` of `scaled_mm`) and read by down as it is.

Weights stay parameters of their own, which are the halves of one matrix then, and so do scales. The
values between are rounded once, to fp8, where single layers round them to the dtype of the input
after each step.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ..core.compat.torch_private import any_autocast
from ..core.fp8 import BLOCK
from ..core.problem import DTYPES
from ..torch_ops.quantize import quantize
from ..torch_ops.scaled_mm import scaled_mm
from . import fp8_linears, fusion, replaced
from .fp8_linears import FP8Layer
from .fusion import GatedNames

Tensor = torch.Tensor
Module = torch.nn.Module


class GatedFP8(NamedTuple):
    """A gated MLP of fp8 layers."""

    parent: Module
    names: GatedNames

    def __str__(self) -> str:
        gate, up, down, activation, _ = self.names
        return f"{gate} and {up} are one product with {activation}, in fp8 for {down}"

    def apply(self) -> None:
        """Stores weights and scales of gate and up in one matrix each, and replaces the module's
        forward.
        """
        gate, up = (self.parent._modules[name] for name in self.names[:2])
        for one, other in _halves(gate, up):
            fusion.stack(one, other)
        replaced.replace(self.parent, _forward, self.names)
        vars(self.parent)[fusion.MOVES] = 0


def find(model: Module, layers: Mapping[str, FP8Layer]) -> list[tuple[str, GatedFP8]]:
    """Returns the gated MLPs of a model whose three layers are among those that `patch` swaps."""
    by_id = fusion.used_once(model, {id(layer.module): name for name, layer in layers.items()})
    found = []
    for name, module in model.named_modules():
        names = _names(module) or fusion.gated_names(module, by_id, torch.nn.Linear)
        if names is not None and _fits(module, names, by_id):
            found.append((name or "(root)", GatedFP8(module, names)))
    return found


def _names(module: Module) -> GatedNames | None:
    """Returns the children of an MLP that is fused already; None for other modules."""
    found = replaced.arguments(module, _forward)
    return None if found is None else found[0]


def _fits(module: Module, names: GatedNames, layers: Mapping[int, str]) -> bool:
    """Returns whether the halves of gate and up begin at whole blocks, and down is swapped too."""
    children: dict[str, Any] = module._modules
    gate, down = children[names.gate], children[names.down]
    return id(down) in layers and bool(gate.weight.shape[0] % BLOCK == 0)


def _halves(gate: Any, up: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the pairs of tensors that are halves of one matrix."""
    for name in ("weight", "weight_scale_inv"):
        yield getattr(gate, name), getattr(up, name)


# ---- computing
def _forward(mlp: Any, names: GatedNames, x: Any) -> Tensor:
    """Computes down(f(gate(x)) * up(x)) by two products in fp8, while the layers are as `patch`
    found them, nothing observes them, and no gradients are needed.
    """
    gate, up, down = (mlp._modules[name] for name in names[:3])
    if not _is_usual(mlp, x, (gate, up, down)):
        result: Tensor = type(mlp).forward(mlp, x)
        return result
    values, scales = quantize(x.reshape(-1, x.shape[-1]), "1x128")
    weight, scale = (_whole(one) for one, _ in _halves(gate, up))
    biases = [layer.bias for layer in (gate, up) if layer.bias is not None]
    inner, of_inner = scaled_mm(
        values,
        weight.t(),
        scales,
        scale.t(),
        torch.cat(biases).detach().float() if biases else None,
        activation=names.activation,
        out_dtype=torch.float8_e4m3fn,
        out_recipe="1x128",
    )
    weight, scale = down.weight.detach(), down.weight_scale_inv.detach()
    bias = None if down.bias is None else down.bias.detach().to(x.dtype)
    y = scaled_mm(inner, weight.t(), of_inner, scale.t(), bias, out_dtype=x.dtype)
    return y.view(*x.shape[:-1], weight.shape[0])


def _whole(first: Tensor) -> Tensor:
    """Returns the matrix whose first half a tensor is."""
    rows, columns = first.shape
    return first.detach().as_strided((2 * rows, columns), (columns, 1))


def _is_usual(mlp: Any, x: Any, layers: tuple[Any, Any, Any]) -> bool:
    """Returns whether an MLP may be two products, and moves the halves of gate and up together for
    it.
    """
    gate, up, down = layers
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and x.dtype in DTYPES
        and x.dim() > 0
        and not any_autocast()
        and all(
            fp8_linears.is_usual(layer, x.device) and not fusion.has_hooks(layer)
            for layer in layers
        )
        and (gate.bias is None) == (up.bias is None)
        and x.shape[-1] == gate.weight.shape[1]
        and x.device == gate.weight.device == down.weight.device
        and gate.weight.shape[0] == down.weight.shape[1]
        and not _needs_gradients(x, *(layer.bias for layer in layers))
        and all(
            fusion.are_stacked(one, other) or fusion.stacked_again(mlp, one, other)
            for one, other in _halves(gate, up)
        )
    )


def _needs_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


# ---- back
def undo(model: Module) -> None:
    """Gives fused MLPs their own forward back."""
    for module in model.modules():
        if replaced.restore(module, _forward):
            vars(module).pop(fusion.MOVES, None)

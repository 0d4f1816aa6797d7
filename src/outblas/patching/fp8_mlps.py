"""Gated MLPs of fp8 layers of transformers, for `patch(model, fuse=True)`: gate and up are one
product, whose result is quantized at once (`out_recipe` of `scaled_mm`) and read by down as it is.

Weights stay parameters of their own, which are the halves of one matrix then, and so do scales. The
values between are rounded once, to fp8, where single layers round them to the dtype of the input
after each step.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import ScalingType

from outblas.call.fp8 import BLOCK
from outblas.call.problem import DTYPES
from outblas.patching import fp8_linears, fusion, gated, replaced
from outblas.patching.fp8_linears import FP8Layer
from outblas.patching.functions import computes
from outblas.patching.gated import Gated, GatedNames
from outblas.patching.halves import Halves
from outblas.torch_ops.autograd_levels import requires_grad
from outblas.torch_ops.quantize import quantize
from outblas.torch_ops.scaled_mm import scaled_mm

Tensor = torch.Tensor
Module = torch.nn.Module

_OF_ROWS, _OF_WEIGHT = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128


def find(model: Module, layers: Mapping[str, FP8Layer]) -> list[tuple[str, Gated]]:
    """Returns the gated MLPs of a model whose three layers are among those that `patch` swaps."""
    by_id = fusion.used_once(model, {id(layer.module): name for name, layer in layers.items()})
    mlps = []
    for name, module in model.named_modules():
        graphs = fusion.graphs_of(module, by_id)
        names = fusion.gated_names(graphs, module, by_id, torch.nn.Linear)
        if names is None:
            continue
        children: dict[str, Any] = module._modules
        # The halves of gate and up begin at whole blocks.
        if id(children[names.down]) in by_id and not children[names.gate].weight.shape[0] % BLOCK:
            mlps.append((name or "(root)", Gated(module, names, 2, forward)))
    return mlps


# ---- computing
def forward(
    mlp: Any, names: GatedNames, weights: Halves, scales: Halves, *args: Any, **kwargs: Any
) -> Tensor:
    """Computes down(f(gate(x)) * up(x)) by two products in fp8, while the layers are as `patch`
    found them, nothing observes them, and no gradients are needed.
    """
    gate, up, down, act = (mlp._modules.get(name) for name in names[:4])
    weight = scale = None
    is_one_input = len(args) == 1 and not kwargs
    if is_one_input and _is_usual(args[0], gate, up, down) and computes(act, names.function):
        weight = weights.matrix(gate.weight, up.weight)
        scale = scales.matrix(gate.weight_scale_inv, up.weight_scale_inv)
    if weight is None or scale is None:
        result: Tensor = replaced.compute(mlp, *args, **kwargs)
        return result
    (x,) = args
    values, value_scales = quantize(x.reshape(-1, x.shape[-1]), "1x128")
    biases = [layer.bias for layer in (gate, up) if layer.bias is not None]
    inner, of_inner = scaled_mm(
        *(values, weight.t(), value_scales, _OF_ROWS, scale.t(), _OF_WEIGHT),
        bias=torch.cat(biases).detach().float() if biases else None,
        activation=names.activation,
        output_dtype=torch.float8_e4m3fn,
        out_recipe="1x128",
    )
    weight, scale = down.weight.detach(), down.weight_scale_inv.detach()
    bias = None if down.bias is None else down.bias.detach().to(x.dtype)
    y = scaled_mm(
        *(inner, weight.t(), of_inner, _OF_ROWS, scale.t(), _OF_WEIGHT),
        bias=bias,
        output_dtype=x.dtype,
    )
    return y.view(*x.shape[:-1], weight.shape[0])


def _is_usual(x: Any, *layers: Any) -> bool:
    """Returns whether gate, up and down may be two products."""
    if type(x) is not Tensor or not gated.is_plain_call() or None in layers:
        return False
    gate, up, down = layers
    return (
        x.dtype in DTYPES
        and x.dim() > 0
        and all(
            fp8_linears.is_usual(layer, x.device) and not gated.has_other_forward(layer)
            for layer in layers
        )
        and (gate.bias is None) == (up.bias is None)
        and x.shape[-1] == gate.weight.shape[1]
        and x.device == gate.weight.device == down.weight.device
        and gate.weight.shape[0] == down.weight.shape[1]
        and not requires_grad(x, *(layer.bias for layer in layers))
    )

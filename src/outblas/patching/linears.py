"""Tells which linear layers of a model `patch` keeps, and what keeps swapped ones from the kernels
for the time being.
"""

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from outblas.patching.functions import tensor_of, unusual

Tensor = torch.Tensor


def kept_reason(module: torch.nn.Linear) -> str | None:
    """Returns why a layer is not swapped, or None."""
    kind = type(module)
    if isinstance(module, LazyModuleMixin):
        return "has no weight before its first call"
    if kind is not torch.nn.Linear:
        parametrized = torch.nn.utils.parametrize.is_parametrized(module)
        return (
            "its parameters are computed (parametrized)"
            if parametrized
            else f"is a {kind.__name__}"
        )
    forward = vars(module).get("forward")
    if forward is not None and getattr(forward, "__func__", None) is not torch.nn.Linear.forward:
        return "its forward was replaced"
    if getattr(module, "activation", None) is not None:
        return "has an attribute activation, which outblas.Linear would apply"
    if not isinstance(module.weight, Tensor):
        return "has no weight"
    return _unusual(module)


def _unusual(module: torch.nn.Linear) -> str | None:
    """Returns which property of a layer's weight or bias makes torch compute the layer on any
    device, or None.
    """
    for name in ("weight", "bias"):
        t = tensor_of(module, name)
        if t is None:  # or it is computed: plain, with any dtype
            continue
        if reason := unusual(name, t):
            return reason
    return None


def torch_takes(module: torch.nn.Linear) -> str | None:
    """Returns what keeps a swapped layer from outblas's kernels, or None. It evaluates no computed
    parameter, because that may change the layer's state.
    """
    if reason := _unusual(module):
        return reason + (" until fully_shard gathers it" if "DTensor" in reason else "")
    held = vars(module).get("weight", next(module.parameters(), None))
    if held is None or held.is_cuda:
        return None
    return f"on {held.device}: torch takes it until it moves to an NVIDIA GPU"


def bypassed(model: torch.nn.Module) -> dict[int, str]:
    """Returns the layers whose parent may read their weight without calling them, by id, each with
    a remark.
    """
    remarks: dict[int, str] = {}
    for parent in model.modules():
        if (
            isinstance(parent, torch.nn.TransformerEncoderLayer)
            and getattr(parent, "activation_relu_or_gelu", False)
            and parent.self_attn.batch_first
        ):
            why = (
                "nn.TransformerEncoderLayer's fast path (eval, no gradients) takes its weight "
                "past it"
            )
            remarks |= dict.fromkeys((id(parent.linear1), id(parent.linear2)), why)
    return remarks

"""What a module computes that has no parameters, whether anything observes a module, and its
tensors.
"""

import functools
from typing import Any

import torch
from torch.nn import functional

from outblas.base.compat.torch_private import any_global_hook
from outblas.call.problem import DTYPES
from outblas.patching import replaced
from outblas.torch_ops.call import is_plain_type

Module = torch.nn.Module


def tensor_of(module: Module, name: str) -> Any:
    """Returns a parameter, or the tensor that replicas, pruned and sharded modules have in its
    place; None for computed ones.
    """
    attribute = vars(module).get(name)
    return module._parameters.get(name) if attribute is None else attribute


def unusual(name: str, t: Any) -> str | None:
    """Returns which property of a tensor keeps the kernels from a module whose attribute it is, or
    None.
    """
    if not is_plain_type(type(t)):
        return f"its {name} is a {type(t).__name__}"
    if t.is_nested or t.layout is not torch.strided:
        return f"its {name} is {'nested' if t.is_nested else t.layout}"
    return None if t.dtype in DTYPES else f"has a {name} of {t.dtype}, which no kernel takes"


def function_of(module: Module) -> str | None:
    """Returns the function that a module without parameters computes, by the name that it has in
    an epilogue; None for other modules.
    """
    kind = replaced.kind_of(module)
    if has_hooks(module) or "forward" in vars(module):
        return None
    if kind is torch.nn.ReLU:
        return "relu"
    if kind is torch.nn.SiLU:
        return "silu"
    if kind is torch.nn.GELU:
        approximate: Any = module.approximate
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate)
    if kind.__module__ != "transformers.activations":
        return None
    act: Any = getattr(module, "act", None)
    if kind.__name__ == "GELUActivation" and act is functional.gelu:
        return "gelu"
    if kind.__name__ in ("GELUTanh", "PytorchGELUTanh"):
        tanh = isinstance(act, functools.partial) and act.keywords == {"approximate": "tanh"}
        return "gelu_tanh" if tanh and act.func is functional.gelu else None
    return {"SiLUActivation": "silu", "NewGELUActivation": "gelu_tanh"}.get(kind.__name__)


def computes(module: Module | None, function: str) -> bool:
    """Returns whether a module is there and computes a function, which nothing observes."""
    return module is not None and function_of(module) == function


def has_hooks(module: Any) -> bool:
    """Returns whether something observes or changes what a module computes."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or any_global_hook()
    )

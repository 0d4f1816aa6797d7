"""Tells which linear layers of a model `patch` keeps, what keeps swapped ones from the kernels for
the time being, and which products of a model are no linear layers, so that `patch` cannot reach
them.
"""

import sys
from collections.abc import Iterable, Iterator

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from outblas.api import linear
from outblas.call.quantization import FORMATS
from outblas.fp8 import FP8Linear
from outblas.patching import fp8_linears, replaced
from outblas.patching.functions import tensor_of, unusual

Tensor = torch.Tensor
Module = torch.nn.Module

# Layers whose weights `patch` reports otherwise, or whose weights enter no product of matrices.
_OTHERS = (
    torch.nn.Linear,
    FP8Linear,
    torch.nn.Embedding,
    torch.nn.EmbeddingBag,
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
    torch.nn.ConvTranspose1d,
    torch.nn.ConvTranspose2d,
    torch.nn.ConvTranspose3d,
)
_REACHED = "outblas.enable reaches it"
_OWN_CODE = "outblas.enable reaches its mm, bmm and linear"


def forward(layer: torch.nn.Linear, input: Tensor) -> Tensor:
    """Computes what a subclass of `torch.nn.Linear` does that keeps its forward."""
    return linear(input, layer.weight, layer.bias)


def is_of_torch(kind: type) -> bool:
    """Returns whether a class is `torch.nn.Linear`, or what `fully_shard` makes of it."""
    others = [base for base in kind.__mro__ if issubclass(base, torch.nn.Linear)]
    return all(base is torch.nn.Linear or _is_sharding(base) for base in others)


def _is_sharding(kind: type) -> bool:
    """Returns whether `fully_shard` made a class."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and issubclass(kind, getattr(fsdp, "FSDPModule", ()))


def gathered(model: Module) -> set[int]:
    """Returns the modules whose parameters `fully_shard` gathers before they compute, by id."""
    owners = [module for module in model.modules() if _is_sharding(type(module))]
    return {id(module) for owner in owners for module in owner.modules()}


def kept_reason(module: torch.nn.Linear, is_gathered: bool) -> str | None:
    """Returns why a layer is not swapped, or None. `is_gathered`: whether `fully_shard` gathers its
    parameters.
    """
    kind = type(module)
    if isinstance(module, LazyModuleMixin):
        return "has no weight before its first call"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "its parameters are computed (parametrized)"
    is_subclass = not is_of_torch(kind)
    if is_subclass and (
        kind.forward is not torch.nn.Linear.forward or kind.__module__.startswith("torch.")
    ):
        return f"is a {kind.__name__}"
    if is_subclass and (reason := replaced.irreplaceable(module)):
        return reason
    forward = vars(module).get("forward")
    if forward is not None and getattr(forward, "__func__", None) is not torch.nn.Linear.forward:
        return "its forward was replaced"
    if not is_subclass and getattr(module, "activation", None) is not None:
        return "has an attribute activation, which outblas.Linear would apply"
    if not isinstance(module.weight, Tensor):
        return "has no weight"
    return _unusual(module, is_gathered)


def _unusual(module: torch.nn.Linear, is_gathered: bool = False) -> str | None:
    """Returns which property of a layer's weight or bias makes torch compute the layer on any
    device, or None.
    """
    for name in ("weight", "bias"):
        t = tensor_of(module, name)
        if t is None:  # or it is computed: plain, with any dtype
            continue
        if is_gathered and type(t).__name__ == "DTensor":
            t = t.to_local()
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


# ---- what is no linear layer
def unreached(model: Module, reached: Iterable[Module] = ()) -> dict[str, str]:
    """Returns the weights of products that no `torch.nn.Linear` and none of the modules `reached`
    computes, each with what computes it. Weights of convolutions and embeddings are not among them.
    """
    weights: dict[str, str] = {}
    seen: set[int] = set()
    others = {id(module) for module in reached}
    for name, module in model.named_modules():
        if id(module) in others:
            continue
        for weight, reason in _weights(module):
            t = module._parameters.get(weight)
            if t is not None and id(t) not in seen:
                seen.add(id(t))
                weights[f"{name}.{weight}" if name else weight] = reason
    return weights


def _weights(module: Module) -> Iterator[tuple[str, str]]:
    """Yields the names of a module's own weights that enter products, with what computes them."""
    kind = type(module).__name__
    if fp8_linears.is_layer(module):
        yield "weight", f"{kind} of transformers multiplies by it, and by its scales"
    elif isinstance(module, torch.nn.MultiheadAttention):
        reason = f"nn.MultiheadAttention multiplies by it: {_REACHED}"
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            yield name, reason
    elif isinstance(module, torch.nn.RNNBase):
        for name in module._parameters:
            if name.startswith("weight"):
                yield name, f"it is inside of torch's kernel for nn.{kind}"
    elif _is_conv1d(module):
        yield "weight", f"{kind} of transformers calls torch.addmm: {_REACHED}"
    elif not isinstance(module, _OTHERS) and not type(module).__module__.startswith("torch."):
        yield from _weights_of_own_code(module, kind)


def _is_conv1d(module: Module) -> bool:
    """Returns whether a module is a layer of GPT-2, whose weight is stored transposed."""
    return any(
        base.__name__ == "Conv1D" and base.__module__.startswith("transformers.")
        for base in type(module).__mro__
    )


def _weights_of_own_code(module: Module, kind: str) -> Iterator[tuple[str, str]]:
    """Yields what looks like weights of products in a module of a user or another library: a matrix
    called weight, and matrices of several experts. Scales of fp8 matrices are none.
    """
    for name, t in module._parameters.items():
        if t is None or not t.is_floating_point() or name.endswith("_scale_inv"):
            continue
        if t.dim() == 2 and name == "weight":
            yield name, f"{kind} multiplies by it: {_OWN_CODE}"
        # Embeddings of positions have three dimensions too, of which the first has one element.
        elif t.dim() == 3 and min(t.shape) > 1:
            in_fp8 = t.dtype in FORMATS
            reached = " in fp8" if in_fp8 else f": {_OWN_CODE}"
            yield name, f"{kind} multiplies by {t.shape[0]} matrices{reached}"

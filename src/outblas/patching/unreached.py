"""Finds the products of a model that are no linear layers, which `patch` cannot reach."""

from collections.abc import Iterable, Iterator

import torch

from outblas.core.quantization import FORMATS
from outblas.fp8 import FP8Linear
from outblas.patching import fp8_linears

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

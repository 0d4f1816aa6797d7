"""Finds the fp8 layers of models of transformers, and lets `scaled_mm` compute them.

`FP8Linear` of transformers holds a weight in fp8 and the inverse scales of its blocks, and
quantizes its input to fp8 as it comes. The forward here does the same for blocks of 128 by 128.
Other ways to quantize are computed by the class itself, and so are layers that change later.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from outblas.call.errors import OperandError
from outblas.call.fp8 import BLOCK
from outblas.call.problem import DTYPES
from outblas.fp8 import check, product
from outblas.patching import replaced
from outblas.patching.functions import tensor_of
from outblas.torch_ops.call import PLAIN
from outblas.torch_ops.scaled_operator import unsupported_reason

Tensor = torch.Tensor
Module = torch.nn.Module

_PARAMETERS = "weight", "weight_scale_inv", "bias"


class FP8Layer(NamedTuple):
    """A layer that `scaled_mm` can compute, or does."""

    module: Module

    @property
    def is_applied(self) -> bool:
        """Whether `scaled_mm` computes it already."""
        return replaced.arguments(self.module, forward) is not None

    def apply(self) -> None:
        """Replaces the module's forward."""
        replaced.replace(self.module, forward)

    def remark(self) -> str:
        """Returns what keeps the layer from the kernel; "" for nothing."""
        if changed := _other_computation(self.module):
            return f"{changed}: {type(self.module).__name__} computes as without patch"
        device = tensor_of(self.module, "weight").device
        if reason := _no_kernel_reason(device):
            return f"{reason}: {type(self.module).__name__} computes as without patch"
        if device.type == "cuda":
            return ""
        return f"on {device}: torch takes it until it moves to a GPU of sm_90"


# ---- finding
def is_layer(module: Module) -> bool:
    """Returns whether a module is an fp8 layer of transformers, or of a class derived from it."""
    return _class(module) is not None


def find(model: Module) -> Iterator[tuple[str, FP8Layer | str]]:
    """Yields the fp8 layers of transformers by name, each as what `scaled_mm` computes, or with the
    reason why it cannot.
    """
    for name, module in model.named_modules():
        if is_layer(module):
            layer = FP8Layer(module)
            reason = replaced.irreplaceable(module) or _other_computation(module)
            yield name or "(root)", layer if layer.is_applied else reason or layer


def _class(module: Module) -> type | None:
    """Returns the class FP8Linear of transformers that a module's class is or has for a base."""
    for kind in replaced.kind_of(module).__mro__:
        if kind.__name__ == "FP8Linear" and kind.__module__.startswith("transformers."):
            return kind
    return None


def _other_computation(module: Any) -> str | None:
    """Returns what a layer computes other than the product with blocks of 128 by 128, or None."""
    kind, base = replaced.kind_of(module), _class(module)
    if base is None or kind.forward is not base.forward:  # type: ignore[attr-defined]
        return f"{kind.__name__} has a forward of its own"
    held = {name: tensor_of(module, name) for name in _PARAMETERS}
    if held["weight"] is None or held["weight_scale_inv"] is None:
        return "its parameters are computed"
    for name, t in held.items():
        if t is not None and type(t) not in PLAIN:
            return f"its {name} is a {type(t).__name__}"
    size = getattr(module, "block_size", None)
    if size is None or tuple(size) != (BLOCK, BLOCK):
        shown = "none, with one scale for all" if size is None else " by ".join(map(str, size))
        return f"its block size is {shown}, not {BLOCK} by {BLOCK}"
    scheme = getattr(module, "activation_scheme", None)
    if scheme != "dynamic" or getattr(module, "activation_scale", None) is not None:
        return f"its activation_scheme is {scheme!r}, not 'dynamic'"
    try:
        check(*held.values())
    except OperandError as error:
        return f"its {error}"
    return None


@functools.cache
def _no_kernel_reason(device: torch.device) -> str | None:
    """Returns why no kernel multiplies fp8 operands on a GPU; None if one does, and elsewhere,
    where the class cannot compute either.
    """
    return unsupported_reason(device) if device.type == "cuda" else None


# ---- computing
def is_usual(module: Module, device: torch.device) -> bool:
    """Returns whether a layer is as `patch` found it, and a kernel multiplies on this device. While
    a program is compiled, it does not look for the kernel.
    """
    return not _other_computation(module) and (
        torch.compiler.is_compiling() or not _no_kernel_reason(device)
    )


def forward(module: Any, input: Any) -> Tensor:
    """Computes a layer by `scaled_mm` while it is as `patch` found it, but not on a GPU without the
    kernel; else as its class does. Compiled programs do not look for the kernel.
    """
    if type(input) not in PLAIN or input.dtype not in DTYPES or not is_usual(module, input.device):
        result: Tensor = replaced.compute(module, input)
        return result
    return product(input, *(tensor_of(module, name) for name in _PARAMETERS))

"""Finds the experts of models of transformers, and lets `outblas.moe_mlp` compute them.

Such a module holds the matrices of all experts as parameters of three dimensions, and says in
attributes what its forward computes: whether it is gated, has biases, stores matrices transposed.
transformers' decorator `use_experts_implementation` sets these attributes, and transformers' own
grouped products rely on them, as the forward here does. A module of any name that says otherwise
is left as it is.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from outblas.call.epilogue import gated_name
from outblas.call.problem import DTYPES
from outblas.patching import replaced
from outblas.patching.functions import function_of, tensor_of, unusual
from outblas.torch_ops.call import PLAIN, is_autocast
from outblas.torch_ops.moe import moe_mlp

Tensor = torch.Tensor
Module = torch.nn.Module

_FLAGS = "has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm"
_ARGUMENTS = ["self", "hidden_states", "top_k_index", "top_k_weights"]
# What transformers calls the ways in which it computes the same thing itself.
_IMPLEMENTATIONS = None, "eager", "grouped_mm", "batched_mm"


class Names(NamedTuple):
    """The parameters of experts by name, "" for biases that they do not have, and what `patch`
    found: the epilogue, how matrices are stored, the function of act_fn, the number of experts.
    """

    first: str
    down: str
    first_bias: str
    down_bias: str
    activation: Any
    is_transposed: bool
    function: str
    experts: int


class Experts(NamedTuple):
    """Experts that `moe_mlp` can compute, or does."""

    module: Module
    names: Names

    def __str__(self) -> str:
        return f"{self.names.experts} experts are one outblas.moe_mlp with {self.names.activation}"

    @property
    def is_applied(self) -> bool:
        """Whether `moe_mlp` computes them already."""
        return _names_in_use(self.module) is not None

    def apply(self) -> None:
        """Replaces the module's forward, for its replicas too."""
        replaced.replace(self.module, forward, self.names)

    def remark(self) -> str:
        """Returns what keeps the experts from outblas's kernels; "" for nothing."""
        if changed := _changed(self.module, self.names):
            return f"{changed}: {type(self.module).__name__} computes as without patch"
        held: Any = tensor_of(self.module, self.names.down)
        if held.is_cuda:
            return ""
        return f"on {held.device}: torch takes it until it moves to an NVIDIA GPU"


# ---- finding
def find(model: Module, are_wanted: bool) -> Iterator[tuple[str, Experts | str]]:
    """Yields the modules that hold experts by name, each with what it is, or with the reason why
    `moe_mlp` cannot compute it; if no others are wanted, those that it computes already.
    """
    for name, module in model.named_modules():
        if names := _names_in_use(module):
            yield name or "(root)", Experts(module, names)
        elif are_wanted and all(isinstance(getattr(module, flag, None), bool) for flag in _FLAGS):
            outcome = _names(module)
            swap = outcome if isinstance(outcome, str) else Experts(module, outcome)
            yield name or "(root)", swap


def _names_in_use(module: Module) -> Names | None:
    """Returns the names of experts that `moe_mlp` computes already; None for other modules."""
    arguments = replaced.arguments(module, forward)
    return None if arguments is None else arguments[0]


def _names(module: Any) -> Names | str:
    """Returns the names of the experts of a module that nothing has changed, or why it has none."""
    if reason := _other_computation(module):
        return reason
    first = "gate_up_proj" if module.has_gate else "up_proj"
    biases = (f"{first}_bias", "down_proj_bias") if module.has_bias else ("", "")
    function = function_of(module.act_fn)
    if function is None:
        return f"its activation is {type(module.act_fn).__name__}, which no epilogue has"
    activation = gated_name(function) if module.has_gate else function
    names = Names(first, "down_proj", *biases, activation, module.is_transposed, function, 0)
    reason = _unusual(module, names)
    return reason or names._replace(experts=tensor_of(module, names.down).shape[0])


def _other_computation(module: Any) -> str | None:
    """Returns what a module computes besides the products of experts and an activation, or None."""
    kind = replaced.kind_of(module)
    if reason := replaced.irreplaceable(module):
        return reason
    if list(inspect.signature(inspect.unwrap(kind.forward)).parameters) != _ARGUMENTS:
        return f"the forward of {kind.__name__} has arguments of its own"
    if not isinstance(getattr(module, "act_fn", None), Module):
        return "it has no act_fn"
    if module.has_post_expert_norm:
        return "it normalizes what experts return"
    if module.has_gate and not module.is_concatenated:
        return "the columns of gate and up alternate"
    gate: Callable[..., Any] | None = getattr(kind, "_apply_gate", None)
    if module.has_gate and getattr(gate, "__module__", "") != "transformers.integrations.moe":
        return f"{kind.__name__} has a gate of its own"
    chosen = _implementation(module)
    if chosen not in _IMPLEMENTATIONS:
        return f"its experts_implementation is {chosen!r}"
    return None


def _implementation(module: Any) -> Any:
    """Returns how transformers computes experts."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def _changed(module: Any, names: Names) -> str | None:
    """Returns which change since `patch` keeps `moe_mlp` from computing experts, or None."""
    if function_of(module.act_fn) != names.function:
        return f"its activation is not the {names.function} that patch found"
    return _unusual(module, names)


def _unusual(module: Any, names: Names) -> str | None:
    """Returns which property of the parameters keeps `moe_mlp` from computing experts, or None."""
    for name in filter(None, names[:4]):
        t = tensor_of(module, name)
        if t is None:
            return f"it has no parameter {name}"
        if reason := unusual(name, t):
            return reason
        if t.dim() != (2 if name.endswith("_bias") else 3):
            return f"its {name} has {t.dim()} dimensions"
    return None


# ---- computing
def forward(
    module: Any, names: Names, hidden_states: Any, top_k_index: Any, top_k_weights: Any
) -> Tensor:
    """Computes experts by `moe_mlp` while they are as `patch` found them, else as their class does.
    Like transformers' own, it rounds what comes in another dtype than that of the products.
    """
    is_plain = type(hidden_states) in PLAIN and hidden_states.dim() == 2
    if not is_plain or _changed(module, names):
        result: Tensor = replaced.compute(module, hidden_states, top_k_index, top_k_weights)
        return result
    dtype = _dtype(module, names, hidden_states)
    first, down = (tensor_of(module, name).to(dtype) for name in names[:2])
    biases = [tensor_of(module, name).to(dtype) if name else None for name in names[2:4]]
    if not names.is_transposed:
        first, down = first.mT, down.mT
    out = moe_mlp(
        hidden_states.to(dtype),
        first,
        down,
        top_k_index,
        top_k_weights,
        activation=names.activation,
        gate_up_bias=biases[0],
        down_bias=biases[1],
    )
    return out.to(hidden_states.dtype)


def _dtype(module: Any, names: Names, hidden_states: Tensor) -> torch.dtype:
    """Returns the dtype in which transformers would multiply: that of the matrices, or autocast's,
    which casts no grouped products.
    """
    if is_autocast(hidden_states) and _implementation(module) != "grouped_mm":
        dtype = torch.get_autocast_dtype(hidden_states.device.type)
        if dtype in DTYPES:
            return dtype
    stored: torch.dtype = tensor_of(module, names.first).dtype
    return stored

"""`Linear`, and `patch`, which makes every `torch.nn.Linear` of a model one."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch.fx.proxy import TracerBase
from torch.jit import is_scripting  # type: ignore[attr-defined]
from torch.nn import functional
from torch.nn.modules.lazy import LazyModuleMixin

from .api import linear
from .core import epilogue, problem
from .core.compat.torch_private import FakeTensor, FunctionalTensor
from .core.epilogue import Activation

Tensor = torch.Tensor
Parameter = torch.nn.Parameter

# Types of tensors that hold their values themselves. The last two stand for such a tensor while a
# program is traced.
_PLAIN = Tensor, Parameter, FakeTensor, FunctionalTensor

_NOTES = (
    "torch.ao.quantization.quantize_dynamic and convert_pt2e, and torch.onnx.export, know no "
    "outblas.Linear: call "
    "unpatch first",
)


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` by `outblas.linear`, with its `activation`. Of a gated pair out_features
    are the rows of the weight, those of the gate first, and half as many columns come out.

    A weight, bias or input of a tensor subclass (quantized, sharded) goes to
    `torch.nn.functional.linear` whole. torch.jit.script compiles the layer as torch's operators.
    torch.fx records one call of `outblas.linear`, and where it traces for quantization torch's
    operators.
    """

    # A list, as torch's own is.
    __constants__ = [*torch.nn.Linear.__constants__, "activation"]  # noqa: RUF012
    activation: Activation | None = (
        None  # instances of torch.nn.Linear that become ones of this class have no other
    )

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Activation | None = None,
    ):
        problem.check_activation(activation)
        if out_features % epilogue.glu_split(activation or ""):
            raise ValueError(
                f"out_features is {out_features}, expected an even number for activation "
                f"{activation!r}"
            )
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        if is_scripting():
            return _activated(functional.linear(input, self.weight, self.bias), self.activation)
        else:  # TorchScript does not compile this branch
            weight, bias = self.weight, self.bias
            if type(input) is Tensor and type(weight) is Parameter and isinstance(self, Linear):
                return linear(input, weight, bias, activation=self.activation)
            return _unusual_call(self, input, weight, bias)

    def extra_repr(self) -> str:
        return super().extra_repr() + (
            f", activation={self.activation!r}" if self.activation else ""
        )


def _unusual_call(layer: torch.nn.Module, input: Any, weight: Any, bias: Any) -> Tensor:
    """`Linear.forward` where it may be given a torch.fx.Proxy, or a layer that is no `Linear` any
    more: whoever wrapped `layer.forward` before `unpatch` still calls ours.
    """
    if not isinstance(layer, Linear):
        return functional.linear(input, weight, bias)
    if any(isinstance(t, torch.fx.Proxy) and _quantizes(t.tracer) for t in (input, weight, bias)):
        return epilogue.composed(
            functional.linear(input, weight, bias), layer.activation or "", None
        )
    return linear(input, weight, bias, activation=layer.activation)


def _quantizes(tracer: TracerBase) -> bool:
    """Whether a tracer's graph is for quantization, which matches torch's own functions only."""
    return any(kind.__name__ == "QuantizationTracer" for kind in type(tracer).__mro__)


def _activated(x: Tensor, activation: str | None) -> Tensor:
    """As `epilogue.apply`, in the part of Python that TorchScript compiles."""
    if activation is None:
        return x
    halves = x.chunk(2, -1)
    gated = activation in ("reglu", "geglu", "geglu_tanh", "swiglu")
    y = halves[0] if gated else x
    if activation in ("relu", "reglu"):
        y = torch.relu(y)
    elif activation in ("gelu", "geglu"):
        y = functional.gelu(y)
    elif activation in ("gelu_tanh", "geglu_tanh"):
        y = functional.gelu(y, approximate="tanh")
    else:
        y = functional.silu(y)
    return y * halves[1] if gated else y


@dataclass(frozen=True)
class Report:
    """What `patch` or `unpatch` made of the linear layers of a model, by name ("(root)" for the
    model itself).

    `swapped`: of the other class now, or before. `kept`: not, and why. `remarks`: what keeps a
    swapped one from our kernels for the time being. `notes`: what tools of torch do not take the
    model as it is now. `str` makes a table, and the notes follow it.
    """

    swapped: tuple[str, ...] = ()
    kept: dict[str, str] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [(name, "swapped", self.remarks.get(name, "")) for name in self.swapped]
        rows += [(name, "kept", why) for name, why in self.kept.items()]
        width = max((len(name) for name, *_ in rows), default=0)
        lines = [f"{name:{width}}  {what:7}  {why}".rstrip() for name, what, why in rows]
        return "\n".join(
            [f"{len(self.swapped)} swapped, {len(self.kept)} kept", *lines, *self.notes]
        )


def patch(model: torch.nn.Module) -> Report:
    """Makes every `torch.nn.Linear` in a model, in place, an `outblas.Linear`: only its class
    changes, and parameters, hooks, ties, optimizers and whoever holds the module stay as they are.

    Left alone are subclasses of `torch.nn.Linear`, layers whose `forward` was replaced, and those
    whose weight or bias no kernel takes: of another dtype, of a tensor subclass, sparse. A layer
    may become any of these afterwards (parametrized, pruned, quantized by torchao, sharded, hooked
    by accelerate) and computes what torch.nn.Linear would.

    A patched model can be copied, saved, compiled, exported, traced and scripted. A torch.fx graph
    has a call of `outblas.linear` where it had the module. torch.onnx.export and the quantizers
    that the report's `notes` name know only `torch.nn.Linear`: quantize_dynamic leaves a patched
    layer in its dtype and does not say so.

    Raises TypeError for no module.
    """
    swapped: list[str] = []
    kept: dict[str, str] = {}
    remarks: dict[str, str] = {}
    _check(model)
    bypassed = _bypassed(model)
    for name, module in _linears(model):
        if not _is_ours(type(module)):
            if reason := _reason(module):
                kept[name] = reason
                continue
            _rebind(module, "forward", torch.nn.Linear, Linear)
            _become(module, Linear)
        swapped.append(name)
        found = [why for why in (_torch_takes(module), bypassed.get(id(module))) if why]
        if found:
            remarks[name] = "; ".join(found)
    return Report(tuple(swapped), kept, remarks, _NOTES if swapped else ())


def unpatch(model: torch.nn.Module) -> Report:
    """Makes every `outblas.Linear` in a model, in place, a `torch.nn.Linear`, but for those with an
    activation.

    It also restores a layer that was parametrized, sharded by `fully_shard` or hooked by accelerate
    after `patch`, so that undoing that gives a `torch.nn.Linear`. `kept` of the report names what
    of ours remains and why.

    Raises TypeError for no module.
    """
    swapped: list[str] = []
    kept: dict[str, str] = {}
    restored: dict[type, type] = {Linear: torch.nn.Linear}
    _check(model)
    for name, module in _linears(model):
        kind = type(module)
        if not issubclass(kind, Linear):
            continue
        if not _is_ours(kind):
            kept[name] = f"is a {kind.__name__}, a subclass of outblas.Linear"
        elif module.activation is not None:
            kept[name] = f"has the activation {module.activation!r}, which torch.nn.Linear has not"
        else:
            for attribute in vars(module):
                _rebind(module, attribute, Linear, torch.nn.Linear)
            vars(module).pop("activation", None)  # None, where `Linear` was called
            _become(module, _restored(kind, restored))
            swapped.append(name)
    for name, module in model.named_modules():
        if isinstance(module, torch.fx.GraphModule) and any(
            node.target is linear for node in module.graph.nodes
        ):
            kept[name or "(root)"] = "its graph calls outblas.linear: trace the model after unpatch"
    return Report(tuple(swapped), kept)


def _check(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {type(model).__name__}, expected a torch.nn.Module")


def _linears(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear]]:
    """Each once, by its first name."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            yield name or "(root)", module


def _is_ours(kind: type) -> bool:
    """Whether it is `Linear`, or what torch made of it: parametrizations and `fully_shard` give a
    module a class of their own, derived from the one that it had. A user's subclass is not.
    """
    return issubclass(kind, Linear) and all(
        base is Linear or base.__module__.partition(".")[0] == "torch"
        for base in kind.__mro__
        if issubclass(base, Linear)
    )


def _restored(kind: type, done: dict[type, type]) -> type:
    """A class that torch derived from `Linear`, derived from `torch.nn.Linear` instead. The old one
    stays as it is, for modules of other models may share it.
    """
    if not issubclass(kind, Linear):
        return kind
    if kind not in done:
        own = {
            name: value
            for name, value in vars(kind).items()
            if name not in ("__dict__", "__weakref__")
        }
        done[kind] = type(
            kind.__name__, tuple(_restored(base, done) for base in kind.__bases__), own
        )
    return done[kind]


def _become(module: torch.nn.Module, kind: type) -> None:
    """Changes the class of a module, so that compiled code notices.

    The guards of torch 2.11 pass over a module none of whose dictionaries has changed.
    """
    module.__class__ = kind
    held, name = vars(module), "_class_has_changed"
    held[name] = True
    del held[name]


def _rebind(
    module: torch.nn.Module, attribute: str, old: type[torch.nn.Linear], new: type[torch.nn.Linear]
) -> None:
    """Makes of an attribute that is the module's bound `old.forward` its `new.forward`. Wrappers of
    `forward` keep what they wrap in such attributes, their own or as functools' `__wrapped__`.
    """
    holder = vars(module)
    while attribute in holder:
        value = holder[attribute]
        if isinstance(value, MethodType):
            if value.__func__ is old.forward and value.__self__ is module:
                holder[attribute] = MethodType(new.forward, module)
            return
        holder, attribute = getattr(value, "__dict__", {}), "__wrapped__"


def _reason(module: torch.nn.Linear) -> str | None:
    """Why a layer is not swapped."""
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
    """What of a layer's weight or bias makes torch compute the layer on any device."""
    for name in ("weight", "bias"):
        t = vars(module).get(name, module._parameters.get(name))
        if t is None:  # or computed: plain, whatever its dtype
            continue
        if type(t) not in _PLAIN:
            return f"its {name} is a {type(t).__name__}, which torch takes"
        if t.is_nested or t.layout is not torch.strided:
            return f"its {name} is {'nested' if t.is_nested else t.layout}, which torch takes"
        if t.dtype not in problem.DTYPES:
            return f"has a {name} of {t.dtype}, which no kernel takes"
    return None


def _torch_takes(module: torch.nn.Linear) -> str | None:
    """What keeps a swapped layer from our kernels. It computes no parameter, for that may change
    the layer's state.
    """
    if unusual := _unusual(module):
        return unusual + (" until fully_shard gathers it" if "DTensor" in unusual else "")
    held = vars(module).get("weight", next(module.parameters(), None))
    if held is None or held.is_cuda:
        return None
    return f"on {held.device}: torch takes it until it moves to an NVIDIA GPU"


def _bypassed(model: torch.nn.Module) -> dict[int, str]:
    """Layers whose parent may read their weight past them, by id, and what to say of them."""
    found: dict[int, str] = {}
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
            found |= dict.fromkeys((id(parent.linear1), id(parent.linear2)), why)
    return found

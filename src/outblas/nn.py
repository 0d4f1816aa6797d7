"""`Linear`, and `patch`, which turns every `torch.nn.Linear` of a model into one, and lets outblas
compute experts and fp8 layers.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch.fx.proxy import TracerBase
from torch.jit import is_scripting  # type: ignore[attr-defined]
from torch.nn import functional

from outblas.api import linear
from outblas.call import epilogue, hooks, problem
from outblas.call.epilogue import Activation
from outblas.fp8 import FP8Linear
from outblas.patching import (
    activated,
    fp8_linears,
    fp8_mlps,
    fusion,
    linears,
    preparing,
    replaced,
)
from outblas.patching import experts as moe
from outblas.patching.activated import Activated
from outblas.patching.gated import Gated
from outblas.patching.linears import (
    bypassed,
    gathered,
    is_of_torch,
    kept_reason,
    torch_takes,
    unreached,
)
from outblas.patching.replaced import become, rebased
from outblas.patching.report import Report
from outblas.torch_ops import native
from outblas.torch_ops.call import is_traced

__all__ = ["FP8Linear", "Linear", "Report", "patch", "unpatch"]

Tensor = torch.Tensor
Parameter = torch.nn.Parameter

_native_linear = native.linear

_NOTES = (
    "torch.ao.quantization.quantize_dynamic, convert_pt2e and torch.onnx.export do not recognize "
    "outblas.Linear: call unpatch first",
)


class Linear(torch.nn.Linear):
    """A `torch.nn.Linear` that computes with `outblas.linear`, with an optional activation.

    Parameters, their names and their initialization are those of `torch.nn.Linear`, so that state
    dicts are interchangeable. An input, weight or bias that computes by itself (quantized,
    sharded) is passed to `torch.nn.functional.linear`. torch.jit.script compiles the layer to
    torch's operators; torch.fx records one call of `outblas.linear`, or torch's operators where it
    traces for quantization.

    Args:
        in_features: The size K of an input row.
        out_features: The number N of rows of the weight, which is the size of an output row. A
            gated linear unit has the rows of the gate first, then those of the values, and returns
            out_features / 2 columns.
        bias: Whether the layer has a bias of shape (out_features).
        device: The device of the parameters, as in `torch.nn.Linear`.
        dtype: The dtype of the parameters, as in `torch.nn.Linear`.
        activation: What is applied to the biased product, as in `outblas.matmul`; None for
            nothing.

    Raises:
        TypeError: The activation is not a str.
        ValueError: The activation is unknown, or a gated one with an odd out_features.

    Example:
        >>> import torch, outblas
        >>> layer = outblas.Linear(16, 32, activation="gelu")
        >>> layer(torch.randn(8, 16)).shape
        torch.Size([8, 32])
        >>> layer
        Linear(in_features=16, out_features=32, bias=True, activation='gelu')
    """

    # A list, as in torch.
    __constants__ = [*torch.nn.Linear.__constants__, "activation"]  # noqa: RUF012
    activation: Activation | None = (
        None  # instances of torch.nn.Linear that become ones of this class have no other
    )
    # Whether the layer computes the activation after it where it runs as `patch(fuse=True)` saw it.
    _is_followed = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Activation | None = None,
    ) -> None:
        problem.check_activation(activation)
        if out_features % epilogue.glu_split(activation or ""):
            raise ValueError(
                f"out_features is {out_features}, expected an even number for activation "
                f"{activation!r}"
            )
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        """Compute activation(input @ weight.T + bias).

        Args:
            input: (..., in_features), of the dtype and on the device of the weight.

        Returns:
            (..., out_features), or half as many columns for a gated linear unit.

        Raises:
            OperandError: The input does not fit the weight, as in `outblas.linear`.
        """
        if is_scripting():
            return _activated(functional.linear(input, self.weight, self.bias), self.activation)
        else:  # TorchScript does not compile this branch
            weight, bias = self.weight, self.bias
            if type(input) is Tensor and type(weight) is Parameter and isinstance(self, Linear):
                if self._is_followed:
                    return _followed(self, input, weight, bias)
                if _native_linear is not None and not is_traced():
                    found = _native_linear(input, weight, bias, self.activation, None, None)
                    if found is not None:
                        return found
                return linear(input, weight, bias, activation=self.activation)
            return _unusual_call(self, input, weight, bias)

    def extra_repr(self) -> str:
        """Describe the layer's sizes and its activation, for `repr`.

        Returns:
            What stands between the parentheses of `repr`.
        """
        return super().extra_repr() + (
            f", activation={self.activation!r}" if self.activation else ""
        )


def _followed(layer: Linear, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Runs `Linear.forward` where an activation may follow that the layer computes."""
    run, activation = activated.run_of(layer)
    if run is None:
        activation = layer.activation
    y = None
    if _native_linear is not None and not is_traced():
        y = _native_linear(input, weight, bias, activation, None, None)
    if y is None:
        y = linear(input, weight, bias, activation=activation)
    return y if run is None else activated.computed(run, y)


def _unusual_call(layer: torch.nn.Module, input: Any, weight: Any, bias: Any) -> Tensor:
    """Runs `Linear.forward` where it may get a torch.fx.Proxy, or a layer that is no longer a
    `Linear`: a wrapper that was put around `layer.forward` before `unpatch` still calls this
    method.
    """
    if not isinstance(layer, Linear):
        return functional.linear(input, weight, bias)
    if any(isinstance(t, torch.fx.Proxy) and _quantizes(t.tracer) for t in (input, weight, bias)):
        return epilogue.composed(
            functional.linear(input, weight, bias), layer.activation or "", None
        )
    return linear(input, weight, bias, activation=layer.activation)


def _quantizes(tracer: TracerBase) -> bool:
    """Returns whether a tracer's graph is for quantization, which matches only torch's own
    functions.
    """
    return any(kind.__name__ == "QuantizationTracer" for kind in type(tracer).__mro__)


def _activated(x: Tensor, activation: str | None) -> Tensor:
    """Computes `epilogue.apply` in the subset of Python that TorchScript compiles."""
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


Filter = Callable[[str, Any], bool]


def patch(
    model: torch.nn.Module,
    *,
    filter: Filter | None = None,
    fuse: bool = False,
    experts: bool = True,
    dry_run: bool = False,
) -> Report:
    """Turn every `torch.nn.Linear` of a model into an `outblas.Linear`, in place.

    Only the class of a layer changes. Its parameters, hooks, tied weights, optimizers and every
    reference to the module stay valid.

    A subclass of `torch.nn.Linear` that has no `forward` of its own keeps its class, and outblas
    computes it. Other subclasses are left as they are, and so are layers whose `forward` was
    replaced and layers whose weight or bias no kernel accepts (another dtype, a quantized tensor,
    sparse, sharded by anything but `fully_shard`). A patched layer that is parametrized, pruned,
    quantized by torchao, sharded or hooked by accelerate later computes what `torch.nn.Linear`
    would. If nothing is swapped, a UserWarning says so.

    Experts of models of transformers (Mixtral, Qwen3-MoE, DeepSeek-V3 and others) get a forward
    that calls `outblas.moe_mlp`. They are found by what their modules say of themselves, in the
    attributes that transformers' own grouped products read; those that compute anything else, such
    as a gate of their own, are kept. Their parameters stay the same. Autocast casts them where it
    casts those of transformers: in all implementations but grouped_mm.

    Layers of fp8 checkpoints (`FP8Linear` of transformers: DeepSeek-V3, Qwen3) get a forward that
    quantizes the input with a scale for 128 columns of each row, and calls `outblas.scaled_mm`.
    They keep their class, parameters and scales, and are among the swapped layers. Covered are
    scales in float32 for blocks of 128 by 128 and inputs that are quantized as they come
    ("dynamic"). Other layers are kept, and on a GPU without a kernel for fp8 the class computes.

    A patched model can be copied, saved, compiled, exported, traced and scripted; a torch.fx graph
    has a call of `outblas.linear` in place of the module. torch.onnx.export and the quantizers
    that the report's `notes` name recognize `torch.nn.Linear` only: quantize_dynamic leaves a
    patched layer in its dtype without a warning, so call `unpatch` first.

    Args:
        model: Any module, which is changed in place.
        filter: A function that is asked for each layer that would be swapped, with its name and the
            layer, and returns whether to swap it. Modules of experts are layers too, which have no
            `out_features`; with `experts=False` it is not asked for them. All layers are asked
            before the first one is changed.
        fuse: Whether to fuse swapped layers with what follows them, where a module's forward says
            so: an activation that is a module of its own (relu, gelu, silu), and the two layers of
            a gated MLP with their activation, as in models of Llama's family. A fused product is
            rounded once, after the activation, where single ones are rounded one by one. The
            weights of a gated MLP become halves of one matrix, unless something else uses their
            memory; no call moves them. Compiled programs, autocast and layers with hooks compute
            such an MLP as before, and so does an MLP whose weights were sharded or replaced. A
            gated MLP of fp8 layers becomes two products with fp8 between them, where no gradients
            are needed.
        experts: Whether to swap experts.
        dry_run: Whether to report only, and change nothing.

    Returns:
        What was done with each linear layer and with experts, and which other products there are.

    Raises:
        TypeError: `model` is no `torch.nn.Module`, `filter` no function, or `fuse`, `experts` or
            `dry_run` no bool.
        AttributeError: `filter` reads an attribute that a module of experts does not have.

    Example:
        >>> import torch, outblas
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 4))
        >>> def is_large(name, layer):
        ...     return isinstance(layer, torch.nn.Linear) and layer.out_features > 8
        >>> outblas.patch(model, filter=is_large, dry_run=True)
        Report(swapped=('0',), kept={'1': 'the filter does not take it'}, ...)
        >>> outblas.patch(model).swapped
        ('0', '1')
        >>> type(model[0])
        <class 'outblas.nn.Linear'>
    """
    _check(model)
    if filter is not None and not callable(filter):
        raise TypeError(f"filter is {filter!r}, expected a function of a name and a layer, or None")
    for argument, given in (("fuse", fuse), ("experts", experts), ("dry_run", dry_run)):
        if not isinstance(given, bool):
            raise TypeError(f"{argument} is {given!r}, expected True or False")
    kept: dict[str, str] = {}
    chosen = _chosen_layers(model, filter, kept)
    of_moe = _chosen(moe.find(model, experts), filter, kept)
    quantized = _chosen(fp8_linears.find(model), filter, kept)
    fusible = (n for n, m in chosen.items() if _is_ours(type(m)) or is_of_torch(type(m)))
    layers = {id(chosen[name]): name for name in fusible}
    fusions = list(fusion.find(model, layers, Linear)) if fuse else []
    fusions += fp8_mlps.find(model, quantized) if fuse else []
    gated = {name: mlp for name, mlp in fusions if isinstance(mlp, Gated)}
    unfused = {name: why for name, mlp in gated.items() if (why := mlp.remark())}
    others = of_moe | quantized
    if not dry_run:
        for module in chosen.values():
            _swap(module)
        for swap in (*others.values(), *gated.values()):
            swap.apply()
        activated.apply([pair for _, pair in fusions if isinstance(pair, Activated)])
        preparing.begin(model, Linear)
    bypasses = bypassed(model)
    remarks = {name: why for name, module in chosen.items() if (why := _remark(module, bypasses))}
    remarks |= {name: why for name, swap in others.items() if (why := swap.remark())}
    if not (dry_run or chosen or others):
        why = "report.kept says why" if kept else "it has no linear layers"
        warnings.warn(f"patch swapped nothing of this {type(model).__name__}: {why}", stacklevel=2)
    report = Report(
        swapped=tuple(name for name, _ in _linears(model) if name in chosen or name in quantized),
        kept=kept,
        remarks=remarks | unfused,
        notes=_NOTES if chosen else (),
        unreached=unreached(model, [swap.module for swap in others.values()]),
        gains={name: gains for name, module in chosen.items() if (gains := _gains(module))},
        experts={name: str(swap) for name, swap in of_moe.items()},
        fused={name: str(fused) for name, fused in fusions if name not in unfused},
        dry_run=dry_run,
    )
    if not dry_run:
        vars(report)["_prepare"] = partial(_prepare, weakref.ref(model))
    return report


def _prepare(model: Callable[[], torch.nn.Module | None], rows: int) -> None:
    """Prepares a patched model that is still there."""
    held = model()
    if held is None:
        raise ReferenceError("the patched model is gone")
    preparing.prepare(held, Linear, rows)


Swap = TypeVar("Swap", moe.Experts, fp8_linears.FP8Layer)


def _chosen(
    candidates: Iterable[tuple[str, Swap | str]], filter: Filter | None, kept: dict[str, str]
) -> dict[str, Swap]:
    """Returns the modules to swap and those that were swapped before; adds the others to `kept`
    with the reasons.
    """
    chosen: dict[str, Swap] = {}
    for name, swap in candidates:
        if isinstance(swap, str):
            kept[name] = swap
        elif not swap.is_applied and (reason := _filtered(filter, name, swap.module)):
            kept[name] = reason
        else:
            chosen[name] = swap
    return chosen


def _chosen_layers(
    model: torch.nn.Module, filter: Filter | None, kept: dict[str, str]
) -> dict[str, torch.nn.Linear]:
    """Returns the linear layers to swap and those that are ours already; adds the others to `kept`
    with the reasons, but for fp8 layers.
    """
    chosen: dict[str, torch.nn.Linear] = {}
    sharded = gathered(model)
    for name, module in _linears(model):
        if fp8_linears.is_layer(module):
            continue
        reason = None
        if not _is_swapped(module):
            is_gathered = id(module) in sharded
            reason = kept_reason(module, is_gathered) or _filtered(filter, name, module)
        if reason:
            kept[name] = reason
        else:
            chosen[name] = module
    return chosen


def _is_swapped(module: torch.nn.Linear) -> bool:
    """Returns whether a layer computes by outblas already."""
    return _is_ours(type(module)) or replaced.arguments(module, linears.forward) is not None


def _swap(module: torch.nn.Linear) -> None:
    """Lets a layer compute by outblas. A subclass stays one, with another forward."""
    if _is_swapped(module):
        return
    if is_of_torch(type(module)):
        _rebind(module, "forward", torch.nn.Linear, Linear)
        become(module, rebased(type(module), {torch.nn.Linear: Linear}))
    else:
        replaced.replace(module, linears.forward)


def _filtered(filter: Filter | None, name: str, module: torch.nn.Module) -> str | None:
    """Returns that the caller's filter does not take a layer, or None. An error of a filter for
    linear layers tells of experts.
    """
    try:
        is_wanted = filter is None or filter(name, module)
    except AttributeError as error:
        if isinstance(module, torch.nn.Linear):
            raise
        raise AttributeError(
            f"filter failed for {name}, which holds experts and is no torch.nn.Linear: {error}. "
            "Let it ask for the class, or leave experts alone by experts=False"
        ) from error
    return None if is_wanted else "the filter does not take it"


def _remark(module: torch.nn.Linear, bypasses: dict[int, str]) -> str:
    """Returns what keeps a swapped layer from outblas's kernels; "" for nothing."""
    return "; ".join(filter(None, (torch_takes(module), bypasses.get(id(module)))))


def _gains(module: torch.nn.Linear) -> dict[int, float]:
    """Returns what was measured of products with a layer's weight: for each number of rows the time
    of cuBLAS over that of the best kernel.
    """
    weight = vars(module).get("weight", module._parameters.get("weight"))
    if not isinstance(weight, Tensor) or not weight.is_cuda or weight.dim() != 2:
        return {}
    N, K = weight.shape
    gains: dict[int, float] = hooks.tuner.get().measured_gains(weight.device, N, K, weight.dtype)
    return gains


def unpatch(model: torch.nn.Module) -> Report:
    """Turn every `outblas.Linear` of a model back into a `torch.nn.Linear`, in place.

    What `patch` fused is taken apart first, and experts and fp8 layers get their own forward back.
    Other layers with an activation stay, because `torch.nn.Linear` has none. Layers that were
    parametrized, sharded by `fully_shard` or hooked by accelerate after `patch` are restored too:
    when that is undone, they are a `torch.nn.Linear`.

    Args:
        model: Any module, which is changed in place.

    Returns:
        What was done with each layer. `kept` names the layers and torch.fx graphs that still call
        outblas, with the reason for each.

    Raises:
        TypeError: `model` is no `torch.nn.Module`.

    Example:
        >>> import torch, outblas
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(16, 32), outblas.Linear(32, 4, activation="relu")
        ... )
        >>> outblas.patch(model).swapped
        ('0', '1')
        >>> report = outblas.unpatch(model)
        >>> report.swapped, report.kept
        (('0',), {'1': "has the activation 'relu', which torch.nn.Linear does not have"})
    """
    swapped: list[str] = []
    kept: dict[str, str] = {}
    restored: dict[type, type] = {Linear: torch.nn.Linear}
    _check(model)
    forwards = replaced.restore(model)
    for module in model.modules():
        vars(module).pop("_is_followed", None)
    for name, module in _linears(model):
        kind = type(module)
        if forwards.get(name) in (fp8_linears.forward, linears.forward):
            swapped.append(name)
        elif not issubclass(kind, Linear):
            continue
        elif not _is_ours(kind):
            kept[name] = f"is a {kind.__name__}, a subclass of outblas.Linear"
        elif module.activation is not None:
            kept[name] = (
                f"has the activation {module.activation!r}, which torch.nn.Linear does not have"
            )
        else:
            for attribute in vars(module):
                _rebind(module, attribute, Linear, torch.nn.Linear)
            vars(module).pop("activation", None)  # None, if `Linear` was called
            become(module, rebased(kind, restored))
            swapped.append(name)
    for name, module in model.named_modules():
        if isinstance(module, torch.fx.GraphModule) and any(
            node.target is linear for node in module.graph.nodes
        ):
            kept[name or "(root)"] = "its graph calls outblas.linear: trace the model after unpatch"
    experts = [name for name, forward in forwards.items() if forward is moe.forward]
    undone = dict.fromkeys(experts, "computes as its class does")
    return Report(tuple(swapped), kept, experts=undone, restored=True)


def _check(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {type(model).__name__}, expected a torch.nn.Module")


def _linears(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear]]:
    """Yields each linear layer once, by its first name."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            yield name or "(root)", module


def _is_ours(kind: type) -> bool:
    """Returns whether a class is `Linear`, or one that torch derived from it: parametrizations and
    `fully_shard` give a module a new class, derived from the old one. A user's subclass is not.
    """
    return issubclass(kind, Linear) and all(
        base is Linear or base.__module__.partition(".")[0] == "torch"
        for base in kind.__mro__
        if issubclass(base, Linear)
    )


def _rebind(
    module: torch.nn.Module, attribute: str, old: type[torch.nn.Linear], new: type[torch.nn.Linear]
) -> None:
    """Replaces the bound `old.forward` in an attribute of the module by `new.forward`. Wrappers of
    `forward` keep the wrapped function in such attributes, either their own or functools'
    `__wrapped__`.
    """
    holder = vars(module)
    while attribute in holder:
        value = holder[attribute]
        if isinstance(value, MethodType):
            if value.__func__ is old.forward and value.__self__ is module:
                holder[attribute] = MethodType(new.forward, module)
            return
        holder, attribute = getattr(value, "__dict__", {}), "__wrapped__"

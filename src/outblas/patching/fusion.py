"""Fuses linear layers of a model with what follows them, for `patch(model, fuse=True)`.

Two patterns are found in the graph of a module's `forward`, as torch.fx traces it with its children
as they are:

- an activation of a linear layer's output, which nothing else reads: the layer computes the
  activation itself, and a `Fused` takes the place of the activation's module;
- a gated MLP, down(f(gate(x)) * up(x)): gate and up become one product with a gated activation.
  Their weights stay parameters of their own, which now are the halves of one matrix.

A fused product is rounded once, after the activation. Modules with hooks, and those whose forward
was replaced, are left as they are.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ..api import linear
from ..core.compat.torch_private import any_autocast
from ..core.epilogue import gated_name
from ..runtime.cuda_graphs import capturing

Tensor = torch.Tensor
Module = torch.nn.Module
Parameter = torch.nn.Parameter
Layers = Mapping[int, str]  # the names of linear layers that may be fused, by id


class Fused(torch.nn.Identity):
    """Stands where an activation was that the layer before it computes now.

    Args:
        layer: The name of that layer among the children of the same module.
        replaced: The activation.
    """

    def __init__(self, layer: str, replaced: Module) -> None:
        super().__init__()
        self.layer = layer
        self.replaced = (replaced,)  # in a tuple: it is no child

    def extra_repr(self) -> str:
        """Describe what was replaced, for `repr`.

        Returns:
            What stands between the parentheses of `repr`.
        """
        return f"{type(self.replaced[0]).__name__} of {self.layer}"


class Activated(NamedTuple):
    """A linear layer and the activation of its output, children of `parent` by name."""

    parent: Module
    layer: str
    activation: str
    function: str

    def __str__(self) -> str:
        return f"computes the {self.function} of {self.activation}"

    def apply(self) -> None:
        """Lets the layer compute the activation. The layer is an `outblas.Linear`."""
        children: dict[str, Any] = self.parent._modules
        if isinstance(children[self.activation], Fused):
            return
        children[self.layer].activation = self.function
        children[self.activation] = Fused(self.layer, children[self.activation])


class GatedNames(NamedTuple):
    """The children of a gated MLP by name, its activation, and the class of gate and up."""

    gate: str
    up: str
    down: str
    activation: Any
    kind: type[torch.nn.Linear]


class Gated(NamedTuple):
    """A gated MLP."""

    parent: Module
    names: GatedNames

    def __str__(self) -> str:
        gate, up, _, activation, _ = self.names
        return f"{gate} and {up} are one product with {activation}"

    def apply(self) -> None:
        """Stores both weights in one matrix, and replaces the module's forward."""
        children: dict[str, Any] = self.parent._modules
        gate, up = (children[name] for name in self.names[:2])
        stack(gate.weight, up.weight)
        vars(self.parent)["forward"] = functools.partial(_gated_forward, self.parent, self.names)
        vars(self.parent)[MOVES] = 0


Fusion = Activated | Gated


# ---- finding
def find(model: Module, layers: Layers, kind: type[torch.nn.Linear]) -> list[tuple[str, Fusion]]:
    """Returns what can be fused in a model, by the name of the layer or the module, in order.

    `layers` are those that `patch` swaps, by id; `kind` is the class that they get.
    """
    free = used_once(model, layers)
    found: list[tuple[str, Fusion]] = []
    for name, module in model.named_modules():
        if names := _fused_names(module):
            found.append((name or "(root)", Gated(module, names)))
        elif _is_candidate(module, free) and (graph := _graph(module)) is not None:
            if gated := _gated(module, graph, free, kind):
                found.append((name or "(root)", gated))
                continue
            pairs = *_fused_before(module, free), *_activated(module, graph, free)
            found += [(free[id(module._modules[each.layer])], each) for each in pairs]
    return found


def used_once(model: Module, layers: Layers) -> Layers:
    """Returns the layers that stand in one place of a model."""
    uses: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        uses[id(module)] = uses.get(id(module), 0) + 1
    return {key: name for key, name in layers.items() if uses[key] == 1}


def gated_names(module: Module, layers: Layers, kind: type[torch.nn.Linear]) -> GatedNames | None:
    """Returns the children of a gated MLP whose gate and up are among `layers`; None for other
    modules.
    """
    if not _is_candidate(module, layers) or (graph := _graph(module)) is None:
        return None
    found = _gated(module, graph, layers, kind)
    return None if found is None else found.names


def _fused_names(module: Module) -> GatedNames | None:
    """Returns the children of a gated MLP that is fused already; None for other modules."""
    forward: Callable[..., Any] | None = vars(module).get("forward")
    if isinstance(forward, functools.partial) and forward.func is _gated_forward:
        names: GatedNames = forward.args[1]
        return names
    return None


def _fused_before(module: Module, layers: Layers) -> Iterator[Activated]:
    """Yields the layers that compute an activation after them already."""
    for name, child in module._modules.items():
        if isinstance(child, Fused):
            layer: Any = module._modules.get(child.layer)
            if id(layer) in layers and layer.activation:
                yield Activated(module, child.layer, name, layer.activation)


def _is_candidate(module: Module, layers: Layers) -> bool:
    children = [child for child in module._modules.values() if child is not None]
    return (
        any(id(child) in layers for child in children)
        and any(function_of(child) or isinstance(child, Fused) for child in children)
        and "forward" not in vars(module)
    )


def function_of(module: Module) -> str | None:
    """Returns the function that a module without parameters computes, by the name that it has in
    an epilogue; None for other modules.
    """
    kind = type(module)
    if has_hooks(module) or "forward" in vars(module):
        return None
    if kind is torch.nn.ReLU:
        return "relu"
    if kind is torch.nn.SiLU:
        return "silu"
    if isinstance(module, torch.nn.GELU):
        known = {"none": "gelu", "tanh": "gelu_tanh"}
        return known.get(module.approximate) if kind is torch.nn.GELU else None
    if kind.__module__ != "transformers.activations":
        return None
    act: Any = getattr(module, "act", None)
    if kind.__name__ == "GELUActivation" and act is functional.gelu:
        return "gelu"
    if kind.__name__ in ("GELUTanh", "PytorchGELUTanh"):
        tanh = isinstance(act, functools.partial) and act.keywords == {"approximate": "tanh"}
        return "gelu_tanh" if tanh and act.func is functional.gelu else None
    return {"SiLUActivation": "silu", "NewGELUActivation": "gelu_tanh"}.get(kind.__name__)


def has_hooks(module: Module) -> bool:
    """Returns whether something observes or changes what a module computes."""
    hooks = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
    )
    return any(getattr(module, name) for name in hooks)


class _Tracer(torch.fx.Tracer):
    """Records calls of children, whatever they do."""

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        return True


def _graph(module: Module) -> torch.fx.Graph | None:
    """Returns what the forward of a module calls; None where it cannot be traced."""
    try:
        return _Tracer().trace(module)
    except Exception:  # whatever a forward raises for operands without values
        return None


def _called_once(graph: torch.fx.Graph) -> dict[str, torch.fx.Node]:
    """Returns the calls of direct children that are called once with one operand, by name."""
    calls: dict[str, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    return {
        name: found[0]
        for name, found in calls.items()
        if len(found) == 1 and len(found[0].args) == 1 and not found[0].kwargs and "." not in name
    }


def _activated(module: Module, graph: torch.fx.Graph, layers: Layers) -> Iterator[Activated]:
    """Yields the layers whose output an activation alone reads."""
    calls = _called_once(graph)
    for name, call in calls.items():
        child = module._modules[name]
        function = None if child is None else function_of(child)
        given = call.args[0]
        if function is None or not isinstance(given, torch.fx.Node) or len(given.users) != 1:
            continue
        layer = str(given.target)
        if calls.get(layer) is given and _is_free(module._modules[layer], layers):
            yield Activated(module, layer, name, function)


def _is_free(layer: Any, layers: Layers) -> bool:
    """Returns whether a layer may compute more than before."""
    return id(layer) in layers and not has_hooks(layer) and not getattr(layer, "activation", None)


def _gated(
    module: Module, graph: torch.fx.Graph, layers: Layers, kind: type[torch.nn.Linear]
) -> Gated | None:
    """Returns the gated MLP that a module is, if it is one."""
    calls, nodes = _called_once(graph), list(graph.nodes)
    if [node.op for node in nodes].count("placeholder") != 1 or len(nodes) != 7:
        return None
    for down, call in calls.items():
        product = call.args[0]
        if not (isinstance(product, torch.fx.Node) and product.target in (operator.mul, torch.mul)):
            continue
        if nodes[-1].args[0] is not call or len(product.args) != 2:
            return None
        for gated, up in (product.args, product.args[::-1]):
            names = _gate_and_up(module, calls, gated, up)
            if names and all(_is_free(module._modules[name], layers) for name in names[:2]):
                gate, other, function = names
                if _alike(module._modules[gate], module._modules[other]):
                    activation = gated_name(function)
                    return Gated(module, GatedNames(gate, other, down, activation, kind))
    return None


def _gate_and_up(
    module: Module, calls: Mapping[str, torch.fx.Node], gated: Any, up: Any
) -> tuple[str, str, str] | None:
    """Returns the names of gate and up, and the function, where `gated` is f(gate(x)) and `up` is
    up(x).
    """
    if not (isinstance(gated, torch.fx.Node) and isinstance(up, torch.fx.Node)):
        return None
    activation, up_name = str(gated.target), str(up.target)
    if calls.get(activation) is not gated or calls.get(up_name) is not up:
        return None
    child, gate = module._modules[activation], gated.args[0]
    function = None if child is None else function_of(child)
    if function is None or not isinstance(gate, torch.fx.Node):
        return None
    name = str(gate.target)
    alone = all(len(node.users) == 1 for node in (gated, up, gate))
    if calls.get(name) is gate and gate.args == up.args and alone:
        return name, up_name, function
    return None


def _alike(gate: Any, up: Any) -> bool:
    """Returns whether the weights of two layers can be halves of one matrix."""
    one, other = gate.weight, up.weight
    return (
        type(one) is type(other) is Parameter
        and one is not other
        and one.shape == other.shape
        and one.dtype == other.dtype
        and one.device == other.device
        and one.requires_grad == other.requires_grad
        and (gate.bias is None) == (up.bias is None)
    )


# ---- gated MLPs
# An attribute of the module: how often the weights of a fused MLP were moved together again, after
# a copy, `torch.load` or `to` took them apart. Where that happens often, something else moves them
# as well, and the MLP is computed as before.
MOVES = "_outblas_moves"
_MOST_MOVES = 8


def stack(gate: Tensor, up: Tensor) -> None:
    """Moves two weights into the halves of one matrix. They stay the parameters that they are."""
    if are_stacked(gate, up):
        return
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat((gate, up))
        rows = gate.shape[0]
        gate.data, up.data = whole[:rows], whole[rows:]


def stacked_again(mlp: Module, gate: Tensor, up: Tensor) -> bool:
    """Moves the weights of a fused MLP together again, unless that happened often. Returns whether
    they are together.
    """
    moves = vars(mlp).get(MOVES, 0)
    together = (
        moves < _MOST_MOVES
        and gate.shape == up.shape
        and (gate.dtype, gate.device, gate.layout) == (up.dtype, up.device, torch.strided)
        and not (gate.is_inference() or up.is_inference() or capturing(gate.device))
        and min(gate.data_ptr(), up.data_ptr()) > 0
    )
    if together:
        vars(mlp)[MOVES] = moves + 1
        stack(gate, up)
    return together


def are_stacked(gate: Tensor, up: Tensor) -> bool:
    """Returns whether two weights are the halves of one matrix."""
    return (
        gate.shape == up.shape
        and gate.dtype == up.dtype
        and gate.is_contiguous()
        and up.is_contiguous()
        and up.data_ptr() == gate.data_ptr() + gate.numel() * gate.element_size() > 0
        and gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    )


class _Whole(torch.autograd.Function):
    """The matrix whose halves two weights are, without a copy."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        rows, columns = gate.shape
        ctx.save_for_backward(up)
        return gate.as_strided((2 * rows, columns), (columns, 1))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        # Raises where `up` was modified since; the matrix shares the version of `gate` alone.
        (up,) = ctx.saved_tensors
        rows = up.shape[0]
        return g[:rows], g[rows:]


_whole: Callable[[Tensor, Tensor], Tensor] = _Whole.apply


def _gated_forward(mlp: Module, names: GatedNames, x: Tensor) -> Tensor:
    """Computes down(f(gate(x)) * up(x)), gate and up in one product where their weights are still
    the halves of one matrix, and nothing observes the layers.
    """
    children: dict[str, Any] = mlp._modules
    gate, up, down = (children[name] for name in names[:3])
    if not _is_usual(mlp, names.kind, gate, up, x):
        result: Tensor = type(mlp).forward(mlp, x)
        return result
    weight = _whole(gate.weight, up.weight)
    bias = None if gate.bias is None else torch.cat((gate.bias, up.bias))
    inner = linear(x, weight, bias, activation=names.activation)
    result = down(inner)
    return result


def _is_usual(mlp: Module, kind: type[torch.nn.Linear], gate: Any, up: Any, x: Any) -> bool:
    """Returns whether gate and up may be one product, and moves their weights together for it."""
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and type(gate) is type(up) is kind
        and type(gate._parameters.get("weight")) is Parameter
        and type(up._parameters.get("weight")) is Parameter
        and gate.activation is None
        and up.activation is None
        and not any(has_hooks(layer) or "forward" in vars(layer) for layer in (gate, up))
        and not any_autocast()
        and (gate.bias is None) == (up.bias is None)
        and (are_stacked(gate.weight, up.weight) or stacked_again(mlp, gate.weight, up.weight))
    )


# ---- back
def undo(model: Module) -> None:
    """Gives modules their own activations and forwards back."""
    for module in list(model.modules()):
        if _fused_names(module):
            del vars(module)["forward"]
            vars(module).pop(MOVES, None)
        for name, child in list(module._modules.items()):
            if isinstance(child, Fused):
                layer: Any = module._modules.get(child.layer)
                if layer is not None:
                    layer.activation = None
                replaced = child.replaced[0]
                replaced.train(child.training)
                module._modules[name] = replaced

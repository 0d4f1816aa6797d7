"""Finds linear layers of a model that `patch(model, fuse=True)` fuses with what follows them.

Two patterns are found in the graph of a module's `forward`, as torch.fx traces it with its children
as they are, in training and out of it:

- an activation of a linear layer's output, which nothing else reads (`activated`);
- a gated MLP, down(f(gate(x)) * up(x)) (`gated`).

A fused product is rounded once, after the activation. Modules with hooks, and those whose forward
was replaced, are left as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from outblas.call.epilogue import gated_name
from outblas.patching import gated, replaced
from outblas.patching.activated import Activated
from outblas.patching.functions import function_of, has_hooks
from outblas.patching.gated import Gated, GatedNames, alike

Module = torch.nn.Module
Layers = Mapping[int, str]  # the names of linear layers that may be fused, by id
Fusion = Activated | Gated


def find(model: Module, layers: Layers, kind: type[torch.nn.Linear]) -> list[tuple[str, Fusion]]:
    """Returns what can be fused in a model, by the name of the layer or the module, in order.

    `layers` are those that `patch` swaps, by id; `kind` is the class that they get.
    """
    free = used_once(model, layers)
    fusions: list[tuple[str, Fusion]] = []
    for name, module in model.named_modules():
        graphs = graphs_of(module, free)
        if names := gated_names(graphs, module, free, kind):
            fusions.append((name or "(root)", Gated(module, names, 1, gated.forward)))
            continue
        pairs = [list(_activated(module, graph, free)) for graph in graphs]
        for pair in pairs[0] if pairs else ():
            if pair in pairs[-1]:
                fusions.append((free[id(module._modules[pair.layer])], pair))
    return fusions


def used_once(model: Module, layers: Layers) -> Layers:
    """Returns the layers that stand in one place of a model."""
    uses: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        uses[id(module)] = uses.get(id(module), 0) + 1
    return {key: name for key, name in layers.items() if uses[key] == 1}


class _Tracer(torch.fx.Tracer):
    """Records calls of children, whatever they do."""

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        return True


def graphs_of(module: Module, layers: Layers) -> list[torch.fx.Graph]:
    """Returns what the forward of a module calls in training and out of it; nothing for a module
    without layers to fuse, or one that cannot be traced.
    """
    children = [child for child in module._modules.values() if child is not None]
    has_layers = any(id(child) in layers for child in children)
    if not (has_layers and any(map(function_of, children))) or replaced.irreplaceable(module):
        return []
    graphs, mode = [], module.training
    try:
        for training in (True, False):
            module.training = training
            graphs.append(_Tracer().trace(module))
    except Exception:  # whatever a forward raises for operands without values
        return []
    finally:
        module.training = mode
    return graphs


def _called_once(graph: torch.fx.Graph) -> dict[str, torch.fx.Node]:
    """Returns the calls of direct children that are called once with one operand, by name."""
    calls: dict[str, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    return {
        name: nodes[0]
        for name, nodes in calls.items()
        if len(nodes) == 1 and len(nodes[0].args) == 1 and not nodes[0].kwargs and "." not in name
    }


def _activated(module: Module, graph: torch.fx.Graph, layers: Layers) -> Iterator[Activated]:
    """Yields the layers whose output an activation alone reads."""
    calls = _called_once(graph)
    for name, call in calls.items():
        child = module._modules[name]
        function = None if child is None else function_of(child)
        source = call.args[0]
        if function is None or not isinstance(source, torch.fx.Node) or len(source.users) != 1:
            continue
        layer = str(source.target)
        if calls.get(layer) is source and _is_free(module._modules[layer], layers):
            yield Activated(module, layer, name, function)


def _is_free(layer: Any, layers: Layers) -> bool:
    """Returns whether a layer may compute more than before."""
    return id(layer) in layers and not has_hooks(layer) and not getattr(layer, "activation", None)


def gated_names(
    graphs: Iterable[torch.fx.Graph], module: Module, layers: Layers, kind: type[torch.nn.Linear]
) -> GatedNames | None:
    """Returns the children of the gated MLP that a module is by all its graphs, with gate and up
    among `layers`; None for other modules.
    """
    names = {_gated(graph, module, layers, kind) for graph in graphs}
    return names.pop() if len(names) == 1 else None


def _gated(
    graph: torch.fx.Graph, module: Module, layers: Layers, kind: type[torch.nn.Linear]
) -> GatedNames | None:
    """Returns the children of down(f(gate(x)) * up(x)): of a graph of x, four calls, their product
    and the output, in which no value has another reader.
    """
    calls, (first, *_, last) = _called_once(graph), graph.nodes
    names = {id(node): name for name, node in calls.items()}
    down: Any = calls.get(names.get(id(last.args[0]), ""))
    if len(calls) != 4 or len(graph.nodes) != 7 or first.op != "placeholder" or down is None:
        return None
    product: Any = down.args[0]
    if getattr(product, "target", None) not in (operator.mul, torch.mul) or len(product.args) != 2:
        return None
    for act, up in (product.args, product.args[::-1]):
        gate: Any = act.args[0] if id(act) in names else None
        if id(up) not in names or id(gate) not in names or gate is up or gate.args != up.args:
            continue
        of_calls = names[id(gate)], names[id(up)], names[id(down)], names[id(act)]
        one, other, _, activation = (module.get_submodule(name) for name in of_calls)
        function = function_of(activation)
        if function and _is_free(one, layers) and _is_free(other, layers) and alike(one, other):
            return GatedNames(*of_calls, function, gated_name(function), kind)
    return None

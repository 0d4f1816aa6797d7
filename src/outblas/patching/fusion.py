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

from outblas.core.epilogue import gated_name
from outblas.patching import activated, gated, replaced
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
        graphs = _graphs(module, free)
        if names := _same(_gated(module, graph, free, kind) for graph in graphs):
            fusions.append((name or "(root)", Gated(module, names)))
            continue
        pairs = [list(_activated(module, graph, free)) for graph in graphs]
        for pair in pairs[0] if pairs else ():
            if pair in pairs[-1]:
                fusions.append((free[id(module._modules[pair.layer])], pair))
    return fusions


def gated_names(module: Module, layers: Layers, kind: type[torch.nn.Linear]) -> GatedNames | None:
    """Returns the children of a gated MLP whose gate and up are among `layers`; None for other
    modules.
    """
    return _same(_gated(module, graph, layers, kind) for graph in _graphs(module, layers))


def apply(fusions: Iterable[Fusion]) -> None:
    """Fuses what was found."""
    pairs: dict[int, list[Activated]] = {}
    for fusion in fusions:
        if isinstance(fusion, Gated):
            fusion.apply()
        else:
            pairs.setdefault(id(fusion.parent), []).append(fusion)
    for of_parent in pairs.values():
        activated.apply(of_parent[0].parent, of_parent)


def undo(model: Module) -> None:
    """Takes apart what was fused."""
    gated.undo(model)
    activated.undo(model)


def used_once(model: Module, layers: Layers) -> Layers:
    """Returns the layers that stand in one place of a model."""
    uses: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        uses[id(module)] = uses.get(id(module), 0) + 1
    return {key: name for key, name in layers.items() if uses[key] == 1}


def _same(of_graphs: Iterable[GatedNames | None]) -> GatedNames | None:
    """Returns the names that all graphs have in common."""
    names = set(of_graphs)
    return names.pop() if len(names) == 1 else None


def _is_candidate(module: Module, layers: Layers) -> bool:
    children = [child for child in module._modules.values() if child is not None]
    return (
        any(id(child) in layers for child in children)
        and any(function_of(child) for child in children)
        and "forward" not in vars(module)
        and replaced.can_replace(module)
    )


class _Tracer(torch.fx.Tracer):
    """Records calls of children, whatever they do."""

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        return True


def _graphs(module: Module, layers: Layers) -> list[torch.fx.Graph]:
    """Returns what the forward of a module calls in training and out of it; nothing for a module
    without layers to fuse, or one that cannot be traced.
    """
    if not _is_candidate(module, layers):
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


def _gated(
    module: Module, graph: torch.fx.Graph, layers: Layers, kind: type[torch.nn.Linear]
) -> GatedNames | None:
    """Returns the children of the gated MLP that a module is, if it is one."""
    calls, nodes = _called_once(graph), list(graph.nodes)
    if [node.op for node in nodes].count("placeholder") != 1 or len(nodes) != 7:
        return None
    for down, call in calls.items():
        product = call.args[0]
        if not (isinstance(product, torch.fx.Node) and product.target in (operator.mul, torch.mul)):
            continue
        if nodes[-1].args[0] is not call or len(product.args) != 2:
            return None
        for factors in (product.args, product.args[::-1]):
            names = _gate_and_up(module, calls, *factors)
            if names and all(_is_free(module._modules[name], layers) for name in names[:2]):
                gate, up, act, function = names
                if alike(module._modules[gate], module._modules[up]):
                    return GatedNames(gate, up, down, act, function, gated_name(function), kind)
    return None


def _gate_and_up(
    module: Module, calls: Mapping[str, torch.fx.Node], activated: Any, up: Any
) -> tuple[str, str, str, str] | None:
    """Returns the names of gate, up and f, and the function, where `activated` is f(gate(x)) and
    `up` is up(x).
    """
    if not (isinstance(activated, torch.fx.Node) and isinstance(up, torch.fx.Node)):
        return None
    activation, up_name = str(activated.target), str(up.target)
    if calls.get(activation) is not activated or calls.get(up_name) is not up:
        return None
    child, gate = module._modules[activation], activated.args[0]
    function = None if child is None else function_of(child)
    if function is None or not isinstance(gate, torch.fx.Node):
        return None
    name = str(gate.target)
    alone = all(len(node.users) == 1 for node in (activated, up, gate))
    if calls.get(name) is gate and gate.args == up.args and alone:
        return name, up_name, activation, function
    return None

"""Linear layers that compute the activation after them, in one GEMM.

A layer does so only while the forward runs in which `patch` saw the activation follow, and only if
both are still there as it saw them. Called by anything else, such as a wrapper around the layer or
another container, the layer computes what it always did, and so does the activation.
"""

import threading
from typing import Any, NamedTuple

import torch

from outblas.patching import replaced
from outblas.patching.functions import function_of, has_hooks

Tensor = torch.Tensor
Module = torch.nn.Module


class Activated(NamedTuple):
    """A linear layer and the activation of its output, children of `parent` by name."""

    parent: Module
    layer: str
    activation: str
    function: str

    def __str__(self) -> str:
        return f"computes the {self.function} of {self.activation}"


class _Run:
    """One run of a forward: the layers that compute activations in it, each with its function, and
    the last output of one, until its activation reads it.
    """

    def __init__(self, layers: list[tuple[Module, str]]) -> None:
        self.layers = layers
        self.output: Tensor | None = None
        self.unread = 0


class _Thread(threading.local):
    def __init__(self) -> None:
        self.run: _Run | None = None


_thread = _Thread()


def apply(pairs: list[Activated]) -> None:
    """Lets layers compute the activations after them. The layers are an `outblas.Linear`."""
    for parent in {id(pair.parent): pair.parent for pair in pairs}.values():
        of_parent = [pair for pair in pairs if pair.parent is parent]
        replaced.replace(parent, _forward, tuple(pair[1:] for pair in of_parent))
    for pair in pairs:
        children: dict[str, Any] = pair.parent._modules
        vars(children[pair.layer])["_is_followed"] = True
        replaced.replace(children[pair.activation], _activation_forward)


def pairs_of(parent: Any) -> list[tuple[Module, str]]:
    """Returns the layers of a module that compute the activations after them, each with its
    function.
    """
    (pairs,) = replaced.arguments(parent, _forward) or ((),)
    return [(parent._modules[layer], function) for layer, _, function in pairs]


def _forward(
    parent: Any, pairs: tuple[tuple[str, str, str], ...], *args: Any, **kwargs: Any
) -> Any:
    """Computes a module whose layers compute the activations after them."""
    layers = [
        (parent._modules[layer], function)
        for layer, activation, function in pairs
        if _is_pair(parent._modules, layer, activation, function)
    ]
    if not layers:
        return replaced.compute(parent, *args, **kwargs)
    run, outer = _Run(layers), _thread.run
    _thread.run = run
    try:
        result = replaced.compute(parent, *args, **kwargs)
    finally:
        _thread.run = outer
    if run.unread:  # something new is between a layer and its activation
        result = replaced.compute(parent, *args, **kwargs)
    return result


def _is_pair(children: Any, layer: str, activation: str, function: str) -> bool:
    """Returns whether a layer and an activation are as `patch` left them."""
    first, second = children.get(layer), children.get(activation)
    return (
        first is not None
        and second is not None
        and vars(first).get("_is_followed") is True
        and first.activation is None
        and "forward" not in vars(first)
        and not has_hooks(first)
        and replaced.arguments(second, _activation_forward) is not None
        and function_of(second) == function
    )


def run_of(layer: Module) -> tuple[_Run | None, Any]:
    """Returns the run in which a layer computes an activation, and which; None outside of one."""
    run = _thread.run
    if run is not None:
        for other, function in run.layers:
            if other is layer:
                return run, function
    return None, None


def computed(run: _Run, output: Tensor) -> Tensor:
    """Notes what a layer computed with its activation."""
    run.output = output
    run.unread += 1
    return output


def _activation_forward(activation: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes an activation, unless the layer before did."""
    run = _thread.run
    if run is None or not args or run.output is not args[0]:
        return replaced.compute(activation, *args, **kwargs)
    run.output = None
    run.unread -= 1
    return args[0]

"""Models that are changed after `patch(model, fuse=True)`, or around what it fused, compute what
unfused ones compute after the same change, and so do their gradients.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.saved import saved_and_loaded
from torch import nn
from torch.utils.checkpoint import checkpoint

from outblas import patch, unpatch
from outblas.patching import activated, gated

pytestmark = pytest.mark.filterwarnings("ignore")

Tensor = torch.Tensor
Module = nn.Module
X = torch.randn(5, 8)


class Wrapper(Module):
    """Something around a module that adds to what it computes, as LoRA of peft."""

    def __init__(self, base_layer: Module, inputs: int = 8, outputs: int = 8) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.a, self.b = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.b(self.a(x))


class Converted(nn.Linear):
    """A layer in the place of another, as those of torchao's float8 training."""

    @classmethod
    def of(cls, layer: nn.Linear) -> nn.Linear:
        new = cls(layer.in_features, layer.out_features, layer.bias is not None)
        new.weight, new.bias = layer.weight, layer.bias
        return new

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Mlp(Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Pair(Module):
    """A layer and its activation, and a switch that puts something between."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.act, self.is_scaled = nn.Linear(8, 8), nn.GELU(), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate(x)
        return self.act(y * 3 if self.is_scaled else y)


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.ReLU(), Mlp(), Pair())


# ---- changes
def assigned(at: int, make: Callable[[], Module]) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        model[at] = make()
        return model

    return change


def set_child(at: int, name: str, make: Callable[[Any], Module]) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        setattr(model[at], name, make(getattr(model[at], name)))
        return model

    return change


def deleted(model: Any) -> Any:
    del model[1]
    return model


def hooked(*path: Any) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        module = model
        for at in path:
            module = getattr(module, at) if isinstance(at, str) else module[at]
        module.register_forward_hook(lambda module, given, y: 2 * y)
        return model

    return change


def wrapped(at: int) -> Callable[[Any], Any]:
    """As accelerate hooks a module: a forward of the instance calls the old one."""

    def change(model: Any) -> Any:
        old = model[at].forward
        model[at].forward = lambda x: 2 * old(x)
        return model

    return change


def rebuilt(model: Any) -> Any:
    """Something between, in the order in which children are called."""
    model._modules = {"0": model[0], "between": nn.Tanh()} | model._modules
    return model


def scaled(model: Any) -> Any:
    model[5].is_scaled = True
    return model


def replica(model: Any) -> Any:
    """As `nn.DataParallel` makes it, with other tensors than those of the model."""
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, copied in replicas.items():
        for name, child in module._modules.items():
            setattr(copied, name, replicas[child])
            copied._modules[name] = replicas[child]
        for name, p in module._parameters.items():
            setattr(copied, name, (3 * p).detach().requires_grad_())
    return replicas[model]


def checkpointed(model: Any) -> Any:
    class Checkpointed(Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(model, x, use_reentrant=False)
            return y

    return Checkpointed()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: model,
    "another layer": assigned(0, lambda: nn.Linear(8, 8)),
    "another activation": assigned(1, nn.Tanh),
    "an activation inserted": lambda model: model.insert(1, nn.Tanh()),
    "something between, in order": rebuilt,
    "something between, by a switch": scaled,
    "an activation deleted": deleted,
    "a layer appended": lambda model: model.append(nn.Linear(8, 8)),
    "a layer by itself": lambda model: model[0],
    "a container of children": lambda model: nn.Sequential(*list(model.children())[:-3]),
    "another order": lambda model: nn.Sequential(model[0], model[2], model[1], model[3]),
    "a hooked layer": hooked(0),
    "a hooked activation": hooked(1),
    "a hooked up": hooked(4, "up"),
    "a hooked activation of an MLP": hooked(4, "act"),
    "a wrapped forward of a layer": wrapped(0),
    "a wrapped forward of an activation": wrapped(1),
    "a wrapped forward of an MLP": wrapped(4),
    "LoRA around a layer": lambda model: assigned(0, lambda: Wrapper(model[0]))(model),
    "LoRA around gate": set_child(4, "gate", Wrapper),
    "LoRA around an MLP": lambda model: assigned(4, lambda: Wrapper(model[4]))(model),
    "a converted layer": lambda model: assigned(0, lambda: Converted.of(model[0]))(model),
    "a converted up": set_child(4, "up", Converted.of),
    "another activation of an MLP": set_child(4, "act", lambda _: nn.Tanh()),
    "weights that are normalized": lambda model: (
        nn.utils.parametrizations.weight_norm(model[0]) and model
    ),
    "a copy": copy.deepcopy,
    "saved and loaded": saved_and_loaded,
    "moved": lambda model: model.double().float(),
    "a replica": replica,
    "checkpointed": checkpointed,
    "traced": torch.fx.symbolic_trace,
    "a jit trace": lambda model: torch.jit.trace(model, X),
    "scripted": torch.jit.script,
    "compiled": lambda model: torch.compile(model, backend="aot_eager"),
}


def results(model: Any) -> list[Tensor]:
    """What a model computes, and the gradients of its input and its parameters."""
    x = X.clone().requires_grad_()
    parameters = [p for p in model.parameters() if p.requires_grad]
    y = model(x)
    y = torch.cat([y, y])  # not a parameter itself
    return [y, *torch.autograd.grad(y.square().sum(), [x, *parameters], allow_unused=True)]


def compare(model: Any, plain: Any) -> None:
    for got, expected in zip(results(model), results(plain), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that compute a layer with its activation, or gate and up."""
    calls: list[Any] = []
    for module, name in ((activated, "computed"), (gated, "linear")):
        function = getattr(module, name)

        def recording(*given: Any, function: Any = function, **named: Any) -> Any:
            calls.append(function)
            return function(*given, **named)

        monkeypatch.setattr(module, name, recording)
    return calls


def changed(name: str, model: Any) -> Any:
    torch.manual_seed(1)
    return CHANGES[name](model)


# What has no modules of the model, or other ones.
PROGRAMS = "traced", "a jit trace", "scripted", "compiled", "checkpointed"


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_computes_what_an_unfused_one_does(
    name: str, fused_calls: list[Any]
) -> None:
    model, plain = net(), net()
    assert len(patch(model, fuse=True).fused) == 4
    compare(model, plain)
    assert len(fused_calls) == 4

    model, plain = changed(name, model), changed(name, plain)

    compare(model, plain)
    if name in PROGRAMS:
        return
    unpatch(model)
    for module, other in zip(model.modules(), plain.modules(), strict=True):
        assert vars(module).keys() == vars(other).keys()
        assert [kind.__qualname__ for kind in type(module).__mro__] == [
            kind.__qualname__ for kind in type(other).__mro__
        ]
    fused_calls.clear()
    compare(model, plain)
    assert fused_calls == []


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - set(PROGRAMS)))
def test_a_model_that_is_patched_after_the_change(name: str) -> None:
    model, plain = changed(name, net()), changed(name, net())

    patch(model, fuse=True)

    compare(model, plain)


def test_copies_replicas_and_moved_models_stay_fused(fused_calls: list[Any]) -> None:
    model = net()
    patch(model, fuse=True)
    counts = {}
    for name in ("nothing", "a layer appended", "a copy", "moved", "a replica"):
        other = CHANGES[name](copy.deepcopy(model) if name == "a copy" else model)
        fused_calls.clear()
        other(X)
        counts[name] = len(fused_calls)

    # A copy's weights are apart, and those of a replica are no parameters.
    assert counts == {
        "nothing": 4,
        "a layer appended": 4,
        "a copy": 3,
        "moved": 4,
        "a replica": 0,
    }


def test_a_class_whose_forward_is_replaced_computes_by_that(
    monkeypatch: pytest.MonkeyPatch, fused_calls: list[Any]
) -> None:
    model = net()
    patch(model, fuse=True)

    monkeypatch.setattr(Pair, "forward", lambda self, x: self.gate(x))
    monkeypatch.setattr(Mlp, "forward", lambda self, x: self.gate(x))

    linear = nn.functional.linear
    torch.testing.assert_close(model[5](X), linear(X, model[5].gate.weight, model[5].gate.bias))
    torch.testing.assert_close(model[4](X), linear(X, model[4].gate.weight, model[4].gate.bias))
    assert fused_calls == []


def test_threads_do_not_see_each_others_runs() -> None:
    """A layer that is called in another thread while its parent runs computes by itself."""
    model = net()
    plain = nn.functional.linear(X, model[0].weight, model[0].bias)
    patch(model, fuse=True)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        seen: list[Tensor] = []
        model[2].register_forward_pre_hook(
            lambda *_: seen.append(pool.submit(model[0], X).result())
        )
        model(X)

    torch.testing.assert_close(seen, [plain])

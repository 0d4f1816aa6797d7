"""`unpatch`: it leaves nothing of ours behind, whatever was done to the model meanwhile."""

import copy
import io
from typing import Any

import pytest
import torch
from support.layers import Net, X, names_of_ours, unwrap_forward, wrap_forward
from torch import nn

import outblas
from outblas import Linear, patch, unpatch
from outblas.core.epilogue import Activation

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor


@pytest.fixture
def our_calls(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The activations of the calls of `outblas.linear` that layers make."""
    activations: list[str | None] = []

    def linear(
        x: Tensor, w: Tensor, bias: Tensor | None = None, *, activation: Activation | None = None
    ) -> Tensor:
        activations.append(activation)
        return outblas.linear(x, w, bias, activation=activation)

    monkeypatch.setattr("outblas.nn.linear", linear)
    return activations


# ---- models
def test_unpatch_restores_the_classes_and_the_results() -> None:
    net = Net()
    layer, want = net.up, net(X)
    patch(net)

    report = unpatch(net)

    assert report.swapped == ("up", "down", "back")
    assert type(layer) is nn.Linear
    assert torch.equal(net(X), want)


def test_unpatch_leaves_nothing_behind() -> None:
    net = Net()
    net.up.register_forward_hook(lambda module, given, y: y)

    def traits() -> list[Any]:
        return [(type(m), dict(vars(m)), list(m._forward_hooks)) for m in net.modules()]

    before = traits()

    for _ in range(2):
        patch(net)
        patch(net)
        unpatch(net)
        assert traits() == before


def test_unpatching_again_does_nothing() -> None:
    net = Net()
    patch(net)
    unpatch(net)

    assert unpatch(net) == outblas.nn.Report(restored=True)


def test_a_layer_made_as_ours_becomes_torchs() -> None:
    layer = Linear(8, 6)

    unpatch(layer)

    assert type(layer) is nn.Linear
    assert vars(layer).keys() == vars(nn.Linear(8, 6)).keys()


def test_a_layer_made_as_ours_can_be_patched_again() -> None:
    layer = Linear(8, 6)
    unpatch(layer)

    assert patch(layer).swapped == ("(root)",)


def test_an_unpatched_model_is_saved_as_torchs() -> None:
    net = Net()
    patch(net)
    wrap_forward(net.up, lambda y: y)
    unpatch(net)
    unwrap_forward(net.up)
    file = io.BytesIO()

    torch.save(net, file)

    assert b"outblas" not in file.getvalue()


# ---- layers that are kept
class Mine(Linear):
    """A subclass of ours, made by a user."""


KEPT = {
    "subclass": (lambda: Mine(8, 8), "is a Mine, a subclass of outblas.Linear"),
    "activation": (
        lambda: Linear(8, 8, activation="gelu"),
        "has the activation 'gelu', which torch.nn.Linear does not have",
    ),
    "parametrized with an activation": (
        lambda: nn.utils.parametrizations.weight_norm(Linear(8, 8, activation="gelu")),
        "has the activation 'gelu', which torch.nn.Linear does not have",
    ),
    "parametrized subclass": (
        lambda: nn.utils.parametrizations.weight_norm(Mine(8, 8)),
        "is a ParametrizedMine, a subclass of outblas.Linear",
    ),
}


@pytest.mark.parametrize(("make", "reason"), KEPT.values(), ids=KEPT)
def test_unpatch_keeps_what_it_cannot_restore_and_says_so(make: Any, reason: str) -> None:
    layer = make()

    report = unpatch(layer)

    assert report.kept == {"(root)": reason}
    assert isinstance(layer, Linear)


# ---- wrappers of forward
def test_unpatch_reaches_a_forward_wrapped_after_patch(our_calls: list[str | None]) -> None:
    net: Any = Net()
    patch(net)
    wrap_forward(net.up, lambda y: 2 * y)
    want = net.up(X)
    our_calls.clear()

    unpatch(net)

    assert torch.equal(net.up(X), want)
    assert our_calls == []
    assert net.up._old_forward.__func__ is nn.Linear.forward
    assert net.up.forward.__wrapped__.__func__ is nn.Linear.forward


def test_a_wrapper_taken_off_after_unpatch_leaves_torchs_forward(
    our_calls: list[str | None],
) -> None:
    layer = nn.Linear(8, 6)
    want = layer(X)
    patch(layer)
    wrap_forward(layer, lambda y: 2 * y)

    unpatch(layer)
    unwrap_forward(layer)

    assert torch.equal(layer(X), want)
    assert our_calls == []


def test_a_wrapper_that_holds_our_forward_out_of_reach_calls_torchs_after_unpatch(
    our_calls: list[str | None],
) -> None:
    layer = nn.Linear(8, 6)
    patch(layer)
    ours = layer.forward
    layer.forward = lambda x: 2 * ours(x)  # type: ignore[method-assign, assignment]
    want = layer(X)
    our_calls.clear()

    unpatch(layer)

    assert torch.equal(layer(X), want)
    assert our_calls == []


def test_torchs_own_forward_with_the_instance_is_no_replacement(
    our_calls: list[str | None],
) -> None:
    layer: Any = nn.Linear(8, 6)
    wrap_forward(layer, lambda y: y)
    unwrap_forward(layer)

    assert patch(layer).swapped == ("(root)",)
    layer(X)
    assert our_calls == [None]


def test_unpatch_restores_torchs_own_forward_with_the_instance() -> None:
    layer: Any = nn.Linear(8, 6)
    wrap_forward(layer, lambda y: y)
    unwrap_forward(layer)
    patch(layer)

    unpatch(layer)

    assert layer.forward.__func__ is nn.Linear.forward


# ---- layers that are parametrized after patch
@pytest.fixture
def parametrized() -> Net:
    """A patched model, of which two layers are parametrized afterwards."""
    net = Net()
    patch(net)
    nn.utils.parametrizations.weight_norm(net.up)
    nn.utils.parametrizations.spectral_norm(net.down)
    return net.eval()


def test_patch_counts_parametrized_layers_of_ours_as_swapped(parametrized: Net) -> None:
    assert patch(parametrized).swapped == ("up", "down", "back")


def test_unpatch_restores_a_layer_parametrized_after_patch(
    parametrized: Net, our_calls: list[str | None]
) -> None:
    want = parametrized(X)
    our_calls.clear()

    report = unpatch(parametrized)

    assert report == outblas.nn.Report(("up", "down", "back"), restored=True)
    assert names_of_ours(parametrized) == []
    assert torch.equal(parametrized(X), want)
    assert our_calls == []


def test_a_copy_of_an_unpatched_parametrized_model_is_torchs(
    parametrized: Net, our_calls: list[str | None]
) -> None:
    unpatch(parametrized)

    twin = copy.deepcopy(parametrized)

    assert torch.equal(twin(X), parametrized(X))
    assert our_calls == []


def test_unpatch_leaves_a_copy_of_the_model_as_it_is(parametrized: Net) -> None:
    twin = copy.deepcopy(parametrized)

    unpatch(parametrized)

    assert names_of_ours(twin) == ["up", "down", "back"]


def test_a_parametrization_taken_off_after_unpatch_leaves_torchs(parametrized: Net) -> None:
    want = parametrized(X)
    unpatch(parametrized)

    nn.utils.parametrize.remove_parametrizations(parametrized.up, "weight")

    assert type(parametrized.up) is nn.Linear
    assert torch.equal(parametrized(X), want)


def test_a_parametrization_taken_off_before_unpatch_leaves_ours() -> None:
    layer = nn.Linear(8, 6)
    patch(layer)
    nn.utils.parametrizations.orthogonal(layer)

    nn.utils.parametrize.remove_parametrizations(layer, "weight")

    assert type(layer) is Linear
    unpatch(layer)
    assert type(layer) is nn.Linear


class Counted(nn.Module):
    """A parametrization that counts its calls and changes nothing."""

    calls = 0

    def forward(self, w: Tensor) -> Tensor:
        self.calls += 1
        return w


def test_patch_and_unpatch_compute_no_parametrization() -> None:
    layer: Any = nn.Linear(8, 6)
    patch(layer)
    counted = Counted()
    nn.utils.parametrize.register_parametrization(layer, "weight", counted)
    counted.calls = 0

    remark = patch(layer).remarks["(root)"]
    unpatch(layer)

    assert remark.startswith("on cpu")
    assert counted.calls == 0

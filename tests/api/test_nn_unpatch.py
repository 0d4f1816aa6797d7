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


def test_unpatch_leaves_nothing_behind() -> None:
    net = Net()
    net.up.register_forward_hook(lambda module, given, y: y)
    expected = net(X)

    def traits() -> list[Any]:
        return [(type(m), dict(vars(m)), list(m._forward_hooks)) for m in net.modules()]

    before = traits()

    for _ in range(2):
        patch(net)
        patch(net)
        assert unpatch(net).swapped == ("up", "down", "back")
        assert traits() == before
        assert torch.equal(net(X), expected)
    assert unpatch(net) == outblas.nn.Report(restored=True)


def test_a_layer_made_as_ours_becomes_torchs_and_can_be_patched_again() -> None:
    layer = Linear(8, 6)

    unpatch(layer)

    assert type(layer) is nn.Linear
    assert vars(layer).keys() == vars(nn.Linear(8, 6)).keys()
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


WITH_GELU = "has the activation 'gelu', which torch.nn.Linear does not have"
KEPT = {
    "subclass": (lambda: Mine(8, 8), "is a Mine, a subclass of outblas.Linear"),
    "activation": (lambda: Linear(8, 8, activation="gelu"), WITH_GELU),
    "parametrized with an activation": (
        lambda: nn.utils.parametrizations.weight_norm(Linear(8, 8, activation="gelu")),
        WITH_GELU,
    ),
    "parametrized subclass": (
        lambda: nn.utils.parametrizations.weight_norm(Mine(8, 8)),
        "is a ParametrizedMine, a subclass of outblas.Linear",
    ),
}


@pytest.mark.parametrize(("make", "reason"), KEPT.values(), ids=KEPT)
def test_unpatch_keeps_what_it_cannot_restore_and_says_so(make: Any, reason: str) -> None:
    layer = make()

    assert unpatch(layer).kept == {"(root)": reason}
    assert isinstance(layer, Linear)


# ---- wrappers of forward
def test_unpatch_reaches_a_forward_wrapped_after_patch(our_calls: list[str | None]) -> None:
    net: Any = Net()
    plain = net.up(X)
    patch(net)
    wrap_forward(net.up, lambda y: 2 * y)

    unpatch(net)

    assert torch.equal(net.up(X), 2 * plain)
    assert our_calls == []
    assert net.up._old_forward.__func__ is nn.Linear.forward
    assert net.up.forward.__wrapped__.__func__ is nn.Linear.forward
    unwrap_forward(net.up)
    assert torch.equal(net.up(X), plain)


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
    unpatch(layer)
    assert layer.forward.__func__ is nn.Linear.forward


# ---- layers that are parametrized after patch
def test_unpatch_restores_layers_parametrized_after_patch(our_calls: list[str | None]) -> None:
    net = Net()
    patch(net)
    nn.utils.parametrizations.weight_norm(net.up)
    nn.utils.parametrizations.spectral_norm(net.down)
    net.eval()
    want, twin = net(X), copy.deepcopy(net)
    assert patch(net).swapped == ("up", "down", "back")
    our_calls.clear()

    report = unpatch(net)

    assert report == outblas.nn.Report(("up", "down", "back"), restored=True)
    assert names_of_ours(net) == []
    assert names_of_ours(twin) == ["up", "down", "back"]
    assert torch.equal(net(X), want)
    assert torch.equal(copy.deepcopy(net)(X), want)
    nn.utils.parametrize.remove_parametrizations(net.up, "weight")
    assert type(net.up) is nn.Linear
    assert torch.equal(net(X), want)
    assert our_calls == []


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

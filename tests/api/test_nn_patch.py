"""`patch` and `unpatch` of linear layers: which they take, what they leave as it was, and what they
report.
"""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.saved import saved_and_loaded
from torch import nn

import outblas
from outblas import Linear, patch, unpatch
from outblas.call import hooks
from outblas.call.epilogue import Activation
from outblas.call.problem import dtype_name
from outblas.nn import Report

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor
X = torch.randn(3, 8)
Make = Callable[[], nn.Module]


class Net(nn.Module):
    """Three linear layers: one is called twice and has two names, two share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.tied = self.up
        self.back = nn.Linear(16, 8)
        self.back.weight = self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.back(torch.relu(self.up(self.down(torch.relu(self.tied(x))))))


def names_of_ours(model: nn.Module) -> list[str]:
    """The names of modules of a model that have a class of ours."""
    return [name for name, module in model.named_modules() if isinstance(module, Linear)]


# ---- what is swapped
def test_patch_keeps_objects_parameters_hooks_and_results() -> None:
    net, outputs = Net(), []
    layer, parameters, names = net.up, list(net.parameters()), net.state_dict().keys()
    expected = net(X)
    net.up.register_forward_hook(lambda module, given, y: outputs.append(y))

    report = patch(net)

    assert report.swapped == ("up", "down", "back")
    assert names_of_ours(net) == ["up", "down", "back"]
    assert patch(net) == report
    assert net.up is layer
    assert net.tied is layer
    assert [id(p) for p in net.parameters()] == [id(p) for p in parameters]
    assert net.back.weight is net.down.weight
    assert net.state_dict().keys() == names
    torch.testing.assert_close(net(X), expected)
    assert len(outputs) == 2  # the layer is called under both of its names


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(8, 8),
        lambda: nn.Linear(8, 8, device="meta"),
        lambda: Linear(8, 8, activation="gelu"),
    ],
)
def test_a_model_that_is_a_layer_is_swapped(make: Callable[[], nn.Linear]) -> None:
    layer = make()

    assert patch(layer).swapped == ("(root)",)
    assert type(layer) is Linear


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_a_transformer_layer_stays_the_same(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).train(training)
    x = torch.randn(2, 5, 16)
    expected = layer(x)

    report = patch(layer)

    assert report.swapped == ("linear1", "linear2")
    assert "fast path (eval, no gradients) takes its weight past it" in report.remarks["linear1"]
    with torch.inference_mode(not training):
        torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded, nn.Module.share_memory])
def test_a_copy_of_a_patched_model_is_patched(copied: Callable[[nn.Module], nn.Module]) -> None:
    net = Net()
    patch(net)

    other = copied(net)

    assert type(other.up) is Linear
    torch.testing.assert_close(other(X), net(X))


# ---- what is not swapped, and why
class Lora(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Unusual(nn.Linear):
    """A subclass whose instances are made in a way of their own."""

    def __deepcopy__(self, memo: object) -> "Unusual":
        return self


class Quantized(torch.Tensor):
    """A subclass of tensors that knows functions of torch."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs)


def changed(name: str, value: Any) -> Make:
    """Makes a layer with another attribute: of a function, what it makes of the attribute."""

    def make() -> nn.Module:
        layer = nn.Linear(8, 6)
        new = value(getattr(layer, name).detach()) if callable(value) else value
        setattr(layer, name, new)
        return layer

    return make


def with_another_forward() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.forward = lambda x: x  # type: ignore[method-assign, assignment]
    return layer


def parameter_of(kind: type[Tensor]) -> Callable[[Tensor], nn.Parameter]:
    return lambda t: nn.Parameter(t.as_subclass(kind))


KEPT: dict[str, tuple[Make, str]] = {
    "subclass with a forward": (lambda: Lora(8, 8), "is a Lora"),
    "subclass that copies itself": (
        lambda: Unusual(8, 8),
        "no class can be derived from Unusual",
    ),
    "subclass of torch": (
        lambda: nn.modules.linear.NonDynamicallyQuantizableLinear(8, 8),
        "is a NonDynamicallyQuantizableLinear",
    ),
    "lazy": (lambda: nn.LazyLinear(8), "has no weight before its first call"),
    "parametrized": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        "its parameters are computed (parametrized)",
    ),
    "float64": (
        lambda: nn.Linear(8, 8, dtype=torch.float64),
        "has a weight of torch.float64, which no kernel takes",
    ),
    "another forward": (with_another_forward, "its forward was replaced"),
    "an attribute activation": (
        changed("activation", "gelu"),
        "has an attribute activation, which outblas.Linear would apply",
    ),
    "a weight of a subclass": (
        changed("weight", parameter_of(Quantized)),
        "its weight is a Quantized",
    ),
    "a bias of a subclass": (
        changed("bias", parameter_of(Quantized)),
        "its bias is a Quantized",
    ),
    "sparse": (
        changed("weight", lambda w: nn.Parameter(w.to_sparse_csr())),
        "its weight is torch.sparse_csr",
    ),
    "nested": (
        changed("weight", lambda w: nn.Parameter(torch.nested.nested_tensor([w]))),
        "its weight is nested",
    ),
    "quantized": (
        changed(
            "weight",
            lambda w: nn.Parameter(torch.quantize_per_tensor(w, 0.1, 0, torch.qint8), False),
        ),
        "has a weight of torch.qint8, which no kernel takes",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_not_swapped_says_why(name: str) -> None:
    make, reason = KEPT[name]
    layer = make()
    kind = type(layer)

    with pytest.warns(UserWarning, match="patch swapped nothing of this .*: report.kept says why"):
        report = patch(layer)

    assert report.kept == {"(root)": reason}
    assert type(layer) is kind


def test_a_model_without_linear_layers_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="nothing of this ReLU: it has no linear layers") as caught:
        patch(nn.ReLU())
    assert caught[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        patch(nn.ReLU(), dry_run=True)
        patch(Net())


# ---- subclasses that are swapped
class Named(nn.Linear):
    """A subclass with a constructor, methods and parameters of its own, and torch's forward."""

    def __init__(self, name: str) -> None:
        super().__init__(8, 8)
        self.name, self.scale = name, nn.Parameter(torch.ones(()))

    def extra_repr(self) -> str:
        return f"{self.name}, {super().extra_repr()}"


def loaded(layer: nn.Module) -> nn.Module:
    return copy.deepcopy(saved_and_loaded(layer))


@pytest.mark.parametrize("then", [lambda layer: layer, loaded], ids=["itself", "a copy"])
def test_a_subclass_with_torchs_forward_stays_what_it_is_and_is_swapped(
    then: Callable[[nn.Module], Any], our_calls: list[str | None]
) -> None:
    layer = Named("head")
    expected, shown, attributes = layer(X), repr(layer), dict(vars(layer))

    for _ in range(2):
        assert patch(layer, fuse=True).swapped == ("(root)",)
    other = then(layer)

    assert isinstance(other, Named)
    assert repr(other) == shown
    assert torch.equal(other(X), expected)
    assert our_calls == [None]
    assert unpatch(other).swapped == ("(root)",)
    assert type(other) is Named
    assert dict(vars(other)).keys() == attributes.keys()
    other(X)
    assert our_calls == [None]


def test_a_parameter_that_overrides_nothing_is_that_of_any_layer(
    our_calls: list[str | None],
) -> None:
    layer = nn.Linear(8, 8)
    layer.weight = type("Loaded", (nn.Parameter,), {})(layer.weight.detach())
    expected = layer(X)

    assert patch(layer).swapped == ("(root)",)
    assert torch.equal(layer(X), expected)
    assert our_calls == [None]


def test_a_filter_chooses_by_the_name() -> None:
    net = Net()

    report = patch(net, filter=lambda name, layer: name != "down")

    assert report.swapped == ("up", "back")
    assert report.kept == {"down": "the filter does not take it"}
    assert names_of_ours(net) == ["up", "back"]


def test_a_filter_that_raises_changes_nothing() -> None:
    net = Net()

    def refuse_the_last(name: str, layer: nn.Linear) -> bool:
        if name == "back":
            raise KeyError(name)
        return True

    with pytest.raises(KeyError):
        patch(net, filter=refuse_the_last)

    assert names_of_ours(net) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": {}}, r"model is dict, expected a torch\.nn\.Module"),
        ({"filter": "up"}, "filter is 'up', expected a function of a name and a layer, or None"),
        ({"dry_run": "yes"}, "dry_run is 'yes', expected True or False"),
        ({"fuse": 1}, "fuse is 1, expected True or False"),
    ],
)
def test_arguments_of_another_type_are_refused(options: dict[str, Any], message: str) -> None:
    net = Net()

    with pytest.raises(TypeError, match=message):
        patch(**{"model": net} | options)

    assert names_of_ours(net) == []


# ---- what is reported
def test_a_report_says_what_became_of_layers() -> None:
    net = Net()

    assert str(patch(net, dry_run=True)).startswith("3 would swap, 0 kept\nup    would swap")
    assert str(patch(net)).startswith("3 swapped, 0 kept\nup    swapped  on cpu: torch takes it")
    assert str(unpatch(net)).startswith("3 restored, 0 kept\nup    restored")
    with pytest.warns(UserWarning, match="swapped nothing"):
        shown = str(patch(nn.MultiheadAttention(8, 2)))
    assert shown.startswith("0 swapped, 1 kept, 1 unreached\n")
    assert "in_proj_weight  unreached  nn.MultiheadAttention multiplies by it" in shown
    experts = Report(experts={"moe": "4 experts"}, remarks={"moe": "on cpu"})
    assert str(experts) == (
        "0 swapped, 0 kept, 1 swapped with experts\nmoe  swapped  4 experts; on cpu"
    )


def test_equal_layers_have_one_row() -> None:
    blocks = [nn.ModuleDict({"q": nn.Linear(8, 8), "gate": nn.Linear(8, 8)}) for _ in range(12)]
    blocks[3]["q"] = nn.Linear(8, 8, dtype=torch.float64)
    net = nn.ModuleDict({"layers": nn.ModuleList(blocks), "head": nn.Linear(8, 8)})

    shown = str(patch(net)).splitlines()

    assert shown[0] == "24 swapped, 1 kept"
    assert [line.split("  ")[0].strip() for line in shown[1:5]] == [
        "layers.{0,1,2,4,5,6,7,8,9,10,11}.q (11)",
        "layers.{0..11}.gate (12)",
        "head",
        "layers.3.q",
    ]


@pytest.mark.gpu
def test_layers_on_a_gpu_gain_what_the_tuner_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def gains(device: torch.device, N: int, K: int, dtype: torch.dtype) -> dict[int, float]:
        return {16: 1.25} if (N, K, dtype_name(dtype)) == (24, 8, "bfloat16") else {}

    monkeypatch.setattr(hooks.tuner, "_loaded", Mock(measured_gains=gains))
    net = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8)).to("cuda", torch.bfloat16)

    assert outblas.patch(net).gains == {"0": {16: 1.25}}


# ---- products that are no linear layers
class Routed(nn.Module):
    """A module of a user's own that multiplies by what is no linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 8))
        self.experts = nn.Parameter(torch.zeros(4, 8, 8))
        self.scale = nn.Parameter(torch.zeros(4, 8))
        self.positions = nn.Parameter(torch.zeros(1, 16, 8))


def layer_of_gpt2() -> nn.Module:
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(8, 8)


def two_of_one_weight() -> nn.Module:
    one, other = nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2)
    other.in_proj_weight = one.in_proj_weight
    return nn.ModuleList([one, other])


OF_ATTENTION = "nn.MultiheadAttention multiplies by it: outblas.enable reaches it"
OF_A_USER = ": outblas.enable reaches its mm, bmm and linear"
UNREACHED: dict[str, tuple[Make, dict[str, str]]] = {
    "embeddings and convolutions": (
        lambda: nn.Sequential(nn.Embedding(4, 8), nn.Conv1d(8, 8, 3), nn.LayerNorm(8)),
        {},
    ),
    "attention": (lambda: nn.MultiheadAttention(8, 2), {"in_proj_weight": OF_ATTENTION}),
    "attention of other sizes": (
        lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4),
        dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), OF_ATTENTION),
    ),
    "a weight that two share": (two_of_one_weight, {"0.in_proj_weight": OF_ATTENTION}),
    "recurrent": (
        lambda: nn.Sequential(nn.GRU(4, 5)),
        dict.fromkeys(
            ("0.weight_ih_l0", "0.weight_hh_l0"), "it is inside of torch's kernel for nn.GRU"
        ),
    ),
    "own code": (
        Routed,
        {
            "weight": f"Routed multiplies by it{OF_A_USER}",
            "experts": f"Routed multiplies by 4 matrices{OF_A_USER}",
        },
    ),
    "GPT-2": (
        layer_of_gpt2,
        {"weight": "Conv1D of transformers calls torch.addmm: outblas.enable reaches it"},
    ),
}


@pytest.mark.parametrize("name", UNREACHED)
def test_a_report_names_products_that_are_no_linear_layers(name: str) -> None:
    make, expected = UNREACHED[name]

    assert patch(make()).unreached == expected


# ---- back
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
    monkeypatch.setattr("outblas.patching.linears.linear", linear)
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
    assert unpatch(net) == Report(restored=True)


class Mine(Linear):
    """A subclass of ours, made by a user."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Mine(8, 8), "is a Mine, a subclass of outblas.Linear"),
        (
            lambda: nn.utils.parametrizations.weight_norm(Linear(8, 8, activation="gelu")),
            "has the activation 'gelu', which torch.nn.Linear does not have",
        ),
        (
            lambda: nn.utils.parametrizations.weight_norm(Mine(8, 8)),
            "is a ParametrizedMine, a subclass of outblas.Linear",
        ),
    ],
)
def test_unpatch_keeps_what_it_cannot_restore_and_says_so(make: Make, reason: str) -> None:
    layer = make()

    assert unpatch(layer).kept == {"(root)": reason}
    assert isinstance(layer, Linear)


# ---- wrappers of forward
def wrap_forward(layer: Any, function: Callable[[Any], Any]) -> None:
    """Has a function change what a layer's forward returns, as accelerate's hooks do."""
    layer._old_forward = layer.forward
    wrapper = functools.partial(lambda module, *given: function(module._old_forward(*given)), layer)
    layer.forward = functools.update_wrapper(wrapper, layer._old_forward)


def unwrap_forward(layer: Any) -> None:
    """Takes the wrapper off, as accelerate does: the bound method stays with the instance."""
    layer.forward = layer._old_forward
    del layer._old_forward


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
    expected = layer(X)
    our_calls.clear()

    unpatch(layer)

    assert torch.equal(layer(X), expected)
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
class Counted(nn.Module):
    """A parametrization that counts its calls and changes nothing."""

    calls = 0

    def forward(self, w: Tensor) -> Tensor:
        self.calls += 1
        return w


def test_unpatch_restores_layers_parametrized_after_patch(our_calls: list[str | None]) -> None:
    net, counted = Net(), Counted()
    patch(net)
    nn.utils.parametrizations.weight_norm(net.up)
    nn.utils.parametrizations.spectral_norm(net.down)
    nn.utils.parametrize.register_parametrization(net.back, "weight", counted)
    net.eval()
    expected, twin = net(X), copy.deepcopy(net)
    counted.calls = 0

    report = patch(net)
    assert report.swapped == ("up", "down", "back")
    assert report.remarks["back"].startswith("on cpu")
    our_calls.clear()
    assert unpatch(net) == Report(("up", "down", "back"), restored=True)

    assert counted.calls == 0, "neither computes a parametrization"
    assert names_of_ours(net) == []
    assert names_of_ours(twin) == ["up", "down", "back"]
    assert torch.equal(net(X), expected)
    assert torch.equal(copy.deepcopy(net)(X), expected)
    nn.utils.parametrize.remove_parametrizations(net.up, "weight")
    assert type(net.up) is nn.Linear
    assert torch.equal(net(X), expected)
    assert our_calls == []

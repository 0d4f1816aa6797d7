"""`outblas.Linear`, `patch` and `unpatch`: the same model, of another class."""

import copy
import functools
import inspect
import io
from typing import Any

import pytest
import torch
from torch import nn

import outblas
from outblas import Linear, patch, unpatch
from outblas.core.epilogue import apply

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
X = torch.randn(3, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.tied = self.up
        self.back = nn.Linear(16, 8)
        self.back.weight = self.down.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(torch.relu(self.up(self.down(torch.relu(self.tied(x))))))


def test_a_linear_layer() -> None:
    for activation, bias in ((None, True), ("gelu", False), ("swiglu", True)):
        layer, torchs = Linear(8, 6, bias, activation=activation), nn.Linear(8, 6, bias)
        torchs.load_state_dict(layer.state_dict())
        torch.testing.assert_close(layer(X), apply(torchs(X), activation or "", None))
        assert (f"bias={bias}, activation={activation!r})" in repr(layer)) == (
            activation is not None
        )


def test_only_the_class_changes() -> None:
    net = Net()
    held, want, state = net.up, net(X), {k: v.clone() for k, v in net.state_dict().items()}
    parameters = [id(p) for p in net.parameters()]
    seen = []
    net.up.register_forward_hook(lambda module, given, y: seen.append(y))
    step = torch.optim.SGD(net.parameters(), lr=0.1)
    report = patch(net)
    assert report.swapped == ("up", "down", "back")
    assert patch(net) == report
    assert (type(held), held, net.tied) == (Linear, net.up, net.up)
    assert [id(p) for p in net.parameters()] == parameters
    assert net.back.weight is net.down.weight
    assert net.state_dict().keys() == state.keys()
    torch.testing.assert_close(net(X), want)
    assert len(seen) == 2
    net(X).sum().backward()
    step.step()
    assert not torch.equal(net(X), want)
    net.load_state_dict(state)
    assert unpatch(net).swapped == ("up", "down", "back")
    assert type(held) is nn.Linear
    assert torch.equal(net(X), want)


def test_an_optimizer_goes_on() -> None:
    torch.manual_seed(0)
    nets = [Net(), Net()]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
    for i in range(10):
        if i == 5:
            patch(nets[1])
        losses = []
        for net, optimizer in zip(nets, optimizers, strict=True):
            loss = (net(X) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        torch.testing.assert_close(losses[0], losses[1])


def test_a_transformer_layer_stays_the_same() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    x = torch.randn(2, 5, 16)
    want = layer(x)
    assert patch(layer).swapped == ("linear1", "linear2")
    torch.testing.assert_close(layer(x), want)
    layer.eval()
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), want)


def test_copies_files_and_compilers_keep_it() -> None:
    torch._dynamo.reset()
    net = Net()
    patch(net)
    want = net(X)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), torch.load(file, weights_only=False), net.share_memory()):
        assert type(other.up) is Linear
        torch.testing.assert_close(other(X), want)
    torch.testing.assert_close(torch.compile(net, backend="aot_eager", fullgraph=True)(X), want)
    assert net.double()(X.double()).dtype == torch.float64


def test_what_is_not_swapped_says_why() -> None:
    class Lora(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "plain": nn.Linear(8, 8),
            "attention": nn.MultiheadAttention(8, 2),
            "lazy": nn.LazyLinear(8),
            "lora": Lora(8, 8),
            "parametrized": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
            "wide": nn.Linear(8, 8, dtype=torch.float64),
            "replaced": nn.Linear(8, 8),
            "meta": nn.Linear(8, 8, device="meta"),
            "ours": Linear(8, 8, activation="gelu"),
        }
    )
    model["replaced"].forward = lambda x: x
    report = patch(model)
    assert report.swapped == ("plain", "meta", "ours")
    assert report.kept == {
        "attention.out_proj": "is a NonDynamicallyQuantizableLinear",
        "lazy": "has no weight before its first call",
        "lora": "is a Lora",
        "parametrized": "its parameters are computed (parametrized)",
        "wide": "has a weight of torch.float64, which no kernel takes",
        "replaced": "its forward was replaced",
    }
    assert report.remarks["plain"] == "on cpu: torch takes it until it moves to an NVIDIA GPU"
    assert str(report).splitlines()[:2] == [
        "3 swapped, 6 kept",
        f"{'plain':18}  swapped  on cpu: torch takes it until it moves to an NVIDIA GPU",
    ]
    assert unpatch(model).kept == {
        "ours": "has the activation 'gelu', which torch.nn.Linear has not"
    }
    assert type(model["plain"]) is nn.Linear
    root = nn.Linear(8, 8)
    assert patch(root).swapped == ("(root)",)
    assert type(root) is Linear
    with pytest.raises(
        ValueError, match="activation is 'tanh', expected None or one of relu, gelu"
    ):
        Linear(8, 6, activation="tanh")
    with pytest.raises(
        ValueError, match="out_features is 7, expected an even number for activation 'geglu'"
    ):
        Linear(8, 7, activation="geglu")
    with pytest.raises(TypeError, match=r"model is dict, expected a torch\.nn\.Module"):
        patch({})


@pytest.fixture
def by_ours(monkeypatch: pytest.MonkeyPatch):
    """Activations of the calls of `outblas.linear` that layers make."""
    calls = []

    def linear(x, w, bias=None, *, activation=None):
        calls.append(activation)
        return outblas.linear(x, w, bias, activation=activation)

    monkeypatch.setattr("outblas.nn.linear", linear)
    return calls


class Quantized(torch.Tensor):
    """A weight as torchao's: torch.nn.functional.linear takes it, and little else does."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            return func(*(t.as_subclass(torch.Tensor) for t in args))
        if func in (torch.Tensor.t, torch.matmul, torch.Tensor.dim):
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def quantized(layer, name="weight"):
    """Gives a layer a parameter of that type."""
    setattr(
        layer,
        name,
        nn.Parameter(getattr(layer, name).detach().as_subclass(Quantized), requires_grad=False),
    )
    return layer


def bound(layer, function):
    """A wrapper of a layer's forward, as accelerate's hooks are."""
    layer._old_forward = layer.forward
    wrapper = functools.partial(lambda module, *given: function(module._old_forward(*given)), layer)
    layer.forward = functools.update_wrapper(wrapper, layer._old_forward)
    return layer


def unbound(layer) -> None:
    """Takes the wrapper off, as accelerate does: the bound method stays with the instance."""
    layer.forward = layer._old_forward
    del layer._old_forward


def leftovers(model):
    """Modules of a model with a class of ours."""
    return [name for name, module in model.named_modules() if Linear in type(module).__mro__]


def test_its_arguments_are_torchs_and_an_activation() -> None:
    ours, torchs = (
        list(inspect.signature(kind).parameters.values()) for kind in (Linear, nn.Linear)
    )
    assert [(p.name, p.kind, p.default) for p in ours[:-1]] == [
        (p.name, p.kind, p.default) for p in torchs
    ]
    assert ours[-1].name == "activation"
    assert Linear(8, 6, False, "meta", torch.bfloat16).weight.is_meta


def test_skip_init_makes_one() -> None:
    assert (
        nn.utils.skip_init(Linear, 8, 6, activation="gelu", dtype=torch.float64).weight.dtype
        is torch.float64
    )


@pytest.mark.parametrize(
    ("name", "make", "why"),
    [
        (
            "weight",
            lambda w: nn.Parameter(w.as_subclass(Quantized)),
            "is a Quantized, which torch takes",
        ),
        (
            "bias",
            lambda w: nn.Parameter(w.as_subclass(Quantized)),
            "is a Quantized, which torch takes",
        ),
        ("weight", lambda w: type("Mine", (nn.Parameter,), {})(w), "is a Mine, which torch takes"),
        (
            "weight",
            lambda w: nn.Parameter(w.to_sparse_csr()),
            "is torch.sparse_csr, which torch takes",
        ),
        (
            "weight",
            lambda w: nn.Parameter(torch.nested.nested_tensor([w])),
            "is nested, which torch takes",
        ),
    ],
)
def test_a_weight_that_torch_takes_is_not_swapped(name: str, make, why: str) -> None:
    layer = nn.Linear(8, 6)
    setattr(layer, name, make(getattr(layer, name).detach()))
    assert patch(layer).kept == {"(root)": f"its {name} {why}"}
    assert type(layer) is nn.Linear


def test_a_quantized_weight_is_not_swapped() -> None:
    layer = nn.Linear(8, 6)
    layer.weight = nn.Parameter(
        torch.quantize_per_tensor(layer.weight.detach(), 0.1, 0, torch.qint8), False
    )
    assert patch(layer).kept == {"(root)": "has a weight of torch.qint8, which no kernel takes"}


def test_an_attribute_that_would_become_the_activation_is_not_taken_for_one() -> None:
    layer: Any = nn.Linear(8, 6)
    layer.activation = "gelu"
    want = layer(X)
    assert patch(layer).kept == {
        "(root)": "has an attribute activation, which outblas.Linear would apply"
    }
    assert torch.equal(layer(X), want)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_a_weight_quantized_afterwards_goes_to_torch_whole(
    name: str, activation: str | None
) -> None:
    layer = Linear(8, 6, activation=activation)
    want = layer(X)
    assert torch.equal(quantized(layer, name)(X), want)


def test_patch_says_of_a_weight_quantized_afterwards_who_takes_it() -> None:
    layer = nn.Linear(8, 6)
    patch(layer)
    assert patch(quantized(layer)).remarks == {
        "(root)": "its weight is a Quantized, which torch takes"
    }


def test_a_quantized_weight_is_a_fallback_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = quantized(Linear(8, 6))
    with pytest.warns(outblas.FallbackWarning, match="tensor subclass Quantized"):
        layer(X)
    with outblas.batch_invariant(), pytest.raises(ValueError, match="tensor subclass Quantized"):
        layer(X)
    monkeypatch.setenv("OUTBLAS_STRICT", "1")
    with pytest.raises(RuntimeError, match="tensor subclass Quantized"):
        layer(X)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_input_goes_to_torch_whole(layout: str) -> None:
    layer = nn.Linear(8, 6)
    x = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(5, 8)], layout=layout)
    want = layer(x).unbind()
    patch(layer)
    for got, expected in zip(layer(x).unbind(), want, strict=True):
        assert torch.equal(got, expected)


def test_what_is_no_tensor_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"is list, expected a torch\.Tensor"):
        Linear(8, 6)([1.0])


def test_a_transformers_fast_path_is_remarked() -> None:
    def remarks(**how):
        return patch(nn.TransformerEncoderLayer(8, 2, 16, **how)).remarks["linear1"]

    assert "fast path (eval, no gradients) takes its weight past it" in remarks(batch_first=True)
    assert "fast path" not in remarks(batch_first=False)
    assert "fast path" not in remarks(batch_first=True, activation=torch.tanh)


def test_unpatch_leaves_nothing_behind() -> None:
    net = Net()
    net.up.register_forward_hook(lambda module, given, y: y)
    before = [(type(m), dict(vars(m)), list(m._forward_hooks)) for m in net.modules()]
    for _ in range(2):
        patch(net)
        patch(net)
        unpatch(net)
        assert unpatch(net) == outblas.nn.Report()
        assert [(type(m), dict(vars(m)), list(m._forward_hooks)) for m in net.modules()] == before


def test_a_layer_made_as_ours_goes_there_and_back() -> None:
    layer = Linear(8, 6)
    unpatch(layer)
    assert vars(layer).keys() == vars(nn.Linear(8, 6)).keys()
    assert patch(layer).swapped == ("(root)",)


def test_unpatch_reaches_a_forward_wrapped_after_patch(by_ours) -> None:
    net: Any = Net()
    patch(net)
    bound(net.up, lambda y: 2 * y)
    want = net.up(X)
    by_ours.clear()
    unpatch(net)
    assert torch.equal(net.up(X), want)
    assert by_ours == []
    assert net.up._old_forward.__func__ is net.up.forward.__wrapped__.__func__ is nn.Linear.forward


def test_a_wrapper_taken_off_after_unpatch_leaves_torchs_forward(by_ours) -> None:
    layer = nn.Linear(8, 6)
    want = layer(X)
    patch(layer)
    bound(layer, lambda y: 2 * y)
    unpatch(layer)
    unbound(layer)
    assert torch.equal(layer(X), want)
    assert by_ours == []


def test_a_wrapper_that_holds_our_forward_out_of_reach_calls_torchs_after_unpatch(by_ours) -> None:
    layer = nn.Linear(8, 6)
    patch(layer)
    ours = layer.forward
    layer.forward = lambda x: 2 * ours(x)  # type: ignore[method-assign, assignment]
    want = layer(X)
    by_ours.clear()
    unpatch(layer)
    assert torch.equal(layer(X), want)
    assert by_ours == []


def test_torchs_own_forward_with_the_instance_is_no_replacement(by_ours) -> None:
    layer: Any = nn.Linear(8, 6)
    unbound(bound(layer, lambda y: y))
    assert patch(layer).swapped == ("(root)",)
    layer(X)
    assert by_ours == [None]
    unpatch(layer)
    assert layer.forward.__func__ is nn.Linear.forward


def test_unpatch_restores_a_layer_parametrized_after_patch(by_ours) -> None:
    net = Net()
    patch(net)
    nn.utils.parametrizations.weight_norm(net.up)
    nn.utils.parametrizations.spectral_norm(net.down)
    twin = copy.deepcopy(net)
    net.eval()
    want = net(X)
    assert patch(net).swapped == ("up", "down", "back")
    by_ours.clear()
    assert unpatch(net) == outblas.nn.Report(("up", "down", "back"))
    assert leftovers(net) == []
    assert torch.equal(net(X), want)
    assert torch.equal(copy.deepcopy(net)(X), want)
    assert by_ours == []
    assert leftovers(twin) == ["up", "down", "back"]
    nn.utils.parametrize.remove_parametrizations(net.up, "weight")
    assert type(net.up) is nn.Linear
    assert torch.equal(net(X), want)


def test_patch_computes_no_parametrization() -> None:
    class Counted(nn.Module):
        calls = 0

        def forward(self, w):
            self.calls += 1
            return w

    layer: Any = nn.Linear(8, 6)
    patch(layer)
    nn.utils.parametrize.register_parametrization(layer, "weight", Counted())
    layer.parametrizations.weight[0].calls = 0
    assert patch(layer).remarks["(root)"].startswith("on cpu")
    unpatch(layer)
    assert layer.parametrizations.weight[0].calls == 0


def test_a_parametrization_taken_off_before_unpatch_leaves_ours() -> None:
    layer = nn.Linear(8, 6)
    patch(layer)
    nn.utils.parametrizations.orthogonal(layer)
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is Linear
    unpatch(layer)
    assert type(layer) is nn.Linear


def test_unpatch_keeps_what_it_cannot_restore_and_says_so() -> None:
    class Mine(Linear):
        pass

    model = nn.ModuleDict(
        {"mine": Mine(8, 8), "gelu": Linear(8, 8, activation="gelu"), "normed": Mine(8, 8)}
    )
    nn.utils.parametrizations.weight_norm(model["gelu"])
    nn.utils.parametrizations.weight_norm(model["normed"])
    report = unpatch(model)
    assert report.kept == {
        "mine": "is a Mine, a subclass of outblas.Linear",
        "gelu": "has the activation 'gelu', which torch.nn.Linear has not",
        "normed": "is a ParametrizedMine, a subclass of outblas.Linear",
    }
    assert leftovers(model) == list(report.kept)


def test_a_compiled_model_follows_patch_and_unpatch() -> None:
    torch._dynamo.reset()
    seen = []

    def backend(module, given):
        seen.append(
            any(node.target is torch.ops.outblas.gemm.default for node in module.graph.nodes)
        )
        return module

    net = Net()
    want = net(X)
    compiled = torch.compile(net, backend=backend)
    compiled(X)
    assert patch(compiled).swapped == ("_orig_mod.up", "_orig_mod.down", "_orig_mod.back")
    torch.testing.assert_close(compiled(X), want)
    assert seen == [False, True]
    unpatch(compiled)
    assert leftovers(compiled) == []
    assert torch.equal(compiled(X), want)


def test_an_unpatched_model_is_saved_as_torchs() -> None:
    net = Net()
    patch(net)
    bound(net.up, lambda y: y)
    unpatch(net)
    unbound(net.up)
    file = io.BytesIO()
    torch.save(net, file)
    assert b"outblas" not in file.getvalue()

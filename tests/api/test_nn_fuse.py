"""`patch(model, fuse=True)`: layers that compute the activation after them, and gated MLPs."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import outblas
from outblas import patch, unpatch
from outblas.patching import activated
from outblas.patching.halves import are_joined

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor
X = torch.randn(5, 8)


class Mlp(nn.Module):
    """A gated MLP with names of its own."""

    def __init__(self, activation: nn.Module | None = None, bias: bool = False) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(8, 16, bias), nn.Linear(8, 16, bias)
        self.w2 = nn.Linear(16, 8, bias)
        self.act = activation or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.w3(x) * self.act(self.w1(x)))


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


# ---- a layer and its activation
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
}


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The outputs of layers that computed the activation after them."""
    outputs: list[Tensor] = []
    computed = activated.computed

    def recording(run: Any, output: Tensor) -> Tensor:
        outputs.append(output)
        return computed(run, output)

    monkeypatch.setattr(activated, "computed", recording)
    return outputs


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_layer_computes_the_activation_after_it(name: str, pairs: list[Tensor]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), ACTIVATIONS[name](), nn.Linear(16, 8))
    expected, their_gradients = model(X), gradients(model, X)

    report = patch(model, fuse=True)

    assert report.fused == {"0": f"computes the {name} of 1"}
    torch.testing.assert_close(model(X), expected)
    torch.testing.assert_close(pairs, [ACTIVATIONS[name]()(nn.Sequential(model[0])(X))])
    torch.testing.assert_close(gradients(model, X), their_gradients)
    assert len(pairs) == 2


def test_equal_blocks_are_compiled_once() -> None:
    blocks = [nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU()), Mlp()]) for _ in range(10)]
    counter = CompileCounter()
    for pair, mlp in blocks:
        for block in (pair, mlp):
            patch(block, fuse=True)
            block.compile(backend=counter, fullgraph=True)
            block(X)

    assert counter.frame_count == 2


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


def shared() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(nn.Sequential(layer, nn.GELU()), layer)


class Branches(nn.Module):
    """Reads the output of a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(8, 8), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.act(y) + y


class Twice(Branches):
    """Calls its layer and its activation twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.up(self.act(self.up(x))))


class Decides(Branches):
    """A forward that depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.up(x)) if x.sum() > 0 else x


class Drops(Branches):
    """Puts something between in training."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.act(y if not self.training else 2 * y)


class Ungated(Mlp):
    """No activation in the product of gate and up."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.w3(x) * self.w1(self.act(x)))


class MoreThanAnMlp(Mlp):
    """Something is added."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.w3(x) * self.act(self.w1(x))) + x


class OfTwoInputs(Mlp):
    """Gate and up see different inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.w3(x + 1) * self.act(self.w1(x)))


NOT_FUSED: dict[str, Callable[[], nn.Module]] = {
    "another function": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
    "an activation of another class": lambda: nn.Sequential(
        nn.Linear(8, 8), type("Mine", (nn.GELU,), {})()
    ),
    "something between": lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()),
    "an activation alone": lambda: nn.Sequential(nn.GELU(), nn.Linear(8, 8)),
    "a layer with a hook": lambda: nn.Sequential(hooked(nn.Linear(8, 8)), nn.GELU()),
    "an activation with a hook": lambda: nn.Sequential(nn.Linear(8, 8), hooked(nn.GELU())),
    "a layer that two modules have": shared,
    "an output that is read twice": Branches,
    "a layer that is called twice": Twice,
    "a forward that depends on values": Decides,
    "a forward that is another in training": Drops,
    "a layer that is not swapped": lambda: nn.Sequential(
        nn.Linear(8, 8, dtype=torch.float64), nn.GELU()
    ),
    "a layer with an activation": lambda: nn.Sequential(
        outblas.Linear(8, 8, activation="relu"), nn.GELU()
    ),
    "an MLP whose gate has no activation": Ungated,
    "an MLP to which something is added": MoreThanAnMlp,
    "an MLP of two inputs": OfTwoInputs,
}
ONE_PAIR = "an MLP to which something is added", "an MLP of two inputs"  # gate and its activation


@pytest.mark.parametrize("name", NOT_FUSED)
def test_other_modules_are_left_as_they_are(name: str) -> None:
    model = NOT_FUSED[name]()
    x = X.to(next(model.parameters()).dtype)
    expected = model(x)

    fused = patch(model, fuse=True).fused

    assert list(fused) == (["w1"] if name in ONE_PAIR else [])
    torch.testing.assert_close(model(x), expected)


# ---- gated MLPs
GATED = {"relu": "reglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "silu": "swiglu"}


@pytest.mark.parametrize("name", GATED)
def test_a_gated_mlp_has_one_product_for_gate_and_up(
    name: str, fused_gemms: list[str | None]
) -> None:
    model = Mlp(ACTIVATIONS[name](), bias=name in ("gelu", "silu"))
    expected, their_gradients = model(X), gradients(model, X)

    report = patch(model, fuse=True)

    assert report.fused == {"(root)": f"w1 and w3 are one product with {GATED[name]}"}
    torch.testing.assert_close(model(X), expected)
    assert fused_gemms == [GATED[name]]
    torch.testing.assert_close(gradients(model, X), their_gradients)


def test_the_weights_of_a_fused_mlp_are_halves_of_one_matrix_and_stay_there(
    fused_gemms: list[str | None],
) -> None:
    model = Mlp()
    before = dict(model.named_parameters())

    patch(model, fuse=True)

    assert dict(model.named_parameters()) == before, "the parameters are others"
    assert are_joined(model.w1.weight, model.w3.weight)
    for weight in (model.w1.weight, model.w3.weight):
        assert weight.storage_offset() == 0
        assert weight.untyped_storage().nbytes() == weight.nbytes
    addresses, alias = [p.data_ptr() for p in model.parameters()], model.w1.weight.detach()
    unpatch(model)
    patch(model, fuse=True)
    model(X)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert alias.data_ptr() == addresses[0]
    assert fused_gemms == ["swiglu"]


def test_a_matrix_is_free_when_its_halves_have_moved() -> None:
    model = Mlp()
    patch(model, fuse=True)
    memory = torch.multiprocessing.reductions.StorageWeakRef(
        torch.UntypedStorage._new_with_weak_ptr(vars(model)["_outblas_arguments"][1].memory.cdata)
    )

    model.w1.weight.data = model.w1.weight.data.clone()
    assert not memory.expired()
    model.w3.weight.data = model.w3.weight.data.clone()

    assert memory.expired()


@pytest.mark.parametrize(("name", "is_frozen"), [("w1", False), ("w3", True)])
def test_a_weight_that_changes_before_the_backward_pass_is_refused(
    name: str, is_frozen: bool, fused_gemms: list[str | None]
) -> None:
    model = Mlp().requires_grad_(not is_frozen)
    patch(model, fuse=True)
    x = X.clone().requires_grad_()
    y = model(x)

    with torch.no_grad():
        getattr(model, name).weight.add_(1)

    assert len(fused_gemms) == 1
    with pytest.raises(RuntimeError, match=r"modified (inplace|by an inplace operation)"):
        torch.autograd.grad(y.sum(), x)


@pytest.mark.parametrize("frozen", [["w1"], ["w1", "w3"], ["x", "w3"]])
def test_gradients_of_a_partly_frozen_mlp(frozen: list[str], fused_gemms: list[str | None]) -> None:
    model, found = Mlp(bias=True), []
    patch(model, fuse=True)
    plain = copy.deepcopy(model)
    unpatch(plain)
    for net in (model, plain):
        x = X.clone().requires_grad_("x" not in frozen)
        leaves = [x, net.w1.weight, net.w3.weight, net.w1.bias]
        for leaf, at in zip(leaves, ("x", "w1", "w3"), strict=False):
            leaf.requires_grad_(at not in frozen)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found.append(torch.autograd.grad(net(x).square().sum(), wanted))

    assert len(fused_gemms) == 1
    torch.testing.assert_close(*found)


# ---- ways to run it
def autocast(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        result: Tensor = model(X).float()
    return result


def exported(model: nn.Module) -> Tensor:
    result: Tensor = torch.export.export(model, (X,)).module()(X)
    return result


def of_inference(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(X)
    return result


def functional(model: nn.Module) -> Tensor:
    """The gradient that torch.func computes."""
    weights: dict[str, Tensor] = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor]) -> Tensor:
        result: Tensor = torch.func.functional_call(model, weights, (X,)).square().sum()
        return result

    gradient = torch.func.grad(loss)(weights)
    of_input = torch.func.grad(lambda x: model(x).square().sum())(X)
    return torch.cat([of_input.flatten(), *(gradient[name].flatten() for name in sorted(gradient))])


def mapped(model: nn.Module) -> Tensor:
    return torch.func.vmap(model)(X)


def named(model: nn.Module) -> Tensor:
    result: Tensor = model(x=X)
    return result


@pytest.mark.parametrize("run", [autocast, exported, of_inference, functional, mapped, named])
def test_a_fused_mlp_computes_the_same_in_all_ways(run: Callable[[nn.Module], Tensor]) -> None:
    model = Mlp()
    expected = run(model)

    patch(model, fuse=True)

    torch.testing.assert_close(run(model), expected)


def test_a_dry_run_fuses_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), Mlp())
    shown = repr(model)

    dry = patch(model, fuse=True, dry_run=True)

    assert list(dry.fused) == ["0", "2"]
    assert repr(model) == shown
    assert "would fuse" in str(dry)
    assert patch(model, fuse=True) == replace(dry, dry_run=False)

"""`outblas.Linear` and `patch`: the same model, of another class."""

import copy
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.layers import Net, Quantized, X, names_of_ours, quantized
from torch import nn

import outblas
from outblas import Linear, patch, unpatch
from outblas.core.epilogue import Activation, apply

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor


# ---- the layer
@pytest.mark.parametrize(
    ("activation", "bias"), [(None, True), ("gelu", False), ("swiglu", True)], ids=str
)
def test_a_layer_is_torchs_and_an_activation(activation: Activation | None, bias: bool) -> None:
    layer, torchs = Linear(8, 6, bias, activation=activation), nn.Linear(8, 6, bias)
    torchs.load_state_dict(layer.state_dict())

    torch.testing.assert_close(layer(X), apply(torchs(X), activation or "", None))


def test_its_arguments_are_torchs_and_an_activation() -> None:
    *ours, last = inspect.signature(Linear).parameters.values()
    torchs = inspect.signature(nn.Linear).parameters.values()

    assert [(p.name, p.kind, p.default) for p in ours] == [
        (p.name, p.kind, p.default) for p in torchs
    ]
    assert last.name == "activation"


def test_skip_init_makes_one() -> None:
    layer = nn.utils.skip_init(Linear, 8, 6, activation="gelu", dtype=torch.float64)

    assert layer.weight.dtype is torch.float64
    assert "activation='gelu')" in repr(layer)


@pytest.mark.parametrize(
    ("columns", "activation", "message"),
    [
        (6, "tanh", "activation is 'tanh', expected None or one of relu"),
        (7, "geglu", "out_features is 7, expected an even number for activation 'geglu'"),
    ],
)
def test_an_activation_that_a_layer_cannot_have_is_refused(
    columns: int, activation: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Linear(8, columns, activation=activation)


def test_what_is_no_tensor_or_no_module_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"is list, expected a torch\.Tensor"):
        Linear(8, 6)([1.0])
    with pytest.raises(TypeError, match=r"model is dict, expected a torch\.nn\.Module"):
        patch({})  # type: ignore[arg-type]


# ---- patch


def test_patch_swaps_a_model_that_is_a_layer() -> None:
    layer = nn.Linear(8, 8)

    assert patch(layer).swapped == ("(root)",)
    assert type(layer) is Linear


def test_patch_keeps_objects_parameters_hooks_and_results() -> None:
    net, outputs = Net(), []
    layer, parameters, names = net.up, list(net.parameters()), net.state_dict().keys()
    want = net(X)
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
    torch.testing.assert_close(net(X), want)
    assert len(outputs) == 2  # the layer is called under both of its names


def test_an_optimizer_goes_on() -> None:
    torch.manual_seed(0)
    patched, untouched = Net(), Net()
    untouched.load_state_dict(patched.state_dict())
    optimizers = {net: torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (patched, untouched)}

    def step(net: Net) -> Tensor:
        loss = (net(X) - 1).square().mean()
        optimizers[net].zero_grad()
        loss.backward()
        optimizers[net].step()
        return loss

    for i in range(10):
        if i == 5:
            patch(patched)
        torch.testing.assert_close(step(patched), step(untouched), msg=f"step {i}")


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_a_transformer_layer_stays_the_same(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).train(training)
    x = torch.randn(2, 5, 16)
    want = layer(x)

    report = patch(layer)

    assert report.swapped == ("linear1", "linear2")
    with torch.inference_mode(not training):
        torch.testing.assert_close(layer(x), want)


def test_a_transformers_fast_path_is_remarked() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    remark = patch(layer).remarks["linear1"]

    assert "fast path (eval, no gradients) takes its weight past it" in remark


# ---- copies of a patched model
def saved_and_loaded(net: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, saved_and_loaded, lambda net: net.share_memory()]
)
def test_a_copy_of_a_patched_model_is_patched(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    net = Net()
    patch(net)

    other = copied(net)

    assert type(other.up) is Linear
    torch.testing.assert_close(other(X), net(X))


def test_a_compiled_model_follows_patch_and_unpatch() -> None:
    torch._dynamo.reset()
    has_our_operator = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        targets = [node.target for node in graph.graph.nodes]
        has_our_operator.append(torch.ops.outblas.gemm.default in targets)
        return graph

    net = Net()
    want = net(X)
    compiled: Any = torch.compile(net, backend=backend)
    compiled(X)

    report = patch(compiled)
    torch.testing.assert_close(compiled(X), want)
    unpatch(compiled)

    assert report.swapped == ("_orig_mod.up", "_orig_mod.down", "_orig_mod.back")
    assert has_our_operator == [False, True]
    assert names_of_ours(compiled) == []
    assert torch.equal(compiled(X), want)


# ---- what is not swapped, and why
class Lora(nn.Linear):
    """A subclass that may compute something else."""


def with_another_forward() -> nn.Linear:
    layer = nn.Linear(8, 8)
    layer.forward = lambda x: x  # type: ignore[method-assign, assignment]
    return layer


KEPT = {
    "subclass": (lambda: Lora(8, 8), "is a Lora"),
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
}


@pytest.mark.parametrize(("make", "reason"), KEPT.values(), ids=KEPT)
def test_what_is_not_swapped_says_why(make: Callable[[], nn.Module], reason: str) -> None:
    layer = make()
    kind = type(layer)

    report = patch(layer)

    assert report.kept == {"(root)": reason}
    assert type(layer) is kind


def test_a_report_counts_and_lists_layers() -> None:
    model = nn.ModuleDict({"plain": nn.Linear(8, 8), "lora": Lora(8, 8)})

    lines = str(patch(model)).splitlines()

    assert lines[0] == "1 swapped, 1 kept"
    remark = "on cpu: torch takes it until it moves to an NVIDIA GPU"
    assert lines[1] == f"plain  swapped  {remark}"


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(8, 8, device="meta"), lambda: Linear(8, 8, activation="gelu")]
)
def test_layers_on_meta_and_layers_of_ours_count_as_swapped(
    make: Callable[[], nn.Linear],
) -> None:
    assert patch(make()).swapped == ("(root)",)


TAKEN_BY_TORCH: dict[str, tuple[str, Callable[[Tensor], nn.Parameter], str]] = {
    "weight of a subclass": (
        "weight",
        lambda w: nn.Parameter(w.as_subclass(Quantized)),
        "is a Quantized, which torch takes",
    ),
    "bias of a subclass": (
        "bias",
        lambda w: nn.Parameter(w.as_subclass(Quantized)),
        "is a Quantized, which torch takes",
    ),
    "parameter of a subclass": (
        "weight",
        lambda w: type("Mine", (nn.Parameter,), {})(w),
        "is a Mine, which torch takes",
    ),
    "sparse": (
        "weight",
        lambda w: nn.Parameter(w.to_sparse_csr()),
        "is torch.sparse_csr, which torch takes",
    ),
    "nested": (
        "weight",
        lambda w: nn.Parameter(torch.nested.nested_tensor([w])),
        "is nested, which torch takes",
    ),
}


@pytest.mark.parametrize(("name", "make", "reason"), TAKEN_BY_TORCH.values(), ids=TAKEN_BY_TORCH)
def test_a_weight_that_torch_takes_is_not_swapped(
    name: str, make: Callable[[Tensor], nn.Parameter], reason: str
) -> None:
    layer = nn.Linear(8, 6)
    setattr(layer, name, make(getattr(layer, name).detach()))

    assert patch(layer).kept == {"(root)": f"its {name} {reason}"}
    assert type(layer) is nn.Linear


def test_a_quantized_weight_is_not_swapped() -> None:
    layer = nn.Linear(8, 6)
    weight = torch.quantize_per_tensor(layer.weight.detach(), 0.1, 0, torch.qint8)
    layer.weight = nn.Parameter(weight, requires_grad=False)

    assert patch(layer).kept == {"(root)": "has a weight of torch.qint8, which no kernel takes"}


def test_an_attribute_that_would_become_the_activation_is_not_taken_for_one() -> None:
    layer = nn.Linear(8, 6)
    layer.activation = "gelu"  # type: ignore[assignment]
    want = layer(X)

    report = patch(layer)

    assert report.kept == {
        "(root)": "has an attribute activation, which outblas.Linear would apply"
    }
    assert torch.equal(layer(X), want)


# ---- what goes to torch whole
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("activation", [None, "swiglu"], ids=str)
def test_a_weight_quantized_afterwards_goes_to_torch_whole(
    name: str, activation: Activation | None
) -> None:
    layer = Linear(8, 6, activation=activation)
    want = layer(X)

    quantized(layer, name)

    assert torch.equal(layer(X), want)


def test_batch_invariance_is_not_promised_for_a_quantized_layer() -> None:
    layer = quantized(Linear(8, 6))

    with outblas.batch_invariant(), pytest.raises(ValueError, match="tensor subclass Quantized"):
        layer(X)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_input_goes_to_torch_whole(layout: torch.layout) -> None:
    layer = nn.Linear(8, 6)
    x = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(5, 8)], layout=layout)
    want = layer(x).unbind()

    patch(layer)

    for got, expected in zip(layer(x).unbind(), want, strict=True):
        assert torch.equal(got, expected)

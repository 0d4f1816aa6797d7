"""`patch` and the fp8 layers of models of transformers."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from outblas import patch, unpatch
from outblas.patching import fp8_linears

pytest.importorskip("transformers")

from support.transformers_fp8 import (
    TOKENS,
    deepseek_v3,
    fp8_layer,
    fp8_layers,
    qwen3,
    qwen3_moe,
    reference,
    with_references,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::outblas.FallbackWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

Tensor = torch.Tensor
ON_CPU = "on cpu: torch takes it until it moves to a GPU of sm_90"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The inputs of layers that transformers is asked to compute, for which it returns zeros."""
    from transformers.integrations import finegrained_fp8

    given: list[Any] = []

    def recorded(input: Tensor, weight: Tensor, *_: Any) -> Tensor:
        given.append(input)
        return input.new_zeros(*input.shape[:-1], weight.shape[0])

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", recorded)
    return given


# ---- what they compute
@pytest.mark.parametrize("make", [qwen3, deepseek_v3])
def test_a_patched_model_multiplies_the_dequantized_operands(make: Callable[[], Any]) -> None:
    model = make()
    expected = with_references(model)(TOKENS).logits

    report = patch(model)

    names = list(fp8_layers(model))
    assert len(names) >= 14
    assert [name for name in report.swapped if name != "lm_head"] == names
    assert not report.kept
    assert not report.unreached
    assert {report.remarks[name] for name in names} == {ON_CPU}
    torch.testing.assert_close(model(TOKENS).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_layer_returns_the_dtype_of_its_input(dtype: torch.dtype) -> None:
    layer, x = fp8_layer(has_bias=True), torch.randn(2, 5, 300).to(dtype)
    patch(layer)

    y = layer(x)

    assert y.dtype == dtype
    atol, rtol = (1e-4, 1e-4) if dtype == torch.float32 else (0.02, 0.01)
    torch.testing.assert_close(y, reference(layer, x), atol=atol, rtol=rtol)


def test_an_input_gets_its_gradient() -> None:
    layer, x = fp8_layer(), torch.randn(5, 300, requires_grad=True)
    patch(layer)

    layer(x).sum().backward()

    assert x.grad is not None
    assert layer.weight.grad is None


# ---- what is kept
def changed(name: str, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns a layer of which one parameter is another."""
    layer = fp8_layer()
    t = function(getattr(layer, name).detach())
    setattr(layer, name, nn.Parameter(t, requires_grad=False))
    return layer


def replaced() -> Any:
    layer = fp8_layer()
    layer.forward = lambda x: x
    return layer


def derived() -> Any:
    layer = fp8_layer()

    class Derived(type(layer)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return x

    layer.__class__ = Derived
    return layer


KEPT: dict[str, tuple[Callable[[], Any], str]] = {
    "one scale for all": (
        lambda: fp8_layer(block_size=None),
        "its block size is none, with one scale for all, not 128 by 128",
    ),
    "other blocks": (
        lambda: fp8_layer(block_size=(64, 128)),
        "its block size is 64 by 128, not 128 by 128",
    ),
    "a scale of activations": (
        lambda: fp8_layer(activation_scheme="static"),
        "its activation_scheme is 'static', not 'dynamic'",
    ),
    "scales in e8m0": (
        lambda: changed("weight_scale_inv", lambda t: t.to(torch.float8_e8m0fnu)),
        "its weight_scale_inv.dtype is torch.float8_e8m0fnu, expected one of torch.float32",
    ),
    "a weight that was dequantized": (
        lambda: changed("weight", torch.Tensor.float),
        "its weight.dtype is torch.float32, expected one of torch.float8_e4m3fn, torch.float8_e5m2",
    ),
    "another forward": (replaced, "its forward was replaced"),
    "a subclass with another forward": (derived, "Derived has a forward of its own"),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_layers_are_kept_and_named(name: str) -> None:
    make, reason = KEPT[name]
    model = nn.Sequential(make())
    forward = vars(model[0]).get("forward")

    report = patch(model)

    kind = type(model[0]).__name__
    assert report.kept == {"0": reason}
    assert report.unreached == {
        "0.weight": f"{kind} of transformers multiplies by it, and by its scales"
    }
    assert not report.swapped
    assert vars(model[0]).get("forward") is forward


def test_experts_in_fp8_are_named_without_their_scales() -> None:
    model = qwen3_moe()

    report = patch(model)

    experts = "model.layers.0.mlp.experts"
    assert experts in report.kept
    of_experts = {name: why for name, why in report.unreached.items() if experts in name}
    assert of_experts == {
        f"{experts}.{name}": "FP8Experts multiplies by 4 matrices in fp8"
        for name in ("gate_up_proj", "down_proj")
    }


def test_a_filter_is_asked_for_layers() -> None:
    model = nn.Sequential(fp8_layer(), fp8_layer(N=64))

    report = patch(model, filter=lambda name, layer: layer.out_features > 100)

    assert report.swapped == ("0",)
    assert report.kept == {"1": "the filter does not take it"}
    assert list(report.unreached) == ["1.weight"]


# ---- what changes later
@pytest.mark.parametrize("change", ["another weight", "other blocks", "another input"])
def test_a_layer_that_changes_is_computed_by_its_class(change: str, theirs: list[Any]) -> None:
    layer, x = fp8_layer(), torch.randn(5, 300)
    patch(layer)
    if change == "another weight":
        layer.weight = nn.Parameter(layer.weight.data.view(torch.int8), requires_grad=False)
    elif change == "other blocks":
        layer.block_size = (64, 64)
    else:
        x = x.double()

    layer(x)

    assert len(theirs) == 1
    if change != "another input":
        remark = patch(layer, dry_run=True).remarks["(root)"]
        assert remark.endswith("FP8Linear computes as without patch")


def test_a_gpu_without_the_kernel_leaves_a_layer_to_its_class(
    monkeypatch: pytest.MonkeyPatch, theirs: list[Any]
) -> None:
    monkeypatch.setattr(fp8_linears, "_no_kernel_reason", lambda device: "needs another GPU")
    layer = fp8_layer()

    report = patch(layer)

    layer(torch.randn(5, 300))
    assert len(theirs) == 1
    assert report.remarks == {"(root)": "needs another GPU: FP8Linear computes as without patch"}


# ---- copies
def saved_and_loaded(layer: Any) -> Any:
    memory = io.BytesIO()
    torch.save(layer, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


def replica(layer: Any) -> Any:
    """A replica as nn.DataParallel makes one, with tensors of its own."""
    made = layer._replicate_for_data_parallel()
    for name, t in layer._parameters.items():
        setattr(made, name, t if t is None else t.detach().clone())
    return made


@pytest.mark.parametrize("make", [copy.deepcopy, saved_and_loaded, replica])
def test_a_copy_computes_with_its_own_tensors(make: Callable[[Any], Any]) -> None:
    layer, x = fp8_layer(), torch.randn(5, 300)
    patch(layer)
    expected = layer(x)

    made = make(layer)

    layer.weight_scale_inv.data.zero_()
    assert torch.equal(made(x), expected)


# ---- back
def test_unpatch_gives_layers_their_own_forward_back(theirs: list[Any]) -> None:
    model = nn.Sequential(nn.Linear(300, 300), fp8_layer(), nn.Linear(200, 8))
    patch(model)

    report = unpatch(model)

    assert report.swapped == ("0", "1", "2")
    assert not report.kept
    assert "forward" not in vars(model[1])
    model(torch.randn(5, 300))
    assert len(theirs) == 1

"""`patch` and the fp8 layers of models of transformers: single ones, and fused MLPs, which are two
products with fp8 between them.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fp8 import with_recipes
from support.saved import saved_and_loaded
from torch import nn

from outblas import patch, quantize, scaled_mm, unpatch
from outblas.patching import fp8_linears, preparing
from outblas.patching.halves import are_joined

pytest.importorskip("transformers")

from support.transformers_fp8 import (
    TOKENS,
    deepseek_v3,
    fp8_layer,
    fp8_layers,
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


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The inputs of layers that transformers is asked to compute, for which it returns zeros."""
    from transformers.integrations import finegrained_fp8

    inputs: list[Any] = []

    def recording(input: Tensor, weight: Tensor, *_: Any) -> Tensor:
        inputs.append(input)
        return input.new_zeros(*input.shape[:-1], weight.shape[0])

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", recording)
    return inputs


# ---- what they compute
def test_a_patched_model_multiplies_the_dequantized_operands() -> None:
    model = deepseek_v3()
    expected = with_references(model)(TOKENS).logits

    report = patch(model)

    names = list(fp8_layers(model))
    assert len(names) >= 14
    assert [name for name in report.swapped if name != "lm_head"] == names
    assert not report.kept
    assert not report.unreached
    assert {report.remarks[name] for name in names} == {ON_CPU}
    torch.testing.assert_close(model(TOKENS).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_returns_the_dtype_of_its_input(dtype: torch.dtype) -> None:
    layer, x = fp8_layer(has_bias=True), torch.randn(2, 5, 300).to(dtype)
    patch(layer)

    y = layer(x)

    assert y.dtype == dtype
    atol, rtol = (1e-4, 1e-4) if dtype == torch.float32 else (0.02, 0.01)
    torch.testing.assert_close(y, reference(layer, x), atol=atol, rtol=rtol)


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


# ---- back
def test_unpatch_gives_layers_their_own_forward_back(theirs: list[Any]) -> None:
    model = nn.Sequential(nn.Linear(300, 300), fp8_layer(), nn.Linear(200, 8))
    patch(model)

    report = unpatch(model)

    assert report.swapped == ("0", "1", "2")
    assert not report.kept
    assert not any("outblas" in name for name in vars(model[1]))
    model(torch.randn(5, 300))
    assert len(theirs) == 1


# ---- fused MLPs
FUSED = "gate and up are one product with swiglu, in fp8 for down"
PRODUCTS: dict[str, Any] = {"output_dtype": torch.float8_e4m3fn, "out_recipe": "1x128"}


class MLP(nn.Module):
    """A gated MLP as models of transformers have it."""

    def __init__(self, K: int = 300, inner: int = 256, has_bias: bool = False) -> None:
        super().__init__()
        self.gate = fp8_layer(K, inner, has_bias=has_bias)
        self.up = fp8_layer(K, inner, has_bias=has_bias)
        self.down = fp8_layer(inner, K, has_bias=has_bias)
        self.act: nn.Module = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


def two_products(mlp: Any, x: Tensor) -> Tensor:
    """What a fused MLP computes."""
    values, scales = quantize(x.reshape(-1, x.shape[-1]), "1x128")
    weight = torch.cat((mlp.gate.weight, mlp.up.weight))
    scale = torch.cat((mlp.gate.weight_scale_inv, mlp.up.weight_scale_inv))
    bias = None
    if mlp.gate.bias is not None:
        bias = torch.cat((mlp.gate.bias, mlp.up.bias)).float()
    inner, of_inner = scaled_mm(
        *with_recipes(values, weight.t(), scales, scale.t()),
        bias=bias,
        **PRODUCTS,
        activation="swiglu",
    )
    bias = None if mlp.down.bias is None else mlp.down.bias.to(x.dtype)
    of_down = mlp.down.weight_scale_inv.t()
    operands = with_recipes(inner, mlp.down.weight.t(), of_inner, of_down)
    y = scaled_mm(*operands, bias=bias, output_dtype=x.dtype)
    return y.view(x.shape)


def one_by_one(mlp: Any, x: Tensor) -> Tensor:
    """What its layers compute, each by itself."""
    inner = nn.functional.silu(reference(mlp.gate, x)) * reference(mlp.up, x)
    return reference(mlp.down, inner)


@torch.no_grad()
def result(mlp: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = mlp(x)
    return y


@pytest.mark.parametrize(
    ("has_bias", "dtype"),
    [(False, torch.bfloat16), (True, torch.float16), (True, torch.float32)],
)
def test_a_fused_mlp_is_two_products(has_bias: bool, dtype: torch.dtype) -> None:
    mlp, x = MLP(has_bias=has_bias), torch.randn(2, 5, 300).to(dtype)
    with torch.no_grad():
        expected = two_products(mlp, x)

    report = patch(mlp, fuse=True)
    y = result(mlp, x)

    assert report.fused == {"(root)": FUSED}
    assert y.dtype == dtype
    assert torch.equal(y, expected)
    assert (y.float() - one_by_one(mlp, x).float()).norm() < 0.06 * y.float().norm()


def test_halves_of_blocks_are_not_fused() -> None:
    mlp, x = MLP(inner=192), torch.randn(5, 300)

    report = patch(mlp, fuse=True)

    assert report.fused == {}
    assert set(report.swapped) == {"gate", "up", "down"}
    torch.testing.assert_close(result(mlp, x), one_by_one(mlp, x), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["up", "down"])
def test_all_three_layers_must_be_swapped(name: str) -> None:
    mlp = MLP()

    report = patch(mlp, fuse=True, filter=lambda at, layer: at != name)

    assert report.fused == {}


def test_gradients_are_those_of_single_layers() -> None:
    mlp, x = MLP(), torch.randn(5, 300)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    patch(mlp)
    mlp(leaves[0]).sum().backward()
    patch(mlp, fuse=True)

    mlp(leaves[1]).sum().backward()

    assert leaves[0].grad is not None
    assert torch.equal(leaves[0].grad, leaves[1].grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gate", "down"])
def test_hooks_of_layers_are_called(name: str) -> None:
    mlp, x, seen = MLP(), torch.randn(5, 300), list[Tensor]()
    patch(mlp, fuse=True)
    getattr(mlp, name).register_forward_hook(lambda layer, given, y: seen.append(y))

    y = result(mlp, x)

    assert len(seen) == 1
    torch.testing.assert_close(y, one_by_one(mlp, x), atol=1e-3, rtol=1e-3)


def assigned(mlp: Any) -> Any:
    held = {name: t.clone() for name, t in mlp.state_dict().items()}
    mlp.load_state_dict(held, assign=True)
    return mlp


def with_another_activation(mlp: Any) -> Any:
    mlp.act = nn.GELU()
    return mlp


@pytest.mark.parametrize(
    "change", [copy.deepcopy, saved_and_loaded, assigned, with_another_activation]
)
def test_an_mlp_that_changes_is_computed_layer_by_layer(change: Callable[[Any], Any]) -> None:
    mlp, x = MLP(), torch.randn(5, 300, dtype=torch.bfloat16)
    patch(mlp, fuse=True)

    changed = change(mlp)

    plain = copy.deepcopy(changed)
    unpatch(plain)
    patch(plain)
    is_apart = not are_joined(changed.gate.weight, changed.up.weight)
    assert is_apart == (change is not with_another_activation)
    assert torch.equal(result(changed, x), result(plain, x))


def test_other_scales_are_read_at_the_next_call() -> None:
    mlp, x = MLP(), torch.randn(5, 300)
    patch(mlp, fuse=True)
    result(mlp, x)

    mlp.up.weight_scale_inv.data = 2 * mlp.up.weight_scale_inv.data

    with torch.no_grad():
        assert torch.equal(result(mlp, x), two_products(mlp, x))


def test_unpatch_gives_a_fused_mlp_its_forward_back() -> None:
    mlp = MLP()
    patch(mlp, fuse=True)

    unpatch(mlp)

    assert not any("outblas" in name for name in vars(mlp))
    for _ in range(2):
        assert patch(mlp, fuse=True).fused == {"(root)": FUSED}


@pytest.mark.parametrize("fuse", [False, True])
def test_fp8_layers_are_run_to_prepare_them(fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of equal sizes once, and fused MLPs as a whole."""
    monkeypatch.setattr(preparing, "is_on_gpu", lambda t: True)
    first = MLP()
    model = nn.Sequential(first, MLP())
    patch(model, fuse=fuse)

    results = [tuple(run(3).shape) for run in preparing._runs(model)]

    up, down = (tuple(layer.weight.shape) for layer in (first.up, first.down))
    own = results[fuse:]
    assert len(own) < 6, "equal layers are run again"
    assert set(own) == {(3, up[0]), (3, down[0])}
    assert results[:fuse] == [(3, down[0])] * fuse

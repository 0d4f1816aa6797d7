"""`patch(model, fuse=True)` and gated MLPs of fp8 layers of transformers: two products with fp8
between them.
"""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from outblas import patch, quantize, scaled_mm, unpatch
from outblas.patching.halves import are_joined

pytest.importorskip("transformers")

from support import transformers_fp8
from support.transformers_fp8 import (
    TOKENS,
    deepseek_v3,
    fp8_layer,
    qwen3,
    reference,
    with_references,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::outblas.FallbackWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

Tensor = torch.Tensor
FUSED = "gate and up are one product with swiglu, in fp8 for down"
PRODUCTS: dict[str, Any] = {"out_dtype": torch.float8_e4m3fn, "out_recipe": "1x128"}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


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
        values, weight.t(), scales, scale.t(), bias, **PRODUCTS, activation="swiglu"
    )
    bias = None if mlp.down.bias is None else mlp.down.bias.to(x.dtype)
    of_down = mlp.down.weight_scale_inv.t()
    y = scaled_mm(inner, mlp.down.weight.t(), of_inner, of_down, bias, out_dtype=x.dtype)
    return y.view(x.shape)


def one_by_one(mlp: Any, x: Tensor) -> Tensor:
    """What its layers compute, each by itself."""
    inner = nn.functional.silu(reference(mlp.gate, x)) * reference(mlp.up, x)
    return reference(mlp.down, inner)


@torch.no_grad()
def result(mlp: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = mlp(x)
    return y


# ---- what it computes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("has_bias", [False, True])
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


@pytest.mark.parametrize("make", [qwen3, deepseek_v3])
def test_models_keep_their_results(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = transformers_fp8.SIZES | {"intermediate_size": 256}
    monkeypatch.setattr(transformers_fp8, "SIZES", sizes)
    model = make()
    expected = with_references(model)(TOKENS).logits

    report = patch(model, fuse=True)
    with torch.no_grad():
        found = model(TOKENS).logits

    assert len(report.fused) == 2
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


# ---- what is computed as before
def test_halves_of_blocks_are_not_fused() -> None:
    mlp, x = MLP(inner=192), torch.randn(5, 300)

    report = patch(mlp, fuse=True)

    assert report.fused == {}
    assert set(report.swapped) == {"gate", "up", "down"}
    torch.testing.assert_close(result(mlp, x), one_by_one(mlp, x), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_all_three_layers_must_be_swapped(name: str) -> None:
    mlp = MLP()

    report = patch(mlp, fuse=True, filter=lambda at, layer: at != name)

    assert report.fused == {}
    assert "forward" not in vars(mlp)


def test_gradients_are_those_of_single_layers() -> None:
    mlp, x = MLP(), torch.randn(5, 300)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    patch(mlp)
    mlp(leaves[0]).sum().backward()
    patch(mlp, fuse=True)

    mlp(leaves[1]).sum().backward()

    assert leaves[0].grad is not None
    assert torch.equal(leaves[0].grad, leaves[1].grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_hooks_of_layers_are_called(name: str) -> None:
    mlp, x, seen = MLP(), torch.randn(5, 300), list[Tensor]()
    patch(mlp, fuse=True)
    getattr(mlp, name).register_forward_hook(lambda layer, given, y: seen.append(y))

    y = result(mlp, x)

    assert len(seen) == 1
    torch.testing.assert_close(y, one_by_one(mlp, x), atol=1e-3, rtol=1e-3)


def loaded(mlp: Any) -> Any:
    file = io.BytesIO()
    torch.save(mlp, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assigned(mlp: Any) -> Any:
    held = {name: t.clone() for name, t in mlp.state_dict().items()}
    mlp.load_state_dict(held, assign=True)
    return mlp


@pytest.mark.parametrize("change", [copy.deepcopy, loaded, assigned])
def test_halves_that_are_apart_are_computed_one_by_one(change: Callable[[Any], Any]) -> None:
    mlp, x = MLP(), torch.randn(5, 300, dtype=torch.bfloat16)
    patch(mlp, fuse=True)

    changed = change(mlp)

    plain = copy.deepcopy(changed)
    unpatch(plain)
    patch(plain)
    assert not are_joined(changed.gate.weight, changed.up.weight)
    assert torch.equal(result(changed, x), result(plain, x))


def test_an_activation_that_is_replaced_later_is_computed() -> None:
    mlp, x = MLP(), torch.randn(5, 300)
    patch(mlp, fuse=True)
    mlp.act = nn.GELU()
    plain = copy.deepcopy(mlp)
    unpatch(plain)
    patch(plain)

    assert torch.equal(result(mlp, x), result(plain, x))


def test_other_scales_are_read_at_the_next_call() -> None:
    mlp, x = MLP(), torch.randn(5, 300)
    patch(mlp, fuse=True)
    result(mlp, x)

    mlp.up.weight_scale_inv.data = 2 * mlp.up.weight_scale_inv.data

    with torch.no_grad():
        assert torch.equal(result(mlp, x), two_products(mlp, x))


# ---- back
def test_unpatch_gives_the_forward_back() -> None:
    mlp = MLP()
    patch(mlp, fuse=True)

    unpatch(mlp)

    assert "forward" not in vars(mlp)
    assert not any("outblas" in name for name in vars(mlp))
    assert patch(mlp, fuse=True).fused == {"(root)": FUSED}
    assert patch(mlp, fuse=True).fused == {"(root)": FUSED}

"""Models of transformers with fp8 layers on a GPU: patched, and with fused MLPs, beside what the
dequantized operands give in float64.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outblas import FP8Linear, patch

pytest.importorskip("transformers")

from support import transformers_fp8
from support.transformers_fp8 import (
    TOKENS,
    deepseek_v3,
    fp8_layer,
    fp8_layers,
    qwen3,
    reference,
)

Tensor = torch.Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

MODELS: list[Callable[[], Any]] = [qwen3, deepseek_v3]
# The tensor cores keep 14 bits of the sums of a block; 16-bit results are rounded.
CLOSE = {torch.float32: 3e-4, torch.float16: 6e-4, torch.bfloat16: 4e-3}


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is left to torch, and halves of gate and up have whole blocks."""
    monkeypatch.setenv("OUTBLAS_STRICT", "1")
    monkeypatch.setattr(
        transformers_fp8, "SIZES", transformers_fp8.SIZES | {"intermediate_size": 256}
    )
    torch.manual_seed(0)


def distance(found: Tensor, expected: Tensor) -> float:
    """Their relative distance in the Frobenius norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def two_products(mlp: Any, x: Tensor) -> Tensor:
    """What a fused MLP computes: what reaches the second product is quantized from float32."""
    gate, up = (reference(layer, x.float()) for layer in (mlp.gate_proj, mlp.up_proj))
    return reference(mlp.down_proj, torch.nn.functional.silu(gate) * up)


def distances(
    model: Any, expected: Callable[[Any, Tensor], Tensor], modules: list[Any]
) -> list[float]:
    """How far the results of modules in a model are from what is expected of their inputs. What
    follows an fp8 layer is rounded to fp8 again, so that models as a whole are much farther apart.
    """
    found: list[float] = []

    def record(module: Any, given: tuple[Tensor, ...], y: Tensor) -> None:
        found.append(distance(y, expected(module, given[0])))

    handles = [module.register_forward_hook(record) for module in modules]
    with torch.no_grad():
        model(TOKENS.cuda())
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("make", MODELS)
def test_layers_of_a_model_multiply_the_dequantized_operands(
    make: Callable[[], Any], dtype: torch.dtype
) -> None:
    """So do fused MLPs, by two products. Where the 14 bits of sums decide, a value between them is
    rounded to its neighbour in fp8, 6% away: fewer than one in a hundred.
    """
    model, fused = (in_dtype(make().cuda(), dtype) for _ in range(2))

    report, report_of_fused = patch(model), patch(fused, fuse=True)

    of_layers = distances(model, reference, list(fp8_layers(model).values()))
    mlps = [fused.get_submodule(name) for name in report_of_fused.fused]
    of_mlps = distances(fused, two_products, mlps)
    assert not report.kept
    assert len(of_layers) >= 14
    assert max(of_layers) < CLOSE[dtype]
    assert len(of_mlps) == 2
    assert max(of_mlps) < 0.01


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """Gives what is not fp8, nor the scale of something that is, this dtype."""
    for name, p in model.named_parameters():
        if p.dtype == torch.float32 and not name.endswith("weight_scale_inv"):
            p.data = p.data.to(dtype)
    return model


def test_a_model_generates_what_it_computes_token_by_token() -> None:
    """With a cache, whose steps have one row a sequence, and without one."""
    model, tokens = in_dtype(qwen3().cuda(), torch.bfloat16), TOKENS.cuda()
    patch(model, fuse=True)
    settings = {"max_new_tokens": 8, "do_sample": False}

    found = model.generate(tokens, **settings)

    assert torch.equal(found, model.generate(tokens, use_cache=False, **settings))
    assert found.shape == (2, 17)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("rows", [1, 64, 1000])
def test_layers_multiply_the_dequantized_operands(rows: int, dtype: torch.dtype) -> None:
    """Those of a checkpoint, and one that quantizes a layer of 16 bits: in a graph that is replayed
    with other inputs.
    """
    layers = [fp8_layer(1040, 776, has_bias=True).cuda()]
    patch(layers[0])
    if dtype != torch.float32:
        linear = torch.nn.Linear(1536, 1000, device="cuda", dtype=dtype)
        layers.append(FP8Linear.from_linear(linear))
    for layer in layers:
        x = torch.randn(rows, layer.in_features, device="cuda").to(dtype)
        with torch.no_grad():
            layer(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = layer(x)
        x.copy_(torch.randn_like(x))
        graph.replay()

        assert y.dtype == dtype
        assert distance(y, reference(layer, x)) < CLOSE[dtype]


def test_gradients_under_vmap_are_those_of_single_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTBLAS_STRICT")
    linear = torch.nn.Linear(512, 256, device="cuda", dtype=torch.bfloat16)
    layer, x = FP8Linear.from_linear(linear), torch.randn(4, 16, 512, device="cuda").bfloat16()
    gradient = torch.func.grad(lambda x: layer(x).float().sin().sum())

    batched = torch.func.vmap(gradient)(x)

    single = torch.stack([gradient(rows) for rows in x])
    torch.testing.assert_close(batched, single, rtol=0.02, atol=0.02)

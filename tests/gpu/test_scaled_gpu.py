"""`outblas.scaled_mm` on a GPU: every kind of tile with scales of blocks, and public calls of all
recipes, with results in 16 and 32 bits and in fp8. Sums are exact, so that results do not depend on
the order in which products are added.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.fp8 import (
    BY_ROW,
    E4M3,
    E5M2,
    ORDERS,
    SQUARE,
    block_scale,
    fp8_operands,
    scaled,
    with_recipes,
)
from support.scaled_tiles import RECIPES, ScaledProduct, assert_same

import outblas
from outblas.call import dispatch
from outblas.call.epilogue import GATED, glu_split
from outblas.torch_ops import scaled_operator, scaled_output

Tensor = torch.Tensor
scaled_mm: Any = outblas.scaled_mm

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.timeout(600)]

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TO_FP8: dict[str, Any] = {"output_dtype": E4M3, "out_recipe": "1x128"}
ONE_CONSUMER = "consumers=1,cluster_m=1,producer_registers=0,consumer_registers=0"
THREE = "tile_m=192,consumers=3,cluster_m=1,producer_registers=32,consumer_registers=160"
SINGLE = {
    "256x128": "tile_m=256,tile_n=128,cluster_m=1,stages=4,epilogue_stages=1",
    "256x128, A shared": "tile_m=256,tile_n=128,cluster_m=1,cluster_n=2,stages=4,epilogue_stages=1",
    "256x128, B shared": "tile_m=256,tile_n=128,cluster_m=2,stages=4,epilogue_stages=1",
    "192x128": f"{THREE},tile_n=128,stages=4,epilogue_stages=1",
    "128x192": "tile_n=192,cluster_m=1,cluster_n=2,stages=4,epilogue_stages=1",
    "128x128, two buffers": "tile_n=128,cluster_m=1,stages=5,epilogue_stages=2",
    "128x128, in turn": "tile_n=128,cluster_m=1,pingpong=True,stages=5,epilogue_stages=1",
    "64x96": f"tile_m=64,tile_n=96,{ONE_CONSUMER},stages=8,epilogue_stages=1",
    "128x64, swapped": "tile_n=64,cluster_m=1,swap_ab=True,stages=6,epilogue_stages=1",
    "128x128, split": "tile_n=128,cluster_m=1,split_k=3,stages=5,epilogue_stages=1",
}
# Whole halves of 128 columns one after the other, and halves that divide a block or do not.
PAIRS = {
    "128x256": "tile_n=256,mma_n=128,cluster_m=1,stages=4,epilogue_stages=1",
    "128x256, two buffers": "tile_n=256,mma_n=128,cluster_m=1,stages=3,epilogue_stages=2",
    "128x256, A shared": "tile_n=256,mma_n=128,cluster_m=1,cluster_n=2,stages=4,epilogue_stages=1",
    "128x256, B shared": "tile_n=256,mma_n=128,cluster_m=2,stages=4,epilogue_stages=1",
    "64x256": f"tile_m=64,tile_n=256,mma_n=128,{ONE_CONSUMER},stages=4,epilogue_stages=1",
    "128x128": "tile_n=128,cluster_m=1,stages=5,epilogue_stages=1",
    "128x64": "tile_n=64,cluster_m=1,stages=5,epilogue_stages=1",
    "128x96": "tile_n=96,cluster_m=1,stages=4,epilogue_stages=1",
}
QUANTIZING = {
    "128x128": "tile_n=128,cluster_m=1,stages=6,epilogue_stages=1",
    "128x128, A shared": "tile_n=128,cluster_m=1,cluster_n=2,stages=6,epilogue_stages=1",
    "128x128, B shared": "tile_n=128,cluster_m=2,stages=5,epilogue_stages=2",
    "256x128": SINGLE["256x128"],
    "192x128": SINGLE["192x128"],
    "64x128": f"tile_m=64,tile_n=128,{ONE_CONSUMER},stages=6,epilogue_stages=1",
    "128x128, in turn": SINGLE["128x128, in turn"],
}
QUANTIZING_PAIRS = {name: PAIRS[name] for name in PAIRS if "x256" in name and "buffers" not in name}
# Rows and columns that end inside of a tile, and one tile that has few of both.
SHAPES = (4, 8, 128), (77, 384, 272), (300, 392, 272), (1000, 1288, 1408), (4096, 1032, 640)
OF_WHOLE_BLOCKS = (1, 128, 128), (77, 384, 384), (1000, 1280, 640)


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_STRICT", "1")
    torch.manual_seed(0)


# ---- tiles, between guards
PLACED = ("1x128 by 128x128", "1x128 by 1x128, loaded")
TILES = [
    *((SINGLE, name, recipe, "") for name in SINGLE for recipe in PLACED),
    *((PAIRS, name, recipe, "reglu") for name in PAIRS for recipe in RECIPES),
]


@pytest.mark.parametrize("number", range(len(TILES)), ids=lambda i: " ".join(TILES[i][1:]))
def test_every_tile_has_exact_sums(number: int) -> None:
    tiles, name, recipe, activation = TILES[number]
    out_dtype = (BF16, F32, F16)[number % 3]

    for shape in (*OF_WHOLE_BLOCKS, (77, 384, 272)) if activation else SHAPES:
        ScaledProduct(*shape, recipe, activation).check(tiles[name], out_dtype)


@pytest.mark.parametrize(
    ("name", "activation"),
    [*((name, "") for name in QUANTIZING), *((name, "reglu") for name in QUANTIZING_PAIRS)],
)
def test_every_tile_quantizes_its_blocks(name: str, activation: str) -> None:
    config = (QUANTIZING_PAIRS if activation else QUANTIZING)[name]
    for shape in OF_WHOLE_BLOCKS:
        ScaledProduct(*shape, activation=activation).check_quantized(config)


@pytest.mark.parametrize(("name", "recipe"), zip(PAIRS, itertools.cycle(RECIPES), strict=False))
def test_a_bias_comes_before_a_pair_and_a_residual_after_it(name: str, recipe: str) -> None:
    """And x is stored. Without scales that differ all of it is exact."""
    product = ScaledProduct(500, 640, 272, recipe, "reglu")
    for scale in product.operands[2:]:
        scale.fill_(1)
    bias = torch.randint(-2, 3, (1280,), device="cuda").bfloat16()
    residual = torch.randint(-4, 5, (500, 640), device="cuda").bfloat16()
    aux, out = torch.empty(500, 1280, dtype=BF16, device="cuda"), torch.empty_like(residual)

    product.run(PAIRS[name], out, bias, residual, aux)

    x = product.sums().float() + bias
    assert torch.equal(aux, x.bfloat16())
    assert torch.equal(out, (product.activated(x) + residual).bfloat16())


@pytest.mark.parametrize("order", ["by rows", "padded columns"])
def test_scales_of_a_result_may_lie_in_any_order(order: str) -> None:
    product = ScaledProduct(200, 384, 256)
    values, scale = outblas.quantize(product.sums().float(), "1x128")
    out = torch.empty_like(values)
    scale_out = torch.empty(200, 3, device="cuda")
    if order != "by rows":
        scale_out = torch.empty(3, 209, device="cuda")[:, :200].t()

    product.run(QUANTIZING["128x128"], out, scale_out=scale_out)

    assert torch.equal(out.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(scale_out, scale)


# ---- public calls
CALLS = (
    (1, 128, 128),
    (7, 256, 512),
    (64, 384, 272),
    (128, 128, 4096),
    (300, 1024, 640),
    (16, 6144, 512),
    (1000, 2048, 1000),
    (4096, 4096, 1024),
)
OF_CALLS = "one", "rows", *RECIPES


def operands(M: int, columns: int, K: int, recipe: str, a: torch.dtype = E4M3) -> list[Tensor]:
    """A, B and scales of a recipe that are powers of two."""
    if recipe in RECIPES:
        return ScaledProduct(M, columns, K, recipe).operands
    pair = list(fp8_operands(M, columns, K, a, device="cuda", most=1))
    if recipe == "one":
        return [*pair, torch.full((), 0.5, device="cuda"), torch.full((), 2.0, device="cuda")]
    rows = 2.0 ** (torch.arange(M, device="cuda") % 5 - 2).unsqueeze(1)
    return [*pair, rows, 2.0 ** (torch.arange(columns, device="cuda") % 3 - 1).unsqueeze(0)]


def to_fp8(*tensors: Any, **options: Any) -> Any:
    return scaled_mm(*with_recipes(*tensors), **TO_FP8, **options)


def quantized_after(*tensors: Any, power_of_two: bool = False, **options: Any) -> Any:
    """The result in float32, quantized by another kernel."""
    x = scaled_mm(*with_recipes(*tensors), output_dtype=F32, **options)
    return outblas.quantize(x, "1x128", power_of_two=power_of_two)


@pytest.fixture
def quantizing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dispatch.Call]]:
    """Lets the kernel quantize whatever it can; the calls that did. Plans are those of the test
    alone: others were made by the rule, or are to be.
    """
    calls: list[dispatch.Call] = []
    run = dispatch.run

    def record(call: dispatch.Call) -> Tensor:
        if call.out_dtype is E4M3:
            calls.append(call)
        return run(call)

    assert scaled_operator.unsupported_reason(torch.device("cuda", 0)) is None
    monkeypatch.setattr(scaled_output, "_is_fused", lambda call: True)
    monkeypatch.setattr(scaled_output.dispatch, "run", record)
    dispatch.clear_cache()
    yield calls
    dispatch.clear_cache()


@pytest.mark.parametrize("activation", [None, "relu", "reglu"])
@pytest.mark.parametrize("recipe", OF_CALLS)
def test_results_are_exact_and_in_fp8_those_of_two_kernels(
    recipe: str, activation: Any, quantizing: list[dispatch.Call]
) -> None:
    for M, N, K in CALLS[OF_CALLS.index(recipe) % 2 :: 2]:
        tensors = operands(M, N * glu_split(activation or ""), K, recipe)
        a, b, scale_a, scale_b = tensors
        quantizing.clear()

        wide = scaled_mm(*with_recipes(*tensors), output_dtype=F32, activation=activation)
        fp8 = to_fp8(*tensors, activation=activation)

        if recipe in RECIPES:
            of_a, of_b, _ = RECIPES[recipe]
            x = scaled(a, scale_a, of_a) @ scaled(b.t(), scale_b.t(), of_b).t()
        else:
            x = (a.double() @ b.double()) * scale_a.double() * scale_b.double()
        first, *values = x.float().chunk(glu_split(activation or ""), 1)
        expected = math.prod(values, start=first.relu() if activation else first)
        assert torch.equal(wide, expected)
        assert_same(fp8, outblas.quantize(wide, "1x128"))
        assert len(quantizing) == 1


@pytest.mark.parametrize("shape", [*CALLS, *((200, N, 384) for N in (100, 144, 1000))], ids=str)
def test_the_rule_quantizes_by_one_kernel_or_by_two(shape: tuple[int, int, int]) -> None:
    """Whatever it decides: few rows and many, tails of columns, a residual."""
    tensors = operands(*shape, "1x128 by 128x128")
    residual = torch.randn(shape[:2], device="cuda")

    assert_same(to_fp8(*tensors), quantized_after(*tensors))
    assert_same(to_fp8(*tensors, residual=residual), quantized_after(*tensors, residual=residual))


@pytest.mark.parametrize("M", [1, 64, 3000])
def test_pairs_may_end_inside_of_a_block(M: int) -> None:
    product = ScaledProduct(M, 1000, 640, activation="reglu")

    out = scaled_mm(*with_recipes(*product.operands), output_dtype=F32, activation="reglu")

    assert torch.equal(out, product.activated(product.sums()))


@pytest.mark.parametrize("number", range(6))
def test_epilogues_come_before_rounding(number: int, quantizing: list[dispatch.Call]) -> None:
    activation: Any = ("gelu", "gelu_tanh", "silu", *GATED)[number]
    columns, power_of_two = 640 * glu_split(activation), number % 2 == 1
    tensors = operands(500, columns, 384, "rows", E5M2)
    bias = torch.randn(columns, device="cuda")
    how: dict[str, Any] = {"bias": bias, "activation": activation, "use_fast_accum": number % 3 > 0}

    ours = to_fp8(*tensors, **how, out_power_of_two=power_of_two)

    assert len(quantizing) == 1
    assert_same(ours, quantized_after(*tensors, **how, power_of_two=power_of_two))


def test_special_values_are_those_of_quantize(quantizing: list[dispatch.Call]) -> None:
    a, *others = operands(200, 384, 256, "rows", E5M2)
    wide = a.float()
    wide[3, 7], wide[60, 1], wide[130, 9] = torch.nan, torch.inf, -torch.inf
    wide[17] = wide[90] = 0
    bias = torch.zeros(384, device="cuda")
    bias[5], bias[130], bias[300] = torch.inf, torch.nan, 3e38
    tensors = wide.to(E5M2), *others

    ours, with_bias = to_fp8(*tensors), to_fp8(*tensors, bias=bias)

    assert len(quantizing) == 2
    assert_same(ours, quantized_after(*tensors))
    assert_same(with_bias, quantized_after(*tensors, bias=bias))
    assert ours[1][17].eq(1).all()
    assert ours[0][3].isnan().all()


@pytest.mark.parametrize("recipe", [SQUARE, BY_ROW])
@pytest.mark.parametrize("order", ORDERS)
def test_scales_of_any_strides(order: str, recipe: str) -> None:
    for M, N, K in SHAPES:
        a, b = fp8_operands(M, N, K, device="cuda", most=1)
        scale_a = block_scale(M, K, BY_ROW, order, "cuda")
        scale_b = block_scale(N, K, recipe, order, "cuda")

        out = scaled_mm(*with_recipes(a, b, scale_a, scale_b.t()), output_dtype=F32)

        expected = scaled(a, scale_a, BY_ROW) @ scaled(b.t(), scale_b, recipe).t()
        assert torch.equal(out, expected.float())

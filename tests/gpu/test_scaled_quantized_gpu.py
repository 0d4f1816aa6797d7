"""`scaled_mm` with `out_recipe` on a GPU: what hopper.gemm quantizes in its epilogue has the bits
of the result in float32, quantized by a kernel of its own. Sums are exact, so that they do not
depend on the order of their products.
"""

from typing import Any

import pytest
import torch
from support.fp8 import BY_ROW, E4M3, E5M2, SQUARE, block_scale, fp8_operands
from support.gemm_problems import gemm_config

import outblas
from outblas.core import quantization
from outblas.core.epilogue import EpilogueArgs, glu_split
from outblas.core.problem import problem as describe
from outblas.hopper import gemm
from outblas.runtime import dispatch
from outblas.torch_ops import eager_scaled, scaled_output
from outblas.torch_ops import scaled_operator as module

Tensor = torch.Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.timeout(600)]

FP8: dict[str, Any] = {"out_dtype": E4M3, "out_recipe": "1x128"}
SHAPES = (
    (1, 128, 128),
    (7, 256, 512),
    (64, 384, 272),
    (128, 128, 4096),
    (300, 1024, 640),
    (1000, 2048, 1000),
    (4096, 4096, 1024),
)
RECIPES = {
    "one": (),
    "rows": (),
    "1x128 by 128x128": (BY_ROW, SQUARE),
    "1x128 by 1x128": (BY_ROW, BY_ROW),
    "128x128 by 1x128": (SQUARE, BY_ROW),
}
# What the rule does not choose by itself, too.
CONFIGS = {
    "128x128": "tile_n=128,cluster_m=1,stages=6,epilogue_stages=1",
    "128x128, A shared": "tile_n=128,cluster_m=1,cluster_n=2,stages=6,epilogue_stages=1",
    "128x128, B shared": "tile_n=128,cluster_m=2,stages=5,epilogue_stages=2",
    "256x128": "tile_m=256,tile_n=128,cluster_m=1,stages=4,epilogue_stages=1",
    "192x128": (
        "tile_m=192,tile_n=128,consumers=3,cluster_m=1,producer_registers=32,"
        "consumer_registers=160,stages=4,epilogue_stages=1"
    ),
    "64x128": (
        "tile_m=64,tile_n=128,consumers=1,cluster_m=1,producer_registers=0,consumer_registers=0,"
        "stages=6,epilogue_stages=1"
    ),
    "128x128 in turn": "tile_n=128,cluster_m=1,pingpong=True,stages=5,epilogue_stages=1",
}
PAIRS = {
    "128x256": "tile_n=256,mma_n=128,cluster_m=1,stages=4,epilogue_stages=1",
    "128x256, A shared": "tile_n=256,mma_n=128,cluster_m=1,cluster_n=2,stages=4,epilogue_stages=1",
    "128x256, B shared": "tile_n=256,mma_n=128,cluster_m=2,stages=4,epilogue_stages=1",
    "64x256": (
        "tile_m=64,tile_n=256,mma_n=128,consumers=1,cluster_m=1,producer_registers=0,"
        "consumer_registers=0,stages=4,epilogue_stages=1"
    ),
}


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_STRICT", "1")
    torch.manual_seed(0)


def operands(
    M: int, columns: int, K: int, recipe: str = "1x128 by 128x128", a: torch.dtype = E4M3
) -> tuple[Tensor, ...]:
    """A, B of small integers, and scales that are powers of two."""
    given = fp8_operands(M, columns, K, a, device="cuda", most=2)
    if pair := RECIPES[recipe]:
        of_a = block_scale(M, K, pair[0], "by columns", "cuda")
        return *given, of_a, block_scale(columns, K, pair[1], device="cuda").t()
    if recipe == "one":
        return *given, torch.full((), 0.5, device="cuda"), torch.full((), 2.0, device="cuda")
    rows = 2.0 ** (torch.arange(M, device="cuda") % 5 - 2).unsqueeze(1)
    return *given, rows, 2.0 ** (torch.arange(columns, device="cuda") % 3 - 1).unsqueeze(0)


def bits(t: Tensor) -> Tensor:
    return t.view(torch.uint8 if t.element_size() == 1 else torch.int32)


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for one, other, name in zip(found, expected, ("values", "scales"), strict=True):
        assert one.stride() == other.stride(), name
        different = (bits(one) != bits(other)).nonzero()
        assert not len(different), f"{len(different)} {name} differ, as {different[:4].tolist()}"


def composed(*given: Any, power_of_two: bool = False, **how: Any) -> tuple[Tensor, Tensor]:
    x = outblas.scaled_mm(*given, out_dtype=torch.float32, **how)
    return outblas.quantize(x, "1x128", power_of_two=power_of_two)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[dispatch.Call]:
    """Lets the kernel quantize whatever it can; the calls that did."""
    calls: list[dispatch.Call] = []
    run = dispatch.run

    def record(call: dispatch.Call) -> Tensor:
        if call.out_dtype is E4M3:
            calls.append(call)
        return run(call)

    monkeypatch.setattr(scaled_output, "_is_fused", lambda call: True)
    monkeypatch.setattr(scaled_output.dispatch, "run", record)
    return calls


# ---- bits
@pytest.mark.parametrize("activation", [None, "relu", "swiglu"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_of_two_kernels(
    shape: tuple[int, int, int], recipe: str, activation: Any, fused: list[dispatch.Call]
) -> None:
    M, N, K = shape
    given = operands(M, N * glu_split(activation or ""), K, recipe)

    found = outblas.scaled_mm(*given, **FP8, activation=activation)

    assert len(fused) == 1
    assert_same(found, composed(*given, activation=activation))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "reglu", "geglu", "swiglu"])
def test_epilogues_come_before_rounding(
    activation: Any, fast: bool, power_of_two: bool, fused: list[dispatch.Call]
) -> None:
    columns = 640 * glu_split(activation)
    a, b, *scales = operands(500, columns, 384, "rows", E5M2)
    bias = torch.randn(columns, device="cuda")
    how: dict[str, Any] = {"bias": bias, "activation": activation, "use_fast_accum": fast}

    found: Any = outblas.scaled_mm(a, b, *scales, **FP8 | how | {"out_power_of_two": power_of_two})

    assert len(fused) == 1
    assert_same(found, composed(a, b, *scales, **how, power_of_two=power_of_two))


@pytest.mark.parametrize("N", [100, 128 + 16, 1000])
def test_tails_of_columns_are_quantized_by_another_kernel(N: int) -> None:
    given = operands(200, N, 384)

    assert_same(outblas.scaled_mm(*given, **FP8), composed(*given))


def test_a_residual_is_added_before_another_kernel_quantizes() -> None:
    given, residual = operands(200, 256, 384), torch.randn(200, 256, device="cuda")

    found = outblas.scaled_mm(*given, **FP8, residual=residual)

    assert_same(found, composed(*given, residual=residual))


def test_special_values_are_those_of_quantize(fused: list[dispatch.Call]) -> None:
    a, b, scale_a, scale_b = operands(200, 384, 256, "rows", E5M2)
    wide = a.float()
    wide[3, 7], wide[60, 1], wide[130, 9] = torch.nan, torch.inf, -torch.inf
    wide[17] = wide[90] = 0
    bias = torch.zeros(384, device="cuda")
    bias[5], bias[130], bias[300] = torch.inf, torch.nan, 3e38
    given = wide.to(E5M2), b, scale_a, scale_b

    found = outblas.scaled_mm(*given, **FP8)
    with_bias = outblas.scaled_mm(*given, **FP8, bias=bias)

    assert len(fused) == 2
    assert_same(found, composed(*given))
    assert_same(with_bias, composed(*given, bias=bias))
    assert found[1][17].eq(1).all()
    assert found[0][3].isnan().all()


# ---- every tile, between guards
POISON = 0xA5


def guarded(shape: tuple[int, ...], strides: tuple[int, ...], kind: torch.dtype) -> Any:
    """Poisoned bytes, and a view in their midst."""
    size = torch.empty((), dtype=kind).element_size()
    count = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    storage = torch.full((1024 + count * size,), POISON, dtype=torch.uint8, device="cuda")
    inside = storage[512 : 512 + count * size].view(kind)
    return storage, inside.as_strided(shape, strides)


@pytest.mark.parametrize("shape", [(1, 128, 128), (77, 384, 384), (1000, 1280, 640)], ids=str)
@pytest.mark.parametrize("name", [*CONFIGS, *PAIRS])
def test_every_tile_writes_its_blocks_and_nothing_else(
    name: str, shape: tuple[int, int, int]
) -> None:
    M, N, K = shape
    activation = "swiglu" if name in PAIRS else ""
    a, b, *scales = operands(M, N * glu_split(activation), K)
    expected = composed(a, b, *scales, activation=activation or None)
    pairs = eager_scaled.as_16_bit_pairs(a), eager_scaled.as_16_bit_pairs(b.t()).t()
    like = quantization.empty_scales((M, N), "1x128", a.device)
    bytes_of_out, out = guarded((M, N), (N, 1), E4M3)
    bytes_of_scales, scale_out = guarded(tuple(like.shape), like.stride(), torch.float32)
    written = torch.zeros_like(bytes_of_scales)
    inside = written[512:-512].view(torch.int32)
    inside.as_strided(scale_out.shape, scale_out.stride()).fill_(-1)
    every = (*scales, scale_out)
    given = describe(
        *pairs,
        out,
        extra=EpilogueArgs(activation),
        scales=every,
        formats="e4m3 e4m3 promoted 1x128 128x128",
    )

    launch = gemm.plan(given, gemm_config((CONFIGS | PAIRS)[name]))
    for _ in range(3):
        launch(*pairs, None, out, 1, 0, None, None, None, *every)

    assert_same((out, scale_out), expected)
    assert (bytes_of_out[:512] == POISON).all()
    assert (bytes_of_out[-512:] == POISON).all()
    assert (bytes_of_scales[written == 0] == POISON).all()


@pytest.mark.parametrize("strides", ["rows", "padded columns"])
def test_scales_may_lie_in_any_order(strides: str) -> None:
    M, N, K = 200, 384, 256
    a, b, *scales = operands(M, N, K)
    expected = composed(a, b, *scales)
    pairs = eager_scaled.as_16_bit_pairs(a), eager_scaled.as_16_bit_pairs(b.t()).t()
    out = torch.empty(M, N, device="cuda").to(E4M3)
    memory = torch.empty(3, M + 9, device="cuda") if "padded" in strides else None
    scale_out = torch.empty(M, 3, device="cuda") if memory is None else memory[:, :M].t()
    every = (*scales, scale_out)
    given = describe(
        *pairs,
        out,
        extra=EpilogueArgs(),
        scales=every,
        formats="e4m3 e4m3 promoted 1x128 128x128",
    )

    launch = gemm.plan(given, gemm_config(CONFIGS["128x128"]))
    launch(*pairs, None, out, 1, 0, None, None, None, *every)

    assert torch.equal(bits(out), bits(expected[0]))
    assert torch.equal(scale_out, expected[1])


# ---- calls
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_the_rule_gives_the_same_bits(activation: Any) -> None:
    """Whatever it decides: few rows and many, narrow outputs and wide ones."""
    for M, N, K in ((1, 512, 1024), (16, 6144, 512), (128, 1024, 2048), (3000, 1536, 512)):
        given = operands(M, N * glu_split(activation or ""), K)

        found = outblas.scaled_mm(*given, **FP8, activation=activation)

        assert_same(found, composed(*given, activation=activation))


@pytest.mark.parametrize("N", [1024, 1000], ids=["fused", "composed"])
def test_a_graph_quantizes_what_is_there_when_it_is_replayed(N: int) -> None:
    a, b, *scales = operands(500, 2 * N, 512)
    how = FP8 | {"activation": "swiglu"}
    outblas.warmup(outblas.scaled_mm, a, b, *scales, **how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = outblas.scaled_mm(a, b, *scales, **how)
    a.copy_(a.float().flip(0).to(E4M3))
    scales[0].mul_(0.5)

    graph.replay()

    assert_same(found, composed(a, b, *scales, activation="swiglu"))


def test_the_next_product_takes_a_result_as_it_is() -> None:
    """A gated MLP from fp8 to fp8."""
    a, gate_up, *scales = operands(500, 2048, 512)
    down, scale_down = outblas.quantize(torch.randn(256, 1024, device="cuda"), "128x128")

    inner, scale = outblas.scaled_mm(a, gate_up, *scales, **FP8, activation="swiglu")
    y = outblas.scaled_mm(inner, down.t(), scale, scale_down.t(), out_dtype=torch.float32)

    wide = inner.double() * scale.double().repeat_interleave(128, 1)
    square = scale_down.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    expected = wide @ (down.double() * square).t()
    assert (y.double() - expected).norm() < 1e-3 * expected.norm()


def test_a_compiled_program_has_the_same_bits() -> None:
    given = operands(500, 1024, 512)
    torch._dynamo.reset()
    layer = torch.compile(lambda *given: outblas.scaled_mm(*given, **FP8), fullgraph=True)

    assert_same(layer(*given), composed(*given))


def test_streams_have_results_of_their_own() -> None:
    given = operands(500, 1024, 512)
    expected = composed(*given)
    torch.cuda.synchronize()
    found = []
    for _ in range(4):
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(outblas.scaled_mm(*given, **FP8))
    torch.cuda.synchronize()

    for each in found:
        assert_same(each, expected)


def test_the_host_finds_the_kernel() -> None:
    """So that none of the tests above is of a fallback."""
    assert module.unsupported_reason(torch.device("cuda", 0)) is None

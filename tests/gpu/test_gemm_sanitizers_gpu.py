"""compute-sanitizer over fp8 products with scales of blocks: single ones in tiles of one and of two
consumers, gated pairs, results in fp8, and groups whose rows begin anywhere; and over grouped GEMMs
that gather, scatter, and have an epilogue, several tiles one after the other on each SM.
"""

from pathlib import Path

import pytest
from support import sanitizer

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.slow, pytest.mark.timeout(600)]

TOOLS = "memcheck", "synccheck", "racecheck"

SINGLE = """
import torch

from support.fp8 import BY_ROW, SQUARE, block_scale, fp8_operands, scaled
from support.gemm_problems import gemm_config
from outblas.core.epilogue import EpilogueArgs
from outblas.core.problem import problem as describe
from outblas.hopper import gemm
from outblas.torch_ops import eager_scaled

M, N, K = 520, 384, 1168  # more k tiles than stages
a, b = fp8_operands(M, 2 * N, K, device="cuda", most=1)
of_a = block_scale(M, K, BY_ROW, "by columns", "cuda")
of_b = block_scale(2 * N, K, SQUARE, device="cuda").t()
sums = (scaled(a, of_a, BY_ROW) @ scaled(b.t(), of_b.t(), SQUARE).t()).float()
gate, value = sums.chunk(2, dim=1)
WANT = {"": sums, "reglu": gate.relu() * value}
WAYS = {
    "two consumers": ("", "tile_n=128,cluster_m=1,cluster_n=2,stages=5,epilogue_stages=1"),
    "256 rows": ("", "tile_m=256,tile_n=128,cluster_m=2,stages=4,epilogue_stages=1"),
    "112 columns": ("", "tile_n=112,cluster_m=1,stages=5,epilogue_stages=1"),
    "pairs": ("reglu", "tile_n=128,cluster_m=1,stages=5,epilogue_stages=1"),
    "whole halves": ("reglu", "tile_n=256,mma_n=128,cluster_m=2,stages=4,epilogue_stages=1"),
}
words = eager_scaled.as_16_bit_pairs(a), eager_scaled.as_16_bit_pairs(b.t()).t()
for way, (activation, config) in WAYS.items():
    want = WANT[activation]
    out = torch.full(want.shape, torch.nan, device="cuda")
    problem = describe(
        *words,
        out,
        extra=EpilogueArgs(activation),
        scales=(of_a, of_b),
        formats="e4m3 e4m3 promoted 1x128 128x128",
    )
    launch = gemm.plan(problem, gemm_config(config))
    launch(*words, None, out, 1, 0, None, None, None, of_a, of_b)
    assert torch.equal(out, want), way
    print("right:", way)
"""

QUANTIZED = """
import torch, outblas
from outblas.torch_ops import scaled_output
from support.fp8 import BY_ROW, SQUARE, block_scale, fp8_operands

scaled_output._is_fused = lambda call: True
M, N, K = 300, 384, 1168
a, b = fp8_operands(M, 2 * N, K, device="cuda", most=1)
of_a = block_scale(M, K, BY_ROW, "by columns", "cuda")
given = a, b, of_a, block_scale(2 * N, K, SQUARE, device="cuda").t()
for activation in (None, "reglu"):
    wide = outblas.scaled_mm(*given, out_dtype=torch.float32, activation=activation)
    want = outblas.quantize(wide, "1x128")
    fp8 = {"out_dtype": torch.float8_e4m3fn, "out_recipe": "1x128"}
    found = outblas.scaled_mm(*given, **fp8, activation=activation)
    for one, other in zip(found, want):
        assert torch.equal(one.float(), other.float()), activation
    print("right:", activation)
"""

GROUPS = """
from support.scaled_groups import draw
from support.grouped_calls import check_equal
from outblas.core import quantization
import torch

FORMS = {
    "ragged_m": ((1, 131, 131, 517, 903), 904),
    "masked": ((7, 0, 100), 100),
    "ragged_k": ((128, 128, 1536), 1664),
}
for form, (ends, extent) in FORMS.items():
    sizes = {"ends": ends, "extent": extent, "M": 200, "N": 264, "K": 1168}
    call = draw(form, out_dtype=torch.float32, **sizes).on("cuda")
    scale = call.tensors["scale_a"]
    *rows, blocks = scale.shape
    lying = quantization.empty_scales((*rows, 128 * blocks), "1x128", scale.device).copy_(scale)
    for of_a in (scale, lying):
        given = call.replaced(scale_a=of_a)
        check_equal(given.run(kernel="hopper.grouped"), call.expected())
        print("right:", form)
"""

FEW_SMS = """
import torch, outblas
from support.grouped_calls import check_equal, draw, empty_aux

N, K = 784, 1168  # more tiles than SMs, and more k tiles than stages
CALLS = [
    ("ragged_m", ("bias", "residual", "a_index", "scatter_index", "scatter_weights"), "reglu"),
    ("ragged_m", ("bias", "residual"), "relu"),
    ("ragged_k", ("bias", "residual"), "relu"),
]
for form, names, activation in CALLS:
    call = draw(form, *names, activation=activation, M=200, N=N, K=K)
    x, want, on_gpu = call.x(), call.expected(), call.on("cuda")
    aux = empty_aux(on_gpu)
    if form == "ragged_k":  # TMA loads rows that are contiguous where groups do not divide them
        columns = on_gpu.tensors["mat_a"].t().contiguous()
        on_gpu = on_gpu.replaced(mat_a=columns.t())
    with outblas.sm_carveout(torch.cuda.get_device_properties(0).multi_processor_count - 4):
        check_equal(on_gpu.run(kernel="hopper.grouped").cpu(), want)
        check_equal(on_gpu.run(kernel="hopper.grouped", aux=aux).cpu(), want)
    check_equal(aux.cpu(), x)
    print("right:", form)
"""

PROGRAMS = {
    "single": (SINGLE, 5),
    "quantized": (QUANTIZED, 2),
    "groups": (GROUPS, 6),
    "few SMs": (FEW_SMS, 3),
}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_sanitizers_find_nothing(
    program: str,
    tool: str,
    pytestconfig: pytest.Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, right = PROGRAMS[program]
    before = f"import sys; sys.path.insert(0, {str(pytestconfig.rootpath / 'tests')!r})\n"
    if tool == "racecheck" and program != "few SMs":
        before += "from support import all_lanes_arrive; all_lanes_arrive.install()\n"
        monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path))  # for kernels of other sources

    sanitizer.finds_nothing(tool, before + code, right)

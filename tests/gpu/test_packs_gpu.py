"""Calls that a pack serves on a GPU, in a process that may compile nothing, are right: products of
all kinds, and those of whole models.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.paths import ROOT

from outblas.base import machines
from outblas.base.shapes import LAYERS
from outblas.call.products import parse_line
from outblas.packing import build
from outblas.packing.products import of_model

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.timeout(600)]

LINES = (
    "64x512x512 bias",
    "64x512x512 fp8-e4m3 1x128:128x128",
    "64x512x512 fp8-e4m3 rowwise fast-accum",
    "64x512x512 fp8-e4m3 tensorwise bias",
    "256x1024x512 fp8-e4m3 1x128:128x128 swiglu to-e4m3",
    "64x512x512 groups:4",
    "64x512x512 swiglu groups:4 gathered",
    "64x512x512 fp8-e4m3 1x128:128x128 groups:4",
    "3x64x33 nn",  # of Triton
    "64x512x500 nn lda:512 align-a:8",  # TMA cannot load A
    "48x512x512 fp8-e4m3 1x128:128x128",  # the input of a layer is quantized by Triton
    "48x512x512 fp8-e4m3 rowwise",
    "48x512x512 fp8-e4m3 tensorwise",
    "96x512x512 swiglu groups:4 gathered top:2",  # with the passes of experts, of Triton
    "96x512x256 groups:4",
    "64x64x33 float32 nn",  # of Gluon, as tuned on an H100
    "64x512x512 float32",  # of Triton, as tuned there
    "64x512x512 tf32",
    "64x512x512 to-float32",
    "64x256x512 nn batch:6",
)

# Torch quantizes what is multiplied first, so that its products depend on no kernel of Triton.
PROGRAM = """
import torch, outblas
from outblas.call import launcher
from outblas.torch_ops.quantize import by_torch

launcher.slower_reason = lambda problem, tune: None  # float32 products take kernels of the pack
torch.manual_seed(0)
CUDA = torch.device("cuda")
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
TYPES = torch.nn.functional.ScalingType
RECIPES = {
    "1x128": TYPES.BlockWise1x128,
    "128x128": TYPES.BlockWise128x128,
    "rowwise": TYPES.RowWise,
    "tensorwise": TYPES.TensorWise,
}
K, N = 512, 512

def random(*shape):
    return torch.randn(shape, device=CUDA).to(BF16)

def quantized(t, recipe):
    values, scale = by_torch(t, recipe, E4M3, False)
    wide = {"1x128": (1, 128), "128x128": (128, 128)}.get(recipe)
    spread = scale
    if wide is not None:
        spread = scale.repeat_interleave(wide[1], -1)
        spread = spread.repeat_interleave(wide[0], -2)
    return values, scale, values.float() * spread

def check(name, got, wanted):
    error = float((got.float() - wanted).norm() / wanted.norm())
    assert error < 0.01, (name, error)
    print(name, error)

def gated(x):
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up

a, w, bias = random(64, K), random(N, K), random(N)
check("linear", outblas.linear(a, w, bias), a.float() @ w.float().T + bias.float())

for of_a, of_b, fast in (
    ("1x128", "128x128", False), ("rowwise", "rowwise", True), ("tensorwise", "tensorwise", False)
):
    (x, s, wide), (y, t, wide_y) = quantized(a, of_a), quantized(w, of_b)
    added = bias if of_a == "tensorwise" else None
    recipes = RECIPES[of_a], RECIPES[of_b]
    got = outblas.scaled_mm(
        x, y.t(), s, recipes[0], t.t(), recipes[1], bias=added, use_fast_accum=fast
    )
    wanted = wide @ wide_y.T + (0 if added is None else added.float())
    check(of_a, got, wanted)

x, s, wide = quantized(random(256, K), "1x128")
y, t, wide_y = quantized(random(1024, K), "128x128")
values, scales = outblas.scaled_mm(
    *(x, y.t(), s, RECIPES["1x128"], t.t(), RECIPES["128x128"]),
    activation="swiglu",
    output_dtype=E4M3,
    out_recipe="1x128",
)
wanted = gated(wide @ wide_y.T)
near = values.float() * scales.repeat_interleave(128, 1)
assert float((near - wanted).norm() / wanted.norm()) < 0.05

ends = [10, 10, 40, 64]
offs = torch.tensor(ends, dtype=torch.int32, device=CUDA)
experts, index = random(4, N, K), torch.randperm(64, device=CUDA)

def by_group(rows, matrices):
    parts = [rows[i:j] @ m.T for i, j, m in zip([0, *ends], ends, matrices)]
    return torch.cat(parts)

check("groups", outblas.grouped_mm(a, experts.mT, offs=offs), by_group(a.float(), experts.float()))
got = outblas.grouped_mm(a, experts.mT, offs=offs, a_index=index, activation="swiglu")
check("gathered", got, gated(by_group(a.float()[index], experts.float())))
(x, s, wide), (y, t, wide_y) = quantized(a, "1x128"), quantized(experts, "128x128")
recipes = RECIPES["1x128"], RECIPES["128x128"]
got = outblas.scaled_grouped_mm(x, y.mT, s, recipes[0], t.mT, recipes[1], offs=offs)
check("fp8 groups", got, by_group(wide, wide_y))

# What Triton compiled before
small, tall = random(3, 33), random(33, 64)
check("portable", outblas.matmul(small, tall), small.float() @ tall.float())

within, tall = random(64, 512)[:, 4:504], random(500, N)
check("a slice", outblas.matmul(within, tall), within.float() @ tall.float())

got = outblas.matmul(a, w.T, out_dtype=torch.float32)
assert got.dtype == torch.float32
left, right = random(2, 3, 64, K), random(2, 3, K, 256)
check("a batch", outblas.matmul(left, right), left.float() @ right.float())
check("a wider result", got, a.float() @ w.float().T)

x, y = torch.randn(64, 33, device=CUDA), torch.randn(33, 64, device=CUDA)
check("gluon", outblas.matmul(x, y), x.double() @ y.double())
x, y = torch.randn(64, K, device=CUDA), torch.randn(N, K, device=CUDA)
check("float32", outblas.linear(x, y), x.double() @ y.double().T)
torch.set_float32_matmul_precision("high")
check("tf32", outblas.linear(x, y), x.double() @ y.double().T)
torch.set_float32_matmul_precision("highest")

few = random(48, K)
for recipe in ("1x128", "rowwise", "tensorwise"):
    values, scales = outblas.quantize(few, recipe)
    known, wanted = by_torch(few, recipe, E4M3, False)
    assert torch.equal(values.view(torch.uint8), known.view(torch.uint8)), recipe
    assert torch.equal(scales, wanted), recipe
layer = outblas.FP8Linear.from_linear(torch.nn.Linear(K, N, bias=False, dtype=BF16)).to(CUDA)
with torch.no_grad():
    _, _, wide = quantized(few, "1x128")
    spread = layer.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
    check("layer", layer(few), wide @ (layer.weight.float() * spread).T)

gate_up, down = random(4, 512, K) / 16, random(4, 512, 256) / 16
weights, chosen = torch.rand(48, 4, device=CUDA).softmax(-1).topk(2)
got = outblas.moe_mlp(few, gate_up.mT, down.mT, chosen, weights)
wanted = torch.zeros(48, 512, device=CUDA)
for token in range(48):
    for w, e in zip(weights[token], chosen[token].tolist()):
        inner = gated(few[token].float() @ gate_up[e].float().T)
        wanted[token] += w * (inner @ down[e].float().T)
check("experts", got, wanted)
"""


def gpu() -> str:
    machine = machines.of_device(torch.cuda.get_device_name())
    if machine is None:
        pytest.skip("no table lists this GPU")
    return machine.name


def check_served(pack: Path, folder: Path, *arguments: str) -> str:
    """Runs a program that may compile nothing, with a pack: no call goes to torch, and no cache is
    made. Returns what it printed.
    """
    how = {
        "OUTBLAS_PACK": str(pack),
        "OUTBLAS_COMPILE": "never",
        "OUTBLAS_STRICT": "1",
        "OUTBLAS_CACHE_DIR": str(folder / "none"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", *arguments],
        cwd=ROOT,
        env={**os.environ, **how},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (folder / "none").exists()
    return done.stdout


def test_products_of_all_kinds_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    build.build([parse_line(line) for line in LINES], tmp_path / "x", gpu=gpu())

    check_served(tmp_path / "x", tmp_path, PROGRAM)


# Operands are small integers, whose sums float32 holds: each result is rounded once, and torch's is
# the same bits.
PROGRAM_OF_MODEL = """
import sys
import torch, outblas
from outblas.call.products import parse_line

torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

def integers(*shape):
    return torch.randint(-2, 3, shape, device="cuda", dtype=torch.int8).bfloat16()

count = 0
for line in sys.argv[1:]:
    products = parse_line(line)
    weight = integers(products.N, products.K)
    for M in products.each_M():
        x = integers(M, products.K)
        expected = torch.mm(x, weight.t())
        for call in ("cold", "warm"):
            assert torch.equal(outblas.linear(x, weight), expected), (call, M, line)
        count += 1
print(count)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", LAYERS)
def test_every_number_of_rows_of_a_model_is_served(model: str, tmp_path: Path) -> None:
    """By a pack that is built without a GPU, with 1 to 512 rows."""
    path, products = tmp_path / "model.outblas", of_model(model, "1-512")
    command = [sys.executable, "-m", "outblas", "pack", "build", "--model", model]
    command += ["--rows", "1-512", "--gpu", gpu(), "-o", str(path)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=True)

    printed = check_served(path, tmp_path, PROGRAM_OF_MODEL, *map(str, products))

    assert int(printed) == 512 * len(products)
    assert not (tmp_path / "triton").exists()

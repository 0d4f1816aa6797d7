"""The packs of whole models, built without a GPU, serve every product of theirs at every number of
rows from 1 to 512, in a process that may compile nothing.

What first calls take above warm ones is printed, not asserted: `pytest -rP` shows it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.paths import ROOT

from outblas.base import machines
from outblas.base.shapes import LAYERS
from outblas.packing.products import of_model

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.slow, pytest.mark.timeout(900)]

ROWS = "1-512"

# Operands are small integers, whose sums float32 holds: each result is rounded once, and torch's is
# the same bits.
PROGRAM = """
import gc, json, sys, time
import torch, outblas
from outblas.core.products import parse_line

torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

def integers(*shape):
    return torch.randint(-2, 3, shape, device="cuda", dtype=torch.int8).bfloat16()

begun = collected = 0.0

def watch(phase, info):
    global begun, collected
    if phase == "start":
        begun = time.perf_counter()
    else:
        collected += 1e3 * (time.perf_counter() - begun)

gc.callbacks.append(watch)

def timed(x, weight):
    global collected
    collected = 0.0
    torch.cuda.synchronize()
    begin = time.perf_counter()
    y = outblas.linear(x, weight)
    torch.cuda.synchronize()
    return y, 1e3 * (time.perf_counter() - begin) - collected

very_first, later, collections = None, [], []
for line in sys.argv[1:]:
    products = parse_line(line)
    weight = integers(products.N, products.K)
    for M in products.each_M():
        x = integers(M, products.K)
        wanted = torch.mm(x, weight.t())
        got, cold = timed(x, weight)
        collections.append(collected)
        assert torch.equal(got, wanted), (M, products.N, products.K)
        again, warm = timed(x, weight)
        assert torch.equal(again, wanted), (M, products.N, products.K)
        if very_first is None:
            very_first = cold - warm
        else:
            later.append((round(cold - warm, 2), M, products.N, products.K))
later.sort()
print(json.dumps({
    "gpu": torch.cuda.get_device_name(),
    "products": 1 + len(later),
    "the very first, ms": round(very_first, 1),
    "median, ms": later[len(later) // 2][0],
    "99 of 100 at most, ms": later[len(later) * 99 // 100][0],
    "largest": later[-5:],
    "longest garbage collections in them, ms": sorted(round(ms) for ms in collections)[-5:],
}))
"""


@pytest.fixture(scope="module")
def cache_of_builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("model", LAYERS)
def test_a_model_is_served(model: str, cache_of_builds: Path, tmp_path: Path) -> None:
    machine = machines.of_device(torch.cuda.get_device_name())
    if machine is None:
        pytest.skip("no table lists this GPU")
    path, products = tmp_path / "model.outblas", of_model(model, ROWS)
    build = ["pack", "build", "--model", model, "--rows", ROWS, "--gpu", machine.name, "-o", path]
    run("-m", "outblas", *build, CUDA_VISIBLE_DEVICES="", OUTBLAS_CACHE_DIR=cache_of_builds)

    printed = run(
        *("-W", "error::RuntimeWarning", "-c", PROGRAM, *products),
        OUTBLAS_PACK=path,
        OUTBLAS_COMPILE="never",
        OUTBLAS_STRICT="1",
        OUTBLAS_CACHE_DIR=tmp_path / "none",
        TRITON_CACHE_DIR=tmp_path / "triton",
    )

    print(model, printed)
    assert json.loads(printed)["products"] == 512 * len(products)
    assert not (tmp_path / "none").exists()
    assert not (tmp_path / "triton").exists()


def run(*arguments: object, **environment: object) -> str:
    """Runs Python in a process of its own, and returns what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

"""The packs of whole models, built without a GPU, serve every product of theirs at every number of
rows from 1 to 512, in a process that may compile nothing.
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
from outblas.packing.products import of_model

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.slow, pytest.mark.timeout(900)]

ROWS = "1-512"

# Operands are small integers, whose sums float32 holds: each result is rounded once, and torch's is
# the same bits.
PROGRAM = """
import sys
import torch, outblas
from outblas.core.products import parse_line

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

    assert int(printed) == 512 * len(products)
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

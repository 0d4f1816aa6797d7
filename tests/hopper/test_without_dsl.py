"""Calls are planned, and kernels of a pack are loaded, in a process that imports no DSL."""

from pathlib import Path

import pytest
from support.fresh_torch import run_beside_torch

from outblas.base import pack
from outblas.call.products import parse_line
from outblas.packing import build

# What a process does at its first calls: it looks them up, plans them and loads their kernels, on
# an imagined H100. The arguments are a pack and lines of products.
PROGRAM = """
import contextlib
import sys
from dataclasses import replace
from types import SimpleNamespace

import torch


class Blocked:
    def find_spec(self, name, path, target=None):
        assert name.split(".")[0] not in ("cutlass", "triton"), f"{name} is imported"


sys.meta_path.insert(0, Blocked())
properties = SimpleNamespace(multi_processor_count=132, name="NVIDIA H100 80GB HBM3")
torch.version.cuda = "13.0"
torch.cuda.device = contextlib.nullcontext
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.get_device_properties = lambda *_: properties
torch.cuda.is_current_stream_capturing = lambda: False

import outblas
from outblas.autotune.search import gpu as gpus
from outblas.call import launcher
from outblas.call.products import parse_line
from outblas.hopper import grouped
from outblas.hopper.gemm import group_host
from outblas.hopper.parts import compile, tile_order
from outblas.packing import examples

tile_order.kept = lambda *_: torch.zeros(1, dtype=torch.int32)
gpus.current = lambda *_: gpus.imagined("H100")
outblas.load_pack(sys.argv[1])
device = torch.device("cuda", 0)
for line in sys.argv[2:]:
    products = parse_line(line)
    if products.groups is None:
        for problem in examples.problems(products):
            for tune in ("lookup", "off"):
                launcher.best_launcher(replace(problem, device=device), tune, no_product=False)
    else:
        for problem in examples.grouped_problems(products, products.groups):
            assert grouped.unsupported(problem) is None
            group_host.launch(replace(problem, device=device), None)
kernel = next(iter(compile._loaded.values()))
try:
    kernel(1)
except TypeError as error:
    print(len(compile._loaded), "parameters" in str(error))
"""
LINES = (
    "4096x4096x4096 bfloat16 nt bias",
    "4096x4096x4096 fp8-e4m3 rowwise",
    "4096x4096x4096 groups:8",
)


@pytest.mark.compile
@pytest.mark.long
def test_a_packed_kernel_is_launched_without_a_dsl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "three.outblas"
    build.build([parse_line(line) for line in LINES], path, jobs=1)
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("OUTBLAS_COMPILE", "never")

    done = run_beside_torch(PROGRAM, str(path), *LINES)

    assert done.returncode == 0, done.stderr
    kernels = [each for each in pack.read(path).objects.values() if "hopper" in each.kernel]
    assert len(kernels) >= len(LINES)
    assert done.stdout.split() == [str(len(kernels)), "True"]  # and one checks its arguments

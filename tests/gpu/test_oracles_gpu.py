"""Every kernel on a GPU: the oracles over the whole matrix of cases, streams, graphs, calls that
name no kernel, cold starts.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import outblas
from outblas.base import registry
from outblas.base.shapes import LAYOUTS
from outblas.kernels.portable import CANDIDATES
from outblas.verify import cases
from outblas.verify.cases import Case
from outblas.verify.kernels import Refused, check, oracles

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
SIMT = [kernel.name for kernel in registry.ladder("simt")]
HOPPER = [kernel.name for kernel in registry.ladder("hopper")]
# Tiles around whose edges the cases lie; of a cluster, where there are clusters.
TILES = {
    "portable": (128, 128, 64),
    "hopper.tma_wgmma": (64, 64, 64),
    "hopper.large_tile": (128, 128, 64),
    "hopper.warp_specialized": (128, 128, 64),
    "hopper.two_consumers": (128, 256, 64),
    "hopper.persistent": (128, 256, 64),
    "hopper.lean_barriers": (128, 256, 64),
}
CLUSTER_TILE = (256, 256, 64)


def cases_of(kernel: registry.Kernel, dtype: torch.dtype) -> Iterator[Case]:
    """All around a kernel's tile; of a CUDA-core rung's 16-bit operands, which are widened on the
    way, a few.
    """
    if kernel.ladder not in ("simt", "turing"):
        return cases.full(dtype, *TILES.get(kernel.name, CLUSTER_TILE))
    if kernel.ladder == "simt" and dtype is not FP32:
        return cases.quick(dtype)
    config = registry.load(kernel.name).Config()
    block_k = config.block_k if kernel.ladder == "turing" else max(8, 2 * config.block_k)
    return cases.full(dtype, config.block_m, config.block_n, block_k)


def tma_takes(case: Case) -> bool:
    """Whether TMA can stride over A and B, said independently of the kernel's own rule."""
    if case.addend or (case.batch_a and case.batch_b) or case.batch_b or case.offset % 8:
        return False
    if case.batch_a and (case.layout[0] == "t" or case.pad):
        return False  # rows of consecutive matrices do not follow at one stride
    stored = (
        ((case.M, case.K), case.layout[0], case.expand == "a"),
        ((case.K, case.N), case.layout[1], case.expand == "b"),
    )
    for shape, letter, expanded in stored:
        outer, inner = shape if letter == "n" else shape[::-1]
        if outer > 1 and not expanded and (inner + case.pad) % 8:
            return False
    return True


MATRIX = [
    pytest.param(
        kernel.name, dtype, layout, marks=[pytest.mark.sm90] if kernel.ladder == "hopper" else []
    )
    for kernel in registry.ladder()
    for dtype, layout in itertools.product(kernel.dtypes, LAYOUTS)
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kernel", "dtype", "layout"), MATRIX)
def test_oracles(kernel: str, dtype: str, layout: str) -> None:
    faults = []
    for case in cases_of(registry.find(kernel), getattr(torch, dtype)):
        if case.layout != layout:
            continue
        for oracle in oracles(kernel):
            must_be_refused = kernel in SIMT and case.tf32
            try:
                result = check(kernel, case, oracle)
            except Refused as refusal:
                if not must_be_refused and not (kernel in HOPPER and not tma_takes(case)):
                    faults.append(f"{case} is refused: {refusal}")
                break
            if must_be_refused or not result.ok:
                faults.append(f"{case} {oracle}: {result.message}")
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults[:10])


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("config", CANDIDATES, ids=str)
def test_every_portable_config_runs_or_says_why_not(config: Any, dtype: torch.dtype) -> None:
    shape = config.block_m + 9, 2 * config.block_n - 3, 3 * config.block_k + 8
    try:
        result = check("portable", Case(*shape, dtype, layout="nt"), config=config)
    except Refused as refusal:
        assert "shared memory" in str(refusal)
        return

    assert result.ok, result.message


# ---- streams and graphs
TURING = [kernel.name for kernel in registry.ladder("turing")]
KERNELS = [
    *map(pytest.param, ("portable", *SIMT, *TURING)),
    *(pytest.param(name, marks=pytest.mark.sm90) for name in HOPPER),
]


@pytest.mark.parametrize("kernel", KERNELS)
def test_runs_on_the_current_stream(kernel: str) -> None:
    a, b = (torch.randn(512, 512, device="cuda").bfloat16() for _ in range(2))
    expected = outblas.matmul(a, b, kernel=kernel)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(a)
    torch.cuda.synchronize()

    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(a)
        result = outblas.matmul(late, b, kernel=kernel)
    stream.synchronize()

    assert torch.equal(result, expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_captured_where_operands_lie_elsewhere_in_lines(kernel: str) -> None:
    flat = torch.randint(-3, 4, (2, 2**22 + 64), device="cuda").to(BF16)
    out = torch.empty(2048, 2048, device="cuda")
    (a, b), (x, y) = (
        [row[start : start + 2**22].view(2048, 2048) for row in flat] for start in (0, 8)
    )
    outblas.matmul(a, b.t(), out=out, out_dtype=FP32, kernel=kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outblas.matmul(x, y.t(), out=out, out_dtype=FP32, kernel=kernel)

    for _ in range(2):
        x.copy_(x.flip(0))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, x.float() @ y.float().t())


@pytest.mark.parametrize("kernel", KERNELS)
def test_deterministic_alone_and_beside_other_streams(kernel: str) -> None:
    result = check(kernel, Case(1000, 520, 2048, BF16, layout="nt"), "determinism")

    assert result.ok, result.message


@pytest.mark.usefixtures("float32_by_kernels")
def test_fp32_is_rounded_to_tf32_where_and_while_torch_allows_it() -> None:
    before = torch.get_float32_matmul_precision()
    a, b = (torch.randn(512, 512, device="cuda") for _ in range(2))
    exact, errors = a.double() @ b.double(), []
    try:
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            errors.append(float((outblas.matmul(a, b) - exact).norm() / exact.norm()))
    finally:
        torch.set_float32_matmul_precision(before)

    assert max(errors[0], errors[2]) < 1e-6
    assert 1e-5 < errors[1] < 2e-3


# ---- cold starts
@pytest.mark.sm90
@pytest.mark.parametrize("kernel", ["hopper.tma_wgmma", "hopper.gemm"])
def test_a_process_with_a_warm_cache_compiles_nothing(kernel: str, tmp_path: Path) -> None:
    code = f"""
import torch, outblas
from outblas.base import cache
fetch, built = cache.fetch, []
def counted(facts, *, build, **functions):
    return fetch(facts, build=lambda: built.append(facts) or build(), **functions)
cache.fetch = counted
a = torch.randn(64, 64, device="cuda").bfloat16()
out = outblas.matmul(a, a, kernel="{kernel}")
torch.cuda.synchronize()
print(len(built))
"""
    environment = {**os.environ, "OUTBLAS_CACHE_DIR": str(tmp_path / "cache")}

    outputs = [
        subprocess.check_output([sys.executable, "-c", code], env=environment) for _ in range(3)
    ]

    assert int(outputs[0]) > 0
    assert [int(output) for output in outputs[1:]] == [0, 0]

"""SMs that products leave free on a GPU: results are those of the whole GPU, and grids, as the
profiler sees them, are no larger than what is left.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fp8 import with_recipes
from support.scaled_tiles import ScaledProduct

import outblas

Tensor = torch.Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.timeout(600)]

COUNTS = 1, 16, 32, 100
Call = Callable[[], Tensor]


def sms() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def integers(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape, device="cuda").bfloat16()


def product(M: int, N: int, K: int) -> Call:
    a, b = integers(M, K), integers(N, K).t()
    return lambda: outblas.matmul(a, b)


def scaled() -> Call:
    scaled_mm: Any = outblas.scaled_mm
    operands = with_recipes(*ScaledProduct(3000, 1024, 640).operands)
    return lambda: scaled_mm(*operands, output_dtype=torch.float32)


def experts() -> Call:
    a, b = integers(3000, 640), integers(8, 1024, 640).mT
    offs = torch.tensor([0, 500, 501, 1200, 1800, 2400, 2999, 3000], device="cuda").int()
    return lambda: outblas.grouped_mm(a, b, offs=offs)


CALLS: dict[str, Callable[[], Call]] = {
    "several waves": lambda: product(4096, 4096, 512),
    "one wave": lambda: product(1024, 1024, 1024),
    "few rows": lambda: product(16, 4096, 4096),
    "a long K": lambda: product(256, 256, 16384),
    "scales of blocks": scaled,
    "groups": experts,
}


def largest_grid(call: Callable[[], Tensor | None], path: Path) -> int:
    """The most CTAs of a kernel that a call starts."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    grids = [math.prod(e["args"]["grid"]) for e in events if e.get("cat") == "kernel"]
    assert grids, "the profiler saw no kernel"
    return max(grids)


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_the_whole_gpu_and_grids_are_what_is_left(
    name: str, tmp_path: Path
) -> None:
    call = CALLS[name]()
    expected = call()
    for count in COUNTS:
        with outblas.sm_carveout(count):
            assert torch.equal(call(), expected), count
            if name in ("several waves", "scales of blocks", "groups"):
                assert largest_grid(call, tmp_path / "trace.json") <= sms() - count
    assert torch.equal(call(), expected)


def test_one_call_is_limited(tmp_path: Path) -> None:
    a, b = integers(4096, 512), integers(4096, 512).t()
    expected = outblas.matmul(a, b)

    assert torch.equal(outblas.matmul(a, b, sms=100), expected)
    assert largest_grid(lambda: outblas.matmul(a, b, sms=100), tmp_path / "limited.json") <= 100
    assert largest_grid(lambda: outblas.matmul(a, b), tmp_path / "whole.json") > 100


def test_a_graph_keeps_the_carveout_of_its_capture(tmp_path: Path) -> None:
    call = CALLS["several waves"]()
    expected = call()
    with outblas.sm_carveout(32):
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call()
    y.fill_(torch.nan)

    assert largest_grid(graph.replay, tmp_path / "trace.json") <= sms() - 32
    assert torch.equal(y, expected)

"""SMs that products leave free on a GPU: results are those of the whole GPU, and grids, as the
profiler sees them, are no larger than what is left.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.fp8 import BY_ROW, SQUARE, block_scale, fp8_operands

import outblas

Tensor = torch.Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.timeout(600)]

COUNTS = 1, 16, 32, 100


def integers(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape, device="cuda").bfloat16()


def product(M: int, N: int, K: int) -> Callable[[], Tensor]:
    a, b = integers(M, K), integers(N, K).t()
    return lambda: outblas.matmul(a, b)


def scaled() -> Callable[[], Tensor]:
    M, N, K = 3000, 1024, 640
    a, b = fp8_operands(M, N, K, device="cuda", most=1)
    of_a = block_scale(M, K, BY_ROW, "by columns", "cuda")
    of_b = block_scale(N, K, SQUARE, device="cuda").t()
    return lambda: outblas.scaled_mm(a, b, of_a, of_b, out_dtype=torch.float32)


def experts() -> Callable[[], Tensor]:
    a, b = integers(3000, 640), integers(8, 1024, 640).mT
    offs = torch.tensor([0, 500, 501, 1200, 1800, 2400, 2999, 3000], device="cuda").int()
    return lambda: outblas.grouped_mm(a, b, offs=offs)


CALLS: dict[str, Callable[[], Callable[[], Tensor]]] = {
    "several waves": lambda: product(4096, 4096, 512),
    "one wave": lambda: product(1024, 1024, 1024),
    "few rows": lambda: product(16, 4096, 4096),
    "a long K": lambda: product(256, 256, 16384),
    "scales of blocks": scaled,
    "groups": experts,
}


def grids(call: Callable[[], Tensor], path: Path) -> list[int]:
    """The number of CTAs of each kernel that a call starts."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as seen:
        call()
        torch.cuda.synchronize()
    seen.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    shapes = [e["args"]["grid"] for e in events if e.get("cat") == "kernel"]
    return [x * y * z for x, y, z in shapes]


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_the_whole_gpu(name: str) -> None:
    call = CALLS[name]()
    expected = call()

    for count in COUNTS:
        with outblas.sm_carveout(count):
            assert torch.equal(call(), expected), count
    assert torch.equal(call(), expected)


@pytest.mark.parametrize("name", ["several waves", "scales of blocks", "groups"])
def test_a_product_occupies_no_more_sms_than_are_left(name: str, tmp_path: Path) -> None:
    call = CALLS[name]()
    present = torch.cuda.get_device_properties(0).multi_processor_count
    for count in COUNTS:
        with outblas.sm_carveout(count):
            call()
            found = grids(call, tmp_path / "trace.json")

        assert found, "the profiler saw no kernel"
        assert max(found) <= present - count


def test_one_call_is_limited(tmp_path: Path) -> None:
    a, b = integers(4096, 512), integers(4096, 512).t()
    expected = outblas.matmul(a, b)
    outblas.matmul(a, b, sms=100)

    found = grids(lambda: outblas.matmul(a, b, sms=100), tmp_path / "trace.json")

    assert max(found) <= 100
    assert torch.equal(outblas.matmul(a, b, sms=100), expected)
    assert max(grids(lambda: outblas.matmul(a, b), tmp_path / "trace.json")) > 100


def test_a_graph_keeps_the_carveout_of_its_capture(tmp_path: Path) -> None:
    call = CALLS["several waves"]()
    expected = call()
    present = torch.cuda.get_device_properties(0).multi_processor_count
    with outblas.sm_carveout(32):
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call()

    def replay() -> Tensor:
        graph.replay()
        return y

    found = grids(replay, tmp_path / "trace.json")

    assert max(found) <= present - 32
    assert torch.equal(y, expected)

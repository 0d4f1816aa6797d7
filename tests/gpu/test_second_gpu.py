"""Calls whose operands lie on a GPU that is not the current one: their first call, warm calls, the
stream that they join, and graphs. Results are those of the other GPU.
"""

import pytest
import torch
from support.every_function import CALLS, calls, same_bits

import outblas
from outblas.base import registry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.timeout(280),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

BF16 = torch.bfloat16
EVERY = [
    *((name, False) for name in CALLS),
    *((name, True) for name, call in CALLS.items() if call.has_gradients),
]
every_call = pytest.mark.parametrize(("name", "training"), EVERY)


@pytest.mark.parametrize("current", [0, 1])
@every_call
def test_results_are_those_of_the_other_gpu(name: str, training: bool, current: int) -> None:
    """The first call of a process on a GPU, and warm ones."""
    other = torch.device("cuda", 1 - current)
    with torch.cuda.device(current):
        expected = calls(32, f"cuda:{current}", BF16)[name].results(training)
        call = calls(32, str(other), BF16)[name]

        for _ in range(3):
            results = call.results(training)
            assert {result.device for result in results} == {other}
            assert same_bits(results, expected)
        assert torch.cuda.current_device() == current


@pytest.mark.parametrize("current", [0, 1])
def test_operators_that_enable_takes_have_the_same_results(current: int) -> None:
    with torch.cuda.device(current):
        results = []
        for device in (current, 1 - current):
            bias, a, b = calls(32, f"cuda:{device}", BF16)["addmm"].operands
            with outblas.enable(min_gain=0):
                out = torch.empty(a.shape[0], b.shape[1], device=a.device, dtype=BF16)
                results.append([torch.addmm(bias, a, b), torch.mm(a, b, out=out), a[None] @ b])

    assert same_bits(*results)


@every_call
def test_a_call_joins_the_stream_that_is_current_on_the_gpu_of_its_operands(
    name: str, training: bool
) -> None:
    """It has work that the operands wait for."""
    call = calls(32, "cuda:1", BF16)[name]
    call.results(training)
    side = torch.cuda.Stream("cuda:1")
    torch.cuda.synchronize(1)

    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        call.change()
        with torch.cuda.device(0):
            results = call.results(training)
    side.synchronize()

    assert same_bits(results, call.results(training))


@every_call
def test_graphs_of_the_second_gpu(name: str, training: bool) -> None:
    call = calls(32, "cuda:1", BF16)[name]
    with torch.cuda.device(1):
        outblas.warmup(call.results, training)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call.results(training)
        call.change()
        graph.replay()

        assert same_bits(captured, call.results(training))


@pytest.mark.parametrize("kernel", [kernel.name for kernel in registry.ladder()])
def test_every_kernel_runs_on_the_gpu_of_its_operands(kernel: str) -> None:
    results = []
    for device in ("cuda:0", "cuda:1"):
        a, b = (t[..., :128, :128] for t in calls(32, device, BF16)["matmul"].operands)
        with torch.cuda.device(0):
            results.append(outblas.matmul(a.contiguous(), b.contiguous(), kernel=kernel))

    assert same_bits(results[:1], results[1:])

"""Every public function on a GPU, forward and backward, by its default kernel and by named ones:
CUDA graphs, streams, equal bits, no synchronisation.
"""

from typing import Any

import pytest
import torch
from support.every_function import CALLS, FunctionCall, calls, same_bits

import outblas

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SIZE = 32
HOPPER = {
    "matmul": "hopper.gemm",
    "matmul of a batch": "hopper.gemm",
    "addmm": "hopper.gemm",
    "linear with an epilogue": "hopper.gemm",
    "grouped_mm": "hopper.grouped",
    "grouped_mm of terms": "hopper.grouped",
    "grouped_mm with counts": "hopper.grouped",
    "scaled_grouped_mm": "hopper.grouped",
}
FORWARD = [
    *((name, None, False) for name in CALLS),
    *(pytest.param(name, kernel, False, marks=pytest.mark.sm90) for name, kernel in HOPPER.items()),
]
BACKWARD = [(name, None, True) for name, call in CALLS.items() if call.has_gradients]
every_call = pytest.mark.parametrize(("name", "kernel", "training"), [*FORWARD, *BACKWARD])


@pytest.fixture
def call(name: str, kernel: str | None) -> FunctionCall:
    """The call in 16 bits, or in fp8, with tensors of its own."""
    call = calls(SIZE, "cuda", torch.bfloat16)[name]
    return call.with_options(kernel=kernel) if kernel else call


@every_call
def test_a_graph_takes_what_its_tensors_hold_when_it_is_replayed(
    call: FunctionCall, training: bool
) -> None:
    outblas.warmup(call.results, training)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call.results(training)

    for _ in range(3):
        call.change()
        for result in captured:
            result.fill_(torch.nan)
        graph.replay()

        assert same_bits(captured, call.results(training))


@every_call
def test_a_call_joins_the_current_stream(call: FunctionCall, training: bool) -> None:
    for _ in range(2):
        call.results(training)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()

    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        call.change()
        results = call.results(training)
    stream.synchronize()

    assert same_bits(results, call.results(training))


@every_call
def test_equal_calls_have_equal_bits(call: FunctionCall, training: bool) -> None:
    first = call.results(training)

    for _ in range(10):
        assert same_bits(call.results(training), first)


OURS: list[Any] = [
    ("moe_mlp", None, True),
    *(entry for entry in FORWARD[: len(CALLS)] if "by a kernel" in entry[0]),
    *FORWARD[len(CALLS) :],
]


@pytest.mark.parametrize(("name", "kernel", "training"), OURS)
def test_a_call_never_waits_for_the_gpu(call: FunctionCall, training: bool) -> None:
    call.results(training)
    torch.cuda.synchronize()

    torch.cuda.set_sync_debug_mode("error")
    try:
        call.results(training)
    finally:
        torch.cuda.set_sync_debug_mode("default")

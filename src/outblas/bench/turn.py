"""One provider at one shape, ready to be timed: eagerly, inside a CUDA graph, and the host's part
of a call.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

SHORT_US = 100.0  # calls shorter than this are timed inside a CUDA graph
GRAPH_US = 1000.0  # duration of one replay
CALLS = 8  # per burst
FOREIGN_ELEMENTS = 1 << 16
ROUGH_CALLS = 16
HOST_SHARE = 0.5  # of a call's time, in which a host that keeps up makes the next one
_LONGEST_GRAPH = 400
_HOST_SECONDS = 0.2

Call = Callable[[], object]
WeightCall = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class Batch:
    """`calls` calls of one provider, enqueued by `run()`. `holds`: memory that they use and that
    nothing else keeps alive.
    """

    run: Call
    calls: int
    holds: tuple[torch.Tensor, ...] = ()


def eager(calls: Sequence[Call]) -> Batch:
    """Enqueues the calls one by one."""

    def run() -> None:
        for call in calls:
            call()

    return Batch(run, len(calls))


def graph(calls: Sequence[Call]) -> Batch:
    """Captures the calls in one CUDA graph, so that the host does nothing between them.

    They have run before, because compiling, loading and autotuning are not allowed in a capture.
    """
    captured = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(captured):
        for call in calls:
            call()
    captured.replay()
    torch.cuda.synchronize()
    return Batch(captured.replay, len(calls))


def graph_apart(call: Call | None, calls: int) -> Batch:
    """Captures a call repeatedly, with a small foreign kernel before each; without a call, only the
    foreign kernels.

    Kernels that overlap with their own next launch cannot overlap with a foreign one.
    """
    block = torch.zeros(FOREIGN_ELEMENTS, device="cuda")

    def foreign() -> object:
        return block.add_(1.0)

    captured = graph([foreign, call] * calls if call else [foreign] * calls)
    return Batch(captured.run, calls, (block,))


def graph_calls(us: float) -> int:
    """Returns how many calls of this many µs make a graph."""
    return min(max(CALLS, math.ceil(GRAPH_US / us)), _LONGEST_GRAPH)


def rough_us(call: Call) -> float:
    """Returns roughly how many µs a call takes on the device, enough to choose a protocol and the
    number of calls in a graph.

    Where calls are short, or the host takes long to make them, the device may wait for the host if
    they are eager. A slow host would otherwise pass for a long call, and a graph would hold so few
    calls that its own launch counted as a part of each.
    """
    call()
    torch.cuda.synchronize()
    us, enqueued = min(_elapsed(eager([call] * 4)) for _ in range(3))
    if us > SHORT_US and enqueued < HOST_SHARE * us:
        return us
    return elapsed_us(graph([call] * ROUGH_CALLS))


def elapsed_us(batch: Batch) -> float:
    """Returns the µs per call by CUDA events around one batch; waits for the device."""
    return _elapsed(batch)[0]


def _elapsed(batch: Batch) -> tuple[float, float]:
    """Returns the µs per call of one batch, and those that the host takes to make it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    begun = time.perf_counter()
    batch.run()
    enqueued = (time.perf_counter() - begun) * 1e6 / batch.calls
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000 / batch.calls, enqueued


def host_us(call: Call, us: float) -> float:
    """Returns the median µs that the host spends in an eager call of about `us` µs on the device.

    The device stays behind, and so few calls are queued that the host never waits for it.
    """
    calls = max(5, min(200, int(_HOST_SECONDS * 1e6 / max(us, 1.0))))
    torch.cuda.synchronize()
    for _ in range(3):
        call()
    times = []
    for _ in range(calls):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6

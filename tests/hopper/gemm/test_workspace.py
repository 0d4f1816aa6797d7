"""The memory of partial sums: one workspace for each stream, whatever host threads, streams and
contexts do.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import stream_model
from support.stream_model import POOL, SCENES, seen_by_torch

from outblas.device import driver
from outblas.hopper.gemm import workspace

SEEDS = 60


# ---- many threads, streams and contexts
@pytest.mark.parametrize("scene", SCENES)
def test_no_two_streams_share_and_nothing_is_freed_early(
    scene: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(SEEDS):
        faults = stream_model.play(monkeypatch, scene, seed)
        assert not faults, f"seed {seed}"


# ---- one thread
class FakeTensor:
    """A tensor that is its size, and the streams that were recorded for it."""

    def __init__(self, elements: int) -> None:
        self.elements = elements
        self.recorded: list[Any] = []

    def numel(self) -> int:
        return self.elements

    def record_stream(self, stream: Any) -> None:
        self.recorded.append(stream)


class FakeGpu:
    """What `get_workspace` sees of a GPU.

    stream: the current one. capturing: whether it captures a graph. allocated: sums and counters of
    each workspace, in the order in which they were made. kept: how many of them live for good.
    """

    def __init__(self) -> None:
        self.stream, self.capturing = seen_by_torch(POOL), False
        self.allocated: list[tuple[FakeTensor, ...]] = []
        self.kept = 0

    def tensors(self, index: int, *sizes: int) -> tuple[FakeTensor, ...]:
        self.allocated.append(tuple(FakeTensor(elements) for elements in sizes))
        return self.allocated[-1]

    def for_good(self, device: torch.device, make: Callable[[], Any]) -> Any:
        self.kept += 1
        return make()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A GPU without memory, on which no workspace was made, current on a stream of torch's pool."""
    fake = FakeGpu()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index=None: fake.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(workspace, "_tensors", fake.tensors)
    monkeypatch.setattr(workspace.driver, "for_good", fake.for_good)
    monkeypatch.setattr(workspace, "_workspaces", {})
    monkeypatch.setattr(driver, "stream_id", lambda handle: None)
    monkeypatch.setattr(driver, "context", lambda: None)
    return fake


def test_a_workspace_that_is_large_enough_is_used_again(gpu: FakeGpu) -> None:
    first = workspace.get_workspace(0, 100, 10)

    assert workspace.get_workspace(0, 60, 10) is first
    assert (len(gpu.allocated), gpu.kept) == (1, 1)


def test_a_larger_workspace_shrinks_in_neither_part(gpu: FakeGpu) -> None:
    """Parts grow to powers of two, so that few calls wait for a larger one."""
    workspace.get_workspace(0, 100, 10)

    larger = workspace.get_workspace(0, 50, 20)

    assert (larger.sums.numel(), larger.counters.numel()) == (128, 32)
    assert workspace.get_workspace(0, 128, 32) is larger
    assert (len(gpu.allocated), gpu.kept) == (2, 2)


def test_the_allocator_is_told_which_stream_uses_a_workspace(gpu: FakeGpu) -> None:
    workspace.get_workspace(0, 100, 10)

    ((sums, counters),) = gpu.allocated
    assert sums.recorded == [gpu.stream]
    assert counters.recorded == [gpu.stream]


def capture_a_graph(gpu: FakeGpu) -> None:
    gpu.capturing = True


def use_an_unknown_stream(gpu: FakeGpu) -> None:
    """The driver cannot tell which stream this handle is."""
    gpu.stream = SimpleNamespace(cuda_stream=4096, stream_id=4096)


@pytest.mark.parametrize("arrange", [capture_a_graph, use_an_unknown_stream])
def test_a_call_that_others_may_run_beside_has_memory_of_its_own(
    gpu: FakeGpu, arrange: Callable[[FakeGpu], None]
) -> None:
    """That of a graph, which may run beside anything later, or of a stream that cannot be told from
    others.
    """
    arrange(gpu)

    workspace.get_workspace(0, 100, 10)

    ((sums, counters),) = gpu.allocated
    assert (gpu.kept, workspace._workspaces) == (0, {})
    assert not sums.recorded
    assert not counters.recorded


def test_counters_begin_at_zero_whatever_the_memory_held(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(
        device=lambda *_: torch.device("cpu"),
        cuda=SimpleNamespace(
            current_stream=lambda index: None, is_current_stream_capturing=lambda: True
        ),
        **{name: getattr(torch, name) for name in ("empty", "zeros", "float32", "int32")},
    )
    monkeypatch.setattr(workspace, "torch", memory)
    torch.use_deterministic_algorithms(True)  # new memory is filled then, with other than zeros
    try:
        lent = workspace.get_workspace(0, floats=8, counters=64)
    finally:
        torch.use_deterministic_algorithms(False)

    assert lent.counters.tolist() == [0] * 64

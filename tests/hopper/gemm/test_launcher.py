"""What a call of hopper.gemm hands to its compiled kernel, on a machine without a GPU."""

import contextlib
import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.gemm_problems import (
    RESIDENT_CLUSTERS,
    SMALL_TILE,
    KernelArguments,
    gemm_config,
    kernel_arguments,
    numbered,
    record_launches,
)

from outblas.call.epilogue import EpilogueArgs
from outblas.call.problem import problem
from outblas.hopper import gemm
from outblas.hopper.gemm import workspace
from outblas.hopper.parts import compile, tile_order
from outblas.hopper.parts.config import HopperConfig

CONFIG = gemm_config(f"{SMALL_TILE},tile_n=16,gpc_local=False")
SWAPPED = gemm_config(f"{SMALL_TILE},tile_n=16,gpc_local=False,swap_ab=True")
each_order = pytest.mark.parametrize(
    "config", [CONFIG, SWAPPED], ids=["own order", "swapped operands"]
)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[KernelArguments]:
    """What each launch hands to the compiled kernel, for which a recorder stands."""
    return record_launches(monkeypatch)


@each_order
@pytest.mark.parametrize("batch", [(), (3,)], ids=["a matrix", "a batch"])
def test_a_call_hands_over_its_own_tensors(
    batch: tuple[int, ...], config: HopperConfig, launches: list[KernelArguments]
) -> None:
    """Views of them in every call would cost the host 8 µs."""
    a, b = torch.empty(*batch, 64, 72), torch.empty(*batch, 40, 72).mT
    out = torch.empty(*batch, 64, 40)

    gemm.plan(problem(a, b, out), config)(a, b, None, out, 1.0, 0.0)

    (launch,) = launches
    first, second = (b, a) if config.swap_ab else (a, b)
    assert launch.a is first
    assert launch.b is second
    assert launch.out is out


def test_copies_are_handed_over_in_place_of_operands(launches: list[KernelArguments]) -> None:
    a, b, out = numbered(64, 63), numbered(63, 40), numbered(64, 40)

    gemm.plan(problem(a, b, out), CONFIG)(a, b, None, out, 1.0, 0.0)

    (launch,) = launches
    assert torch.equal(launch.a, a)
    assert launch.a.stride() == (64, 1)
    assert launch.b is b
    assert launch.out is out


@pytest.mark.parametrize(("rows_of_k", "is_ready"), [(72, True), (71, False)])
def test_weights_that_the_call_copies_first_are_not_ready(
    rows_of_k: int, is_ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_launches(monkeypatch)
    loaded: list[Any] = []
    load = compile.load

    def recording(variant: Any, made: Any) -> Any:
        loaded.append(variant)
        return load(variant, made)

    monkeypatch.setattr(compile, "load", recording)
    a, b, out = torch.empty(64, 72), torch.empty(40, rows_of_k).t(), torch.empty(64, 40)
    config = replace(CONFIG, pdl=True, weights_ready=True)

    gemm.plan(problem(a[:, :rows_of_k], b, out), config)

    assert [variant.config.weights_ready for variant in loaded] == [is_ready]
    assert all(variant.config.pdl for variant in loaded)


@each_order
def test_two_batch_dimensions_are_a_launch_for_each_index_of_the_shorter(
    config: HopperConfig, launches: list[KernelArguments]
) -> None:
    """No stride of B walks both dimensions. Tensors that the call does not have stay None."""
    a, b = numbered(2, 3, 64, 72), numbered(3, 2, 40, 72).transpose(0, 1).mT
    out, residual = numbered(2, 3, 64, 40), numbered(2, 3, 64, 40)
    given = problem(a, b, out, extra=EpilogueArgs(residual=residual))

    gemm.plan(given, config)(a, b, None, out, 1.0, 0.0, None, residual, None)

    first, second = (b, a) if config.swap_ab else (a, b)
    assert len(launches) == 2
    for i, launch in enumerate(launches):
        assert torch.equal(launch.a, first[i]), f"launch {i}"
        assert torch.equal(launch.b, second[i]), f"launch {i}"
        assert torch.equal(launch.out, out[i]), f"launch {i}"
        assert torch.equal(launch.epilogue.pop("residual"), residual[i]), f"launch {i}"
        assert set(launch.epilogue.values()) == {None}, f"launch {i}"


class FakeEvent:
    """Notes on which stream it is recorded."""

    def __init__(self, steps: list[Any]) -> None:
        self.steps = steps

    def record(self, stream: Any) -> None:
        self.steps.append(("recorded on", stream))

    def query(self) -> bool:
        """It has passed. A workspace that outlives its test may be freed in another."""
        return True


class WorkspaceWatcher:
    """Lends workspaces, and stands for the compiled kernel that takes them.

    `steps` has what happened, in its order. `error`: what the launch raises.
    """

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.error: Exception | None = None
        self.lent: weakref.ref[workspace.Workspace] | None = None

    def get_workspace(self, index: int, floats: int, counters: int) -> workspace.Workspace:
        lent = workspace.Workspace(
            torch.empty(floats), torch.empty(counters), FakeEvent(self.steps), "its stream"
        )
        self.lent = weakref.ref(lent)
        return lent

    def run(self, *given: Any) -> None:
        gc.collect()
        lent, launch = self.lent(), kernel_arguments(*given)
        assert lent is not None, "the workspace is gone before the launch"
        assert (launch.sums, launch.counters) == (lent.sums, lent.counters)
        self.steps.append("enqueued")
        if self.error:
            raise self.error


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkspaceWatcher]:
    """Lends the workspaces of a call and sees how they are used. Those that were let go of wait for
    no event afterwards.
    """
    watcher = WorkspaceWatcher()
    monkeypatch.setattr(tile_order, "clusters", lambda *_: RESIDENT_CLUSTERS)
    monkeypatch.setattr(compile, "load", lambda *_: watcher.run)
    monkeypatch.setattr(workspace, "get_workspace", watcher.get_workspace)
    yield watcher
    workspace._retired.clear()


@pytest.mark.parametrize("error", [None, RuntimeError("no launch")])
def test_the_event_of_a_workspace_is_recorded_after_the_launch(
    error: Exception | None, watcher: WorkspaceWatcher
) -> None:
    """It is held until the launch is enqueued, and then its event is recorded, whatever came of the
    launch: another thread may have replaced it meanwhile.
    """
    config = gemm_config(f"{SMALL_TILE},tile_n=16,gpc_local=False,split_k=4,k_serpentine=False")
    a, b, out = torch.empty(64, 512), torch.empty(40, 512).t(), torch.empty(64, 40)
    watcher.error = error

    with pytest.raises(RuntimeError, match="no launch") if error else contextlib.nullcontext():
        gemm.plan(problem(a, b, out), config)(a, b, None, out, 1.0, 0.0)

    assert watcher.steps == ["enqueued", ("recorded on", "its stream")]

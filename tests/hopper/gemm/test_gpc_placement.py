"""Tiles assigned to CTAs by the GPC that they run in: neighbours to the SMs of one GPC."""

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.gemm_problems import SMALL_TILE, gemm_config, record_launches
from support.probed_gpu import SM_COUNT, FakeGpu, unprobed_context

from outblas.base.compiling import CompilePending
from outblas.call.problem import problem
from outblas.device import driver, raster
from outblas.hopper import gemm
from outblas.hopper.gemm import gpc_placement, smid_probe
from outblas.hopper.gemm.config import Config
from outblas.hopper.parts import tile_order

DEVICE = torch.device("cuda", 0)


def panels_of_gpcs(tiles: Sequence[int], columns: int, gpcs: Sequence[int]) -> int:
    """How many rows and columns of tiles GPCs ask L2 for, each GPC for its own. `tiles` and `gpcs`
    have an entry for each cluster.
    """
    placed = list(zip(tiles, gpcs, strict=True))
    rows = {(gpc, tile // columns) for tile, gpc in placed}
    columns_of_tiles = {(gpc, tile % columns) for tile, gpc in placed}
    return len(rows) + len(columns_of_tiles)


def test_gpcs_get_tiles_that_ask_l2_for_as_little_as_they_can() -> None:
    """16x8 tiles on 128 SMs of eight GPCs, to which clusters came in any order: 4x4 for each."""
    sms = random.Random(0).sample(range(128), 128)
    gpcs = [sm % 8 for sm in sms]
    order = raster.order("serpentine", 16, 8, gpc_placement.BAND)

    locations = list(zip(gpcs, sms, strict=True))
    clusters = sorted(range(128), key=locations.__getitem__)
    assigned = gpc_placement.assigned(np.array(order), clusters).tolist()

    assert sorted(assigned) == sorted(order)
    assert panels_of_gpcs(assigned, 8, gpcs) == 8 * (4 + 4)
    assert panels_of_gpcs(raster.order("column", 16, 8), 8, gpcs) > 2 * 8 * (4 + 4)


# ---- GPCs, as clusters of eight show them
def test_sms_that_clusters_connect_are_one_gpc() -> None:
    clusters = [[5, 3], [6, 5], [0, 30]]

    gpcs = gpc_placement.connected(clusters)

    assert gpcs == {0: 0, 3: 3, 5: 3, 6: 3, 30: 0}


def test_sms_of_no_known_gpc_come_before_all_others() -> None:
    """Two GPCs of eight SMs are known; no cluster of eight had the SMs 17, 19 and 30."""
    gpcs = gpc_placement.connected([[*range(8)], [*range(8, 16)]])
    observation = gpc_placement.Observation([9, 0, 19, 17, 8, 30], gpcs)

    locations = sorted(observation.locations())

    assert [sm for *_, sm in locations] == [17, 19, 30, 0, 8, 9]
    assert [gpc for _, gpc, _ in locations[3:]] == [0, 8, 8]


# ---- a GPU that tests play
@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A GPU of 20 SMs, in a context in which nothing was probed. Tables are lists in the memory of
    the host. Probes that a call asks for end before the call goes on.
    """
    fake = FakeGpu()
    memory: dict[Any, list[int]] = {}

    def kept(device: torch.device, key: Any, order: Callable[[], Any]) -> list[int]:
        return memory.setdefault(key, order().tolist())

    monkeypatch.setattr(driver, "background", lambda: SimpleNamespace(submit=lambda job: job()))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)

    properties = SimpleNamespace(multi_processor_count=SM_COUNT)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(driver, "context", lambda: fake.context)
    monkeypatch.setattr(smid_probe, "sm_of_each_cta", fake.sm_of_each_cta)
    monkeypatch.setattr(tile_order, "kept", kept)
    monkeypatch.setattr(tile_order, "when_copied", lambda launch, table: launch)
    monkeypatch.setattr(gpc_placement, "time", fake.clock)
    return fake


PLACED = Config(cluster_m=1), 4, 5, DEVICE  # 4x5 tiles: one for each SM
PROBES_OF_A_FAILED_ATTEMPT = 1 + 2 * gpc_placement.TRIES  # whether all is free, and the pairs
BY_COLUMNS = raster.order("column", 4, 5)
WARNING = "tiles are assigned to SMs in the order of CTAs"


def current_table() -> Any:
    return gpc_placement.Placement(*PLACED).table


class PlannedCall:
    """A call that was planned, to be run, and the table of each launch so far."""

    def __init__(self) -> None:
        self.tables: list[Any] = []
        self.run = gpc_placement.watched(self._bind, gpc_placement.Placement(*PLACED))

    def _bind(self, table: Any) -> Callable[[], None]:
        return lambda: self.tables.append(table)


@pytest.fixture
def failed(gpu: FakeGpu) -> PlannedCall:
    """A call that was planned while other work had the SMs, which has ended since."""
    gpu.busy = PROBES_OF_A_FAILED_ATTEMPT
    with pytest.warns(RuntimeWarning, match=WARNING):
        call = PlannedCall()
    assert gpu.busy == 0
    return call


def test_a_gpu_of_its_own_is_probed_once_for_all_plans(gpu: FakeGpu) -> None:
    """Where nothing else runs, one observation is enough, and plans are not watched."""
    gpu.order = random.Random(0).sample(range(SM_COUNT), SM_COUNT)

    def launch() -> None: ...

    first = current_table()
    probes = gpu.probes

    assert sorted(first) == sorted(BY_COLUMNS) != first
    assert current_table() == first
    watched = gpc_placement.watched(lambda table: launch, gpc_placement.Placement(*PLACED))
    assert watched is launch
    assert gpu.probes == probes


@pytest.mark.parametrize(
    "disturbed",
    [
        pytest.param([[2, 0, 1, 3], [0, 2, 1, 3]], id="another order in the next probe"),
        pytest.param([[0, 0, 1, 2], [3, 0, 1, 2]], id="two CTAs on an SM in one probe"),
        pytest.param([[0, 0, 1, 2], [0, 0, 1, 2]], id="two CTAs on an SM in both probes"),
        pytest.param([[0, 1, 2, 3], [1, 0, 2, 3]] * 2, id="another order, twice"),
    ],
)
def test_probes_that_were_disturbed_are_made_again(
    gpu: FakeGpu, disturbed: list[list[int]]
) -> None:
    gpu.order = [3, 2, 1, 0, *range(4, SM_COUNT)]
    gpu.disturbed = list(disturbed)

    placement = gpc_placement.Placement(Config(cluster_m=2), 1, 2, DEVICE)

    assert placement.observation.sms == [3, 1]


def test_a_call_planned_beside_other_work_looks_again_when_it_runs(failed: PlannedCall) -> None:
    for _ in range(3):
        failed.run()

    assert failed.tables == [current_table()] * 3
    assert BY_COLUMNS not in failed.tables


def test_a_call_waits_a_second_after_a_failure_and_takes_a_new_table(
    gpu: FakeGpu, failed: PlannedCall
) -> None:
    """Kernels that run, and CUDA graphs, hold the address of the table that they took."""
    gpu.busy = 1000
    failed.run()
    gpu.busy = 0
    failed.run()
    gpu.clock.now += 1.5
    failed.run()

    before, _, after = failed.tables
    assert failed.tables == [BY_COLUMNS, BY_COLUMNS, current_table()]
    assert before is not after


@pytest.mark.parametrize("seen_by_another", [False, True])
def test_nothing_is_probed_and_no_table_made_in_a_capture(
    gpu: FakeGpu, failed: PlannedCall, seen_by_another: bool
) -> None:
    if seen_by_another:
        PlannedCall()
    gpu.capturing = True
    probes = gpu.probes
    failed.run()
    if not seen_by_another:
        assert current_table() == BY_COLUMNS
    assert gpu.probes == probes
    gpu.capturing = False
    failed.run()

    assert failed.tables == [BY_COLUMNS, current_table()]
    assert failed.tables[1] != BY_COLUMNS


def test_a_gpu_that_is_always_busy_is_probed_ten_times_more(
    gpu: FakeGpu, failed: PlannedCall
) -> None:
    """A call is run there for forty minutes, twice a second."""
    gpu.busy = 10**9
    for _ in range(5000):
        failed.run()
        gpu.clock.now += 0.5
    probes, probes_of_a_retry = gpu.probes, 3  # whether all is free, and a pair
    gpu.busy = 0
    failed.run()

    assert failed.tables == [BY_COLUMNS] * 5001
    assert current_table() == BY_COLUMNS
    assert gpu.probes == probes
    assert (probes - PROBES_OF_A_FAILED_ATTEMPT) / probes_of_a_retry == gpc_placement.RETRIES == 10


def test_a_probe_that_cannot_be_launched_costs_speed_only(gpu: FakeGpu) -> None:
    gpu.failure = RuntimeError("no such kernel")
    with pytest.warns(RuntimeWarning, match=f"{WARNING}.*no such kernel"):
        call = PlannedCall()
    call.run()
    gpu.failure = None
    gpu.clock.now += 1.0
    call.run()

    assert call.tables == [BY_COLUMNS, current_table()]
    assert call.tables[1] != BY_COLUMNS


def test_a_probe_that_is_being_compiled_is_no_attempt(gpu: FakeGpu) -> None:
    gpu.failure = CompilePending("the probe")
    call = PlannedCall()
    for _ in range(3 * gpc_placement.RETRIES):
        call.run()
        gpu.clock.now += 1.0
    gpu.failure = None
    call.run()

    assert call.tables[-2:] == [BY_COLUMNS, current_table()]
    assert call.tables[-1] != BY_COLUMNS


def test_a_call_waits_for_no_probe(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread for it may take long; meanwhile no call asks for another."""
    asked: list[Callable[[], None]] = []
    monkeypatch.setattr(driver, "background", lambda: SimpleNamespace(submit=asked.append))
    call = PlannedCall()
    for _ in range(5):
        call.run()
        gpu.clock.now += 100.0
    (probe,) = asked
    assert gpu.probes == 0
    probe()
    call.run()

    assert call.tables == [BY_COLUMNS] * 5 + [current_table()]


def test_the_thread_leaves_other_contexts_alone(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the primary one."""
    asked: list[Callable[[], None]] = []
    monkeypatch.setattr(driver, "background", lambda: SimpleNamespace(submit=asked.append))
    call = PlannedCall()
    green, gpu.context = gpu.context, unprobed_context()
    asked[0]()
    gpu.context = green
    call.run()

    assert gpu.probes == 0
    assert call.tables == [BY_COLUMNS]


def test_contexts_have_tables_of_their_own(gpu: FakeGpu, failed: PlannedCall) -> None:
    """Each has SMs of its own, as green contexts and shares under MPS do, and a call of one probes
    in no other.
    """
    context, probes = gpu.context, gpu.probes
    gpu.context, own_order = unprobed_context(), gpu.order[::-1]
    failed.run()
    assert gpu.probes == probes
    of_the_other = current_table()
    gpu.context, gpu.order = context, own_order
    failed.run()

    assert failed.tables == [BY_COLUMNS, current_table()]
    assert failed.tables[1] != of_the_other


def test_gpcs_that_were_seen_in_part_are_joined(gpu: FakeGpu) -> None:
    """Clusters of eight had two halves of one GPC, and none of its other SMs, while something else
    ran there; then one had SMs of both halves.
    """
    gpu.order = list(range(SM_COUNT))[::-1]
    gpu.eights = [*range(8), *range(8, 16)]
    gpu.busy = 1  # an SM was not free
    call = PlannedCall()
    gpu.eights = [*range(4, 12)]
    call.run()
    probes, probes_of_gpcs = gpu.probes, gpu.probes_of_gpcs
    gpu.clock.now += 1000.0
    call.run()

    assert gpu.probes == probes
    observation = gpc_placement.Placement(*PLACED).observation
    assert set(observation.gpcs) == set(range(16))
    assert set(observation.gpcs.values()) == {0}
    assert call.tables == [current_table()] * 2
    assert sorted(call.tables[0]) == sorted(BY_COLUMNS)
    gpc_placement.Placement(Config(cluster_m=1), 2, 5, DEVICE)  # a launch of another size
    assert gpu.probes_of_gpcs == probes_of_gpcs


def test_hopper_gemm_launches_with_the_table_that_is_known_by_then(
    monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu
) -> None:
    launches = record_launches(monkeypatch)
    config = replace(gemm_config(f"{SMALL_TILE},tile_n=64"), stages=4)
    a, b, out = torch.empty(256, 64), torch.empty(320, 64).t(), torch.empty(256, 320)
    gpu.busy = 1000
    with pytest.warns(RuntimeWarning, match=WARNING):
        launch = gemm.plan(problem(a, b, out), config)

    launch(a, b, None, out, 1.0, 0.0)
    gpu.busy = 0
    gpu.clock.now += 2.0
    for _ in range(2):
        launch(a, b, None, out, 1.0, 0.0)

    while_busy, after, again = (made.table for made in launches)
    assert while_busy == BY_COLUMNS
    assert after == again != BY_COLUMNS
    assert sorted(after) == sorted(BY_COLUMNS)

"""Tiles assigned to CTAs by the GPC that they run in: neighbours to the SMs of one GPC."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.gemm_problems import SMALL_TILE, gemm_config, record_launches

from outblas.core.problem import problem
from outblas.device import raster
from outblas.hopper import gemm
from outblas.hopper.core import compile, tile_order
from outblas.hopper.gemm import gpc_placement, smid_probe
from outblas.hopper.gemm.kernel import Config

DEVICE = torch.device("cuda", 0)


def panels_of_gpcs(tiles: Sequence[int], columns: int, gpcs: Sequence[int]) -> int:
    """Rows and columns of tiles that GPCs ask L2 for, each GPC for its own. `tiles` and `gpcs`: of
    each cluster.
    """
    placed = list(zip(tiles, gpcs, strict=True))
    rows = {(gpc, tile // columns) for tile, gpc in placed}
    columns_of_tiles = {(gpc, tile % columns) for tile, gpc in placed}
    return len(rows) + len(columns_of_tiles)


class TestAssignedTiles:
    """16x8 tiles on 128 SMs of eight GPCs, to which clusters came in any order."""

    SMS = tuple(random.Random(0).sample(range(128), 128))  # the SM of each cluster
    GPCS = tuple(sm % 8 for sm in SMS)
    FEWEST_PANELS = 8 * (4 + 4)  # each GPC has 4x4 tiles

    def test_are_all_tiles(self) -> None:
        order = raster.order("serpentine", 16, 8, gpc_placement.BAND)

        assigned = gpc_placement.assigned(order, list(zip(self.GPCS, self.SMS, strict=True)))

        assert sorted(assigned) == sorted(order)

    def test_ask_l2_for_as_little_as_they_can(self) -> None:
        order = raster.order("serpentine", 16, 8, gpc_placement.BAND)

        assigned = gpc_placement.assigned(order, list(zip(self.GPCS, self.SMS, strict=True)))

        assert panels_of_gpcs(assigned, 8, self.GPCS) == self.FEWEST_PANELS

    def test_ask_for_less_than_half_of_what_tiles_by_columns_do(self) -> None:
        by_columns = raster.order("column", 16, 8)

        assert panels_of_gpcs(by_columns, 8, self.GPCS) > 2 * self.FEWEST_PANELS


def test_sms_that_clusters_connect_are_one_gpc() -> None:
    assert gpc_placement.connected([[5, 3], [6, 5], [0, 30]]) == {0: 0, 3: 3, 5: 3, 6: 3, 30: 0}


SM_COUNT = 20  # SMs of the fakes' GPU


class FakeGpu:
    """A GPU as probes see it.

    order: the SMs that CTAs of a launch get. busy: how many probes to come find CTAs of other work.
    groups: what a probe of clusters of eight sees. context, capturing, now: the caller's context,
    whether it captures a graph, and the time. made: the keys of tables that were made. probes: how
    many there were.
    """

    def __init__(self) -> None:
        self.order, self.busy, self.groups = list(range(SM_COUNT)), 0, [*range(16)]
        self.context, self.capturing, self.now = 1, False, 0.0
        self.made: list[Any] = []
        self.probes = 0

    def sm_of_each_cta(
        self, device: torch.device, cluster: int, ctas: int, *, jitter: bool
    ) -> list[int]:
        assert not self.capturing, "a probe in a capture"
        self.probes += 1
        if self.busy:
            self.busy -= 1
            return [0] * ctas
        return self.groups if jitter else self.order[:ctas]

    def kept(self, device: torch.device, key: Any, order: Callable[[], list[int]]) -> list[int]:
        self.made.append(key)
        return order()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A GPU of 20 SMs, on which no probe was made."""
    properties = SimpleNamespace(multi_processor_count=SM_COUNT)
    fake = FakeGpu()
    monkeypatch.setattr(smid_probe, "sm_of_each_cta", fake.sm_of_each_cta)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(gpc_placement.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(gpc_placement.time, "monotonic", lambda: fake.now)
    monkeypatch.setattr(gpc_placement.driver, "context", lambda: fake.context)
    monkeypatch.setattr(gpc_placement, "capturing", lambda device: fake.capturing)
    monkeypatch.setattr(tile_order, "kept", fake.kept)
    monkeypatch.setattr(gpc_placement, "_context_maps", {})
    return fake


ASKED = Config(cluster_m=1), 4, 5, DEVICE
BY_COLUMNS = raster.order("column", 4, 5)
WARNING = "tiles are assigned to SMs in the order of CTAs"


def test_sms_that_no_cluster_had_cut_no_gpc() -> None:
    sms = [9, 0, 19, 17, 8, 30]
    homes = gpc_placement.connected([[*range(8)], [*range(8, 16)]])
    found = gpc_placement.Observation(sms, homes).locations()
    assert [sm for *_, sm in sorted(found)] == [17, 19, 30, 0, 8, 9]
    assert [home for _, home, _ in sorted(found)][3:] == [0, 8, 8]


def test_a_probe_that_was_disturbed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [[0, 0, 1, 2], [3, 0, 1, 2], [3, 0, 1, 2], [0, 3, 1, 2], [3, 2, 1, 0], [3, 2, 1, 0]]
    monkeypatch.setattr(smid_probe, "sm_of_each_cta", lambda *_, jitter: seen.pop(0))
    monkeypatch.setattr(gpc_placement.time, "sleep", lambda seconds: None)
    assert gpc_placement._first_sms(DEVICE, 2, 2, gpc_placement.TRIES) == [3, 1]
    assert not seen


class TestAGpuOfItsOwn:
    """Where nothing else runs, one observation is enough, for all plans of the kind."""

    @pytest.fixture(autouse=True)
    def any_order(self, gpu: FakeGpu) -> None:
        """CTAs come to SMs in any order."""
        gpu.order = random.Random(0).sample(range(SM_COUNT), SM_COUNT)

    @pytest.mark.usefixtures("gpu")
    def test_has_its_tiles_in_another_order(self) -> None:
        table = gpc_placement.table(*ASKED)

        assert sorted(table) == sorted(BY_COLUMNS)
        assert table != BY_COLUMNS

    def test_is_probed_once_for_all_plans(self, gpu: FakeGpu) -> None:
        first = gpc_placement.table(*ASKED)
        probes = gpu.probes

        assert gpc_placement.table(*ASKED) == first
        assert gpu.probes == probes

    @pytest.mark.usefixtures("gpu")
    def test_has_plans_that_are_not_watched(self) -> None:
        launch = object()

        watched = gpc_placement.watched(lambda table: launch, gpc_placement.Placement(*ASKED))

        assert watched is launch


Plan = Callable[..., tuple[Callable[[], None], list[Any]]]


@pytest.fixture
def planned(gpu: FakeGpu) -> Plan:
    """Plans a call; returns it, and the table of each launch."""

    def plan(*asked: Any) -> tuple[Callable[[], None], list[Any]]:
        tables: list[Any] = []
        placement = gpc_placement.Placement(*(asked or ASKED))
        run = gpc_placement.watched(lambda table: lambda: tables.append(table), placement)
        return run, tables

    return plan


def test_where_probes_fail_once_the_next_call_is_right(gpu: FakeGpu, planned: Plan) -> None:
    gpu.busy = 1 + 2 * gpc_placement.TRIES
    with pytest.warns(RuntimeWarning, match=WARNING):
        run, tables = planned()
    other, others = planned()

    for _ in range(3):
        run()
        other()

    good = gpc_placement.table(*ASKED)
    assert good != BY_COLUMNS
    assert tables == [good] * 3
    assert others == [good] * 3  # what one plan sees is every plan's


def test_a_plan_of_a_failure_gets_better(gpu: FakeGpu, planned: Plan) -> None:
    """Its calls until then go by the columns, in memory of its own, which is never written
    again."""
    gpu.busy = 1000
    with pytest.warns(RuntimeWarning, match=WARNING):
        run, tables = planned()
    run()
    gpu.busy = 0
    run()
    assert tables == [BY_COLUMNS] * 2  # a second has not passed
    gpu.now = 1.5
    run()
    assert tables[2] == gpc_placement.table(*ASKED) != BY_COLUMNS
    assert len(set(gpu.made)) == 2


@pytest.mark.filterwarnings(f"ignore:outblas. {WARNING}")
def test_a_gpu_that_is_always_busy_is_probed_so_often(gpu: FakeGpu, planned: Plan) -> None:
    gpu.busy = 10**9
    run, tables = planned()
    first = gpu.probes
    assert first == 1 + 2 * gpc_placement.TRIES
    for _ in range(5000):
        run()
        gpu.now += 0.5

    retries = gpu.probes - first
    assert retries == 3 * gpc_placement.RETRIES
    assert tables == [BY_COLUMNS] * 5000
    gpu.busy = 0
    run()
    assert gpc_placement.table(*ASKED) == BY_COLUMNS  # and no more, whatever comes


@pytest.mark.filterwarnings(f"ignore:outblas. {WARNING}")
def test_nobody_looks_in_a_capture(gpu: FakeGpu, planned: Plan) -> None:
    gpu.busy = 1000
    run, tables = planned()
    gpu.busy, gpu.capturing, gpu.now = 0, True, 100.0
    made = gpu.probes
    run()
    gpc_placement.Placement(*ASKED)
    assert gpu.probes == made
    gpu.capturing = False
    run()
    assert tables[0] == BY_COLUMNS != tables[1]


def test_contexts_have_sms_of_their_own(gpu: FakeGpu, planned: Plan) -> None:
    """A plan goes on with the table of the context in which it was made, and looks again there
    alone."""
    first = gpc_placement.table(*ASKED)
    gpu.context, gpu.order = 2, gpu.order[::-1]
    second = gpc_placement.table(*ASKED)
    assert first != second
    gpu.busy = 1000
    gpu.context = 3
    with pytest.warns(RuntimeWarning, match=WARNING):
        run, tables = planned()
    gpu.context, gpu.busy, gpu.now = 1, 0, 100.0
    made = gpu.probes
    run()
    assert gpu.probes == made
    gpu.context = 3
    run()
    assert tables == [BY_COLUMNS, second]
    gpu.context = 1
    assert gpc_placement.table(*ASKED) == first


def test_gpcs_that_were_seen_in_part_are_completed(
    gpu: FakeGpu, planned: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters of eight that had two halves of one GPC, and none of its other SMs, while something
    else ran there."""
    gpu.order, gpu.groups = list(range(SM_COUNT))[::-1], [*range(8), *range(8, 16)]
    free, before = gpc_placement._all_free, [False]
    monkeypatch.setattr(
        gpc_placement, "_all_free", lambda *asked: before.pop() if before else free(*asked)
    )
    run, tables = planned()
    gpu.groups = [*range(4, 12)]
    run()
    found_map = gpc_placement._context_maps[DEVICE, 1]
    assert set(found_map.gpcs.values()) == {0}
    assert found_map.complete
    assert sorted(tables[0]) == sorted(BY_COLUMNS)
    assert gpc_placement.table(*ASKED) == tables[0]
    made = gpu.probes
    gpu.now = 1000.0
    run()
    assert gpu.probes == made


def test_a_launch_that_fails_costs_speed_only(
    gpu: FakeGpu, planned: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:

    def failing_probe(*_: Any, jitter: bool) -> list[int]:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(smid_probe, "sm_of_each_cta", failing_probe)
    with pytest.warns(RuntimeWarning, match="no such kernel"):
        run, tables = planned()
    run()
    monkeypatch.setattr(smid_probe, "sm_of_each_cta", gpu.sm_of_each_cta)
    gpu.now = 1.0
    run()
    assert tables[0] == BY_COLUMNS != tables[1]


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
    gpu.busy, gpu.now = 0, 2.0
    for _ in range(2):
        launch(a, b, None, out, 1.0, 0.0)

    while_busy, after, again = (made.table for made in launches)
    assert while_busy == BY_COLUMNS
    assert after == again != BY_COLUMNS
    assert sorted(after) == sorted(BY_COLUMNS)


@pytest.mark.gpu
@pytest.mark.sm90
def test_probes_see_gpcs_and_every_sm_once() -> None:
    count = torch.cuda.get_device_properties(0).multi_processor_count
    placed = gpc_placement.Placement(Config(cluster_m=2), 1, count // 2, DEVICE)
    sizes = Counter(placed.observation.gpcs.values())
    assert sum(size for size in sizes.values() if 12 <= size <= 18) >= 0.8 * count
    assert {sm // 2 for sm in placed.observation.sms} == set(range(count // 2))
    assert placed.final
    assert sorted(gpc_placement.table(Config(cluster_m=2), 8, 8, DEVICE).tolist()) == list(
        range(64)
    )


@pytest.fixture
def crowd() -> Iterator[threading.Event]:
    """Other work beside what is tested, until it is told to stop: on sixteen SMs, as NCCL's, one
    launch after another, each with so much shared memory that nothing of ours has room beside it.
    """
    variant, stop = smid_probe.Variant(1), threading.Event()
    occupy = compile.load(variant, lambda: smid_probe.compile_variant(variant))
    stream, sms = torch.cuda.Stream(), torch.empty(16, dtype=torch.int32, device=DEVICE)
    torch.cuda.synchronize()

    def work() -> None:
        with torch.cuda.stream(stream):
            while not stop.is_set():
                for _ in range(50):
                    occupy(sms, 1)
                stream.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    yield stop
    stop.set()
    thread.join()


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.filterwarnings(f"ignore:outblas. {WARNING}")
def test_a_call_planned_beside_other_work_gets_its_table_later(
    crowd: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpc_placement, "_context_maps", {})
    config = Config(
        tile_m=64,
        tile_n=128,
        consumers=1,
        producer_registers=0,
        consumer_registers=0,
        stages=8,
        cluster_m=1,
    )
    a, b = (torch.randint(-4, 5, (1024, 1024), device=DEVICE).bfloat16() for _ in range(2))
    want, out = (a.double() @ b.double()).bfloat16(), torch.empty_like(a)
    launch = gemm.plan(problem(a, b, out), config)
    found_map = gpc_placement._context_maps[DEVICE, gpc_placement.driver.context()]
    (observation,) = found_map.observations.values()

    def call() -> None:
        out.fill_(torch.nan)
        launch(a, b, None, out, 1.0, 0.0)
        assert torch.equal(out, want)

    for _ in range(200):
        call()
    crowd.set()
    until = time.monotonic() + 60
    while not observation.final and time.monotonic() < until:
        call()
    call()
    assert observation.final
    found = observation.locations()
    monkeypatch.setattr(gpc_placement, "_context_maps", {})
    again = gpc_placement.Placement(config, 16, 8, DEVICE)
    assert again.final
    assert again.observation.locations() == found

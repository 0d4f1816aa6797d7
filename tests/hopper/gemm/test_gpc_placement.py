"""Tiles assigned to CTAs by the GPC that they run in: neighbours to the SMs of one GPC."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.gemm_problems import SMALL_TILE, gemm_config, record_launches
from support.probed_gpu import SM_COUNT, FakeGpu, unprobed_context

from outblas.core.problem import problem
from outblas.device import driver, raster
from outblas.hopper import gemm
from outblas.hopper.gemm import gpc_placement, smid_probe
from outblas.hopper.gemm.kernel import Config
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


# ---- GPCs, as clusters of eight show them
def test_sms_that_clusters_connect_are_one_gpc() -> None:
    clusters = [[5, 3], [6, 5], [0, 30]]

    gpcs = gpc_placement.connected(clusters)

    assert gpcs == {0: 0, 3: 3, 5: 3, 6: 3, 30: 0}


class TestSmsOfNoKnownGpc:
    """Two GPCs of eight SMs are known; some clusters run on SMs that no cluster of eight had."""

    @pytest.fixture
    def locations(self) -> list[tuple[int, ...]]:
        """Where six clusters run, three of them on SMs 17, 19 and 30, by location."""
        gpcs = gpc_placement.connected([[*range(8)], [*range(8, 16)]])
        observation = gpc_placement.Observation([9, 0, 19, 17, 8, 30], gpcs)
        return sorted(observation.locations())

    def test_come_before_all_others(self, locations: list[tuple[int, ...]]) -> None:
        assert [sm for *_, sm in locations] == [17, 19, 30, 0, 8, 9]

    def test_do_not_come_between_sms_of_a_gpc(self, locations: list[tuple[int, ...]]) -> None:
        gpcs_of_the_others = [gpc for _, gpc, _ in locations[3:]]

        assert gpcs_of_the_others == [0, 8, 8]


# ---- a GPU that tests play
@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A GPU of 20 SMs, in a context in which nothing was probed. Tables are lists in the memory of
    the host.
    """
    fake = FakeGpu()
    memory: dict[Any, list[int]] = {}

    def kept(device: torch.device, key: Any, order: Callable[[], list[int]]) -> list[int]:
        return memory.setdefault(key, order())

    properties = SimpleNamespace(multi_processor_count=SM_COUNT)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(driver, "context", lambda: fake.context)
    monkeypatch.setattr(smid_probe, "sm_of_each_cta", fake.sm_of_each_cta)
    monkeypatch.setattr(tile_order, "kept", kept)
    monkeypatch.setattr(gpc_placement, "time", fake.clock)
    return fake


PLACED = Config(cluster_m=1), 4, 5, DEVICE  # 4x5 tiles: one for each SM
PROBES_OF_A_FAILED_ATTEMPT = 1 + 2 * gpc_placement.TRIES  # whether all is free, and the pairs
BY_COLUMNS = raster.order("column", 4, 5)
WARNING = "tiles are assigned to SMs in the order of CTAs"


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


class TestAGpuOfItsOwn:
    """Where nothing else runs, one observation is enough, for all plans of the kind."""

    @pytest.fixture(autouse=True)
    def any_order(self, gpu: FakeGpu) -> None:
        """CTAs come to SMs in any order."""
        gpu.order = random.Random(0).sample(range(SM_COUNT), SM_COUNT)

    def test_has_its_tiles_in_another_order(self) -> None:
        table = gpc_placement.table(*PLACED)

        assert sorted(table) == sorted(BY_COLUMNS)
        assert table != BY_COLUMNS

    def test_is_probed_once_for_all_plans(self, gpu: FakeGpu) -> None:
        first = gpc_placement.table(*PLACED)
        probes = gpu.probes

        again = gpc_placement.table(*PLACED)

        assert again == first
        assert gpu.probes == probes

    def test_has_plans_that_are_not_watched(self) -> None:
        def launch() -> None: ...

        watched = gpc_placement.watched(lambda table: launch, gpc_placement.Placement(*PLACED))

        assert watched is launch


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


class TestACallPlannedBesideOtherWork:
    """It takes its tiles by the columns, and looks again when it is run."""

    def test_has_its_table_in_the_next_call(self, failed: PlannedCall) -> None:
        failed.run()

        assert failed.tables == [gpc_placement.table(*PLACED)]
        assert failed.tables != [BY_COLUMNS]

    def test_keeps_that_table(self, failed: PlannedCall) -> None:
        for _ in range(3):
            failed.run()

        assert failed.tables == [gpc_placement.table(*PLACED)] * 3

    def test_sees_for_every_plan(self, gpu: FakeGpu, failed: PlannedCall) -> None:
        gpu.busy = 3
        other = PlannedCall()
        gpu.clock.now += 1.5
        failed.run()
        probes = gpu.probes

        other.run()

        assert other.tables == failed.tables == [gpc_placement.table(*PLACED)]
        assert gpu.probes == probes

    def test_waits_for_a_second_after_the_next_failure(
        self, gpu: FakeGpu, failed: PlannedCall
    ) -> None:
        gpu.busy = 1000
        failed.run()
        gpu.busy = 0

        failed.run()
        gpu.clock.now += 1.5
        failed.run()

        assert failed.tables == [BY_COLUMNS, BY_COLUMNS, gpc_placement.table(*PLACED)]

    def test_never_writes_to_a_table_again(self, gpu: FakeGpu, failed: PlannedCall) -> None:
        """Kernels that run, and CUDA graphs, hold the address of the table that they took."""
        gpu.busy = 1000
        failed.run()
        gpu.busy = 0
        gpu.clock.now += 1.5
        failed.run()

        before, after = failed.tables
        assert before is not after
        assert before == BY_COLUMNS != after

    def test_does_not_look_in_a_capture(self, gpu: FakeGpu, failed: PlannedCall) -> None:
        gpu.capturing = True
        probes = gpu.probes

        failed.run()

        assert gpu.probes == probes
        assert failed.tables == [BY_COLUMNS]

    def test_takes_no_other_table_in_a_capture(self, gpu: FakeGpu, failed: PlannedCall) -> None:
        """Even where another call has seen more meanwhile: the table would be made there."""
        PlannedCall()
        gpu.capturing = True

        failed.run()

        assert failed.tables == [BY_COLUMNS]

    def test_looks_again_after_a_capture(self, gpu: FakeGpu, failed: PlannedCall) -> None:
        gpu.capturing = True
        failed.run()
        gpu.capturing = False

        failed.run()

        assert failed.tables == [BY_COLUMNS, gpc_placement.table(*PLACED)]
        assert failed.tables[1] != BY_COLUMNS


@pytest.mark.usefixtures("failed")
def test_a_call_planned_in_a_capture_probes_nothing(gpu: FakeGpu) -> None:
    gpu.capturing = True
    probes = gpu.probes

    table = gpc_placement.table(*PLACED)

    assert gpu.probes == probes
    assert table == BY_COLUMNS


class TestAGpuThatIsAlwaysBusy:
    """A call is planned there and run for forty minutes, twice a second."""

    CALLS = 5000

    @pytest.fixture
    def call(self, gpu: FakeGpu, failed: PlannedCall) -> PlannedCall:
        """The call, after that time."""
        gpu.busy = 10**9
        for _ in range(self.CALLS):
            failed.run()
            gpu.clock.now += 0.5
        return failed

    def test_has_its_tiles_by_the_columns(self, call: PlannedCall) -> None:
        assert call.tables == [BY_COLUMNS] * self.CALLS

    @pytest.mark.usefixtures("call")
    def test_is_probed_again_ten_times(self, gpu: FakeGpu) -> None:
        probes_of_a_retry = 3  # whether all is free, and a pair

        retries = (gpu.probes - PROBES_OF_A_FAILED_ATTEMPT) / probes_of_a_retry

        assert retries == gpc_placement.RETRIES == 10

    def test_is_not_probed_after_that(self, gpu: FakeGpu, call: PlannedCall) -> None:
        gpu.busy = 0
        probes = gpu.probes

        call.run()

        assert gpc_placement.table(*PLACED) == BY_COLUMNS
        assert gpu.probes == probes


class TestAProbeThatCannotBeLaunched:
    """It costs speed only."""

    @pytest.fixture
    def call(self, gpu: FakeGpu) -> PlannedCall:
        """A call planned where probes cannot be launched."""
        gpu.failure = RuntimeError("no such kernel")
        with pytest.warns(RuntimeWarning, match=f"{WARNING}.*no such kernel"):
            return PlannedCall()

    def test_leaves_the_tiles_by_the_columns(self, call: PlannedCall) -> None:
        call.run()

        assert call.tables == [BY_COLUMNS]

    def test_is_launched_again_later(self, gpu: FakeGpu, call: PlannedCall) -> None:
        call.run()
        gpu.failure = None
        gpu.clock.now += 1.0

        call.run()

        assert call.tables == [BY_COLUMNS, gpc_placement.table(*PLACED)]
        assert call.tables[1] != BY_COLUMNS


class TestContexts:
    """Each has SMs of its own, as green contexts and shares under MPS do."""

    def test_have_tables_of_their_own(self, gpu: FakeGpu) -> None:
        first = gpc_placement.table(*PLACED)
        gpu.context, gpu.order = unprobed_context(), gpu.order[::-1]

        second = gpc_placement.table(*PLACED)

        assert first != second

    def test_keep_their_tables_when_another_is_probed(self, gpu: FakeGpu) -> None:
        context, first = gpu.context, gpc_placement.table(*PLACED)
        gpu.context, gpu.order = unprobed_context(), gpu.order[::-1]
        gpc_placement.table(*PLACED)
        gpu.context = context

        again = gpc_placement.table(*PLACED)

        assert again == first

    def test_are_not_probed_for_plans_of_others(self, gpu: FakeGpu, failed: PlannedCall) -> None:
        gpu.context = unprobed_context()
        probes = gpu.probes

        failed.run()

        assert gpu.probes == probes
        assert failed.tables == [BY_COLUMNS]

    def test_are_probed_again_for_their_own_plans(self, gpu: FakeGpu, failed: PlannedCall) -> None:
        context, own_order = gpu.context, gpu.order[::-1]
        gpu.context = unprobed_context()
        of_the_other = gpc_placement.table(*PLACED)
        gpu.context, gpu.order = context, own_order

        failed.run()

        assert failed.tables == [gpc_placement.table(*PLACED)]
        assert failed.tables != [of_the_other]


class TestGpcsSeenInPart:
    """Clusters of eight had two halves of one GPC, and none of its other SMs, while something else
    ran there; then one had SMs of both halves.
    """

    @pytest.fixture
    def call(self, gpu: FakeGpu) -> PlannedCall:
        """A call planned in that time, and run once after it."""
        gpu.order = list(range(SM_COUNT))[::-1]
        gpu.eights = [*range(8), *range(8, 16)]
        gpu.busy = 1  # an SM was not free
        call = PlannedCall()
        gpu.eights = [*range(4, 12)]
        call.run()
        return call

    @pytest.mark.usefixtures("call")
    def test_are_joined(self) -> None:
        observation = gpc_placement.Placement(*PLACED).observation

        assert set(observation.gpcs) == set(range(16))
        assert set(observation.gpcs.values()) == {0}

    def test_are_in_the_next_table(self, call: PlannedCall) -> None:
        (table,) = call.tables

        assert sorted(table) == sorted(BY_COLUMNS)
        assert table == gpc_placement.table(*PLACED)

    def test_are_not_probed_again_for_the_call(self, gpu: FakeGpu, call: PlannedCall) -> None:
        probes = gpu.probes
        gpu.clock.now += 1000.0

        call.run()

        assert gpu.probes == probes

    @pytest.mark.usefixtures("call")
    def test_are_not_probed_again_for_launches_of_another_size(self, gpu: FakeGpu) -> None:
        probes_of_gpcs = gpu.probes_of_gpcs

        gpc_placement.Placement(Config(cluster_m=1), 2, 5, DEVICE)

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

"""How many clusters a persistent launch has, and the tables in which it finds the order of its
tiles.
"""

import contextlib
import itertools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from outblas.hopper.parts import tile_order


@pytest.mark.parametrize(
    ("tiles", "clusters"),
    [
        pytest.param(1, 66, id="one tile"),
        pytest.param(66, 66, id="one whole wave"),
        pytest.param(256, 64, id="four waves of 64"),
        pytest.param(1024, 64, id="sixteen waves of 64"),
        pytest.param(67, 66, id="one tile over would halve them"),
        pytest.param(260, 65, id="four waves of 65"),
    ],
)
def test_clusters_that_would_idle_in_the_last_wave_are_left_out(tiles: int, clusters: int) -> None:
    assert tile_order.balance_waves(66, tiles) == clusters


def test_leaving_clusters_out_costs_no_wave_and_at_most_one_cluster_in_16() -> None:
    for clusters, tiles in itertools.product(range(1, 140), range(1, 600)):
        launched = tile_order.balance_waves(clusters, tiles)

        case = f"{launched} of {clusters} clusters for {tiles} tiles"
        assert 15 * clusters <= 16 * launched <= 16 * clusters, case
        assert -(-tiles // launched) == -(-tiles // clusters), case


@pytest.mark.parametrize(
    ("sms", "cluster", "expected"),
    [(0, 1, 132), (0, 2, 66), (100, 2, 50), (0, 4, 28), (0, 8, 14), (100, 4, 21), (2, 8, 1)],
)
def test_a_launch_has_the_clusters_that_run_at_once(
    sms: int, cluster: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four or eight CTAs, fewer than the SMs have room for: a GPC has no multiple of them."""
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    assert tile_order.clusters(torch.device("cuda", 7), sms, cluster) == expected


def test_a_table_is_kept_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table that stands for a failed probe is not in the way of the right one."""
    monkeypatch.setattr(tile_order.driver, "for_good", lambda device, make: make())
    monkeypatch.setattr(tile_order, "_kept", {})
    cpu = torch.device("cpu")

    by_columns = tile_order.kept(cpu, ("tiles", 0, 1, 2), lambda: [0, 1, 2])
    by_gpcs = tile_order.kept(cpu, ("tiles", 2, 1, 0), lambda: [2, 1, 0])
    again = tile_order.kept(cpu, ("tiles", 0, 1, 2), lambda: pytest.fail("made twice"))

    assert by_columns.tolist() == [0, 1, 2]
    assert by_gpcs.tolist() == [2, 1, 0]
    assert again is by_columns


# ---- tables that are still being copied
class Gpu:
    """A GPU whose copies land when a test says so, and whose streams wait for events.

    landed: how many copies have. waited: by stream, the copies that it has waited for.
    """

    def __init__(self) -> None:
        self.copies = self.landed = 0
        self.stream, self.capturing = "first", False
        self.waited: dict[str, set[int]] = {}
        self.kernels: list[bool] = []  # whether the table was there when a kernel read it
        self.blocks = self.waits_of_host = 0

    def block(self, device: torch.device, size: int) -> tile_order.TableMemory:
        self.blocks += 1
        tables, pinned = torch.full((2, size), -7, dtype=torch.int32)
        return tile_order.TableMemory(tables, pinned, None, 1)  # type: ignore[arg-type]

    def event(self) -> "Copy":
        self.copies += 1
        return Copy(self, self.copies)

    def launch(self, copy: int) -> Callable[[], None]:
        """A kernel that reads the table of a copy."""
        return lambda: self.kernels.append(
            copy <= self.landed or copy in self.waited.get(self.stream, ())
        )


class Copy:
    """The event at the end of a copy."""

    def __init__(self, gpu: Gpu, number: int) -> None:
        self.gpu, self.number = gpu, number

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.number <= self.gpu.landed

    def synchronize(self) -> None:
        self.gpu.waits_of_host += 1
        self.gpu.landed = max(self.gpu.landed, self.number)


CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    fake = Gpu()

    def wait_event(copy: Copy) -> None:
        assert not fake.capturing, "a graph cannot wait for what is not in it"
        fake.waited.setdefault(fake.stream, set()).add(copy.number)

    stream = SimpleNamespace(wait_event=wait_event)
    monkeypatch.setattr(tile_order, "_new_block", fake.block)
    monkeypatch.setattr(tile_order, "_kept", {})
    monkeypatch.setattr(tile_order, "_blocks", {})
    monkeypatch.setattr(tile_order, "_copying", {})
    monkeypatch.setattr(tile_order, "capturing", lambda device: fake.capturing)
    monkeypatch.setattr(tile_order.driver, "for_good", lambda device, make: make())
    monkeypatch.setattr(tile_order.driver, "context", lambda: 1)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    return fake


def test_no_kernel_reads_a_table_before_it_is_copied(gpu: Gpu) -> None:
    """Launches of 40 tables on three streams, in captures too, while copies land at any time."""
    rng, launches = random.Random(0), []
    for _ in range(3000):
        gpu.stream, gpu.capturing = rng.choice("abc"), rng.random() < 0.1
        if gpu.landed < gpu.copies and rng.random() < 0.1:
            gpu.landed += 1
        if gpu.copies < 40 and rng.random() < 0.05:
            table = tile_order.kept(CUDA, gpu.copies, lambda: [gpu.copies] * 5)
            launches.append(tile_order.when_copied(gpu.launch(gpu.copies), table))
        elif launches:
            rng.choice(launches)()

    assert gpu.copies == 40
    assert len(gpu.kernels) > 2500
    assert all(gpu.kernels)
    gpu.landed = gpu.copies
    for launch in launches:
        launch()
    assert tile_order._copying == {}


def test_the_host_waits_for_a_copy_in_a_capture_alone(gpu: Gpu) -> None:
    launch = tile_order.when_copied(gpu.launch(1), tile_order.kept(CUDA, "a", lambda: [1]))
    launch()
    assert gpu.waits_of_host == 0

    gpu.capturing = True
    launch()

    assert gpu.waits_of_host == 1
    assert gpu.kernels == [True, True]


def test_a_copy_that_lands_at_once_leaves_a_launch_as_it_is(gpu: Gpu) -> None:
    gpu.landed = 1
    launch = gpu.launch(1)

    assert tile_order.when_copied(launch, tile_order.kept(CUDA, "a", lambda: [1])) is launch
    assert tile_order.when_copied(launch, None) is launch


def test_tables_share_memory_and_no_place_in_it(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that ask for one table get one; more than a block holds are in the next."""
    monkeypatch.setattr(tile_order, "BLOCK", 4096)
    sizes = [1, 5, 32, 33, 1000, 5000, *range(100, 140)] * 4

    def table(index: int) -> torch.Tensor:
        size = sizes[index]
        return tile_order.kept(CUDA, size, lambda: np.arange(size).reshape(1, size) + size)

    with ThreadPoolExecutor(8) as pool:
        tables = list(pool.map(table, range(len(sizes))))

    assert gpu.copies == len(set(sizes))
    assert gpu.blocks > 2
    for size, made in zip(sizes, tables, strict=True):
        assert made.tolist() == [[size + i for i in range(size)]]
        assert made is table(sizes.index(size))


def test_a_green_context_gets_its_tables_as_before(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its streams are not those of the context in which the memory of tables was made."""
    monkeypatch.setattr(tile_order.driver, "context", lambda: 2)
    monkeypatch.setattr(torch.Tensor, "to", lambda t, device: t.clone())

    assert tile_order.kept(CUDA, "a", lambda: [3, 4]).tolist() == [3, 4]
    assert gpu.copies == 0

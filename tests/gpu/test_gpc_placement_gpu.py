"""What probes see of a GPU, and calls that are planned while other work has some of its SMs."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.probed_gpu import unprobed_context

from outblas.call.problem import problem
from outblas.device import driver
from outblas.hopper import gemm
from outblas.hopper.gemm import gpc_placement, smid_probe
from outblas.hopper.gemm.config import Config
from outblas.hopper.parts import compile

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

DEVICE = torch.device("cuda", 0)
WARNING = "tiles are assigned to SMs in the order of CTAs"


@pytest.fixture
def new_context(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and placements take the GPU's context for one in which nothing was probed."""

    def enter() -> None:
        context = unprobed_context()
        monkeypatch.setattr(driver, "context", lambda: context)

    enter()
    return enter


def probed(placement: gpc_placement.Placement) -> gpc_placement.Placement:
    """A placement after the probes that it asked for."""
    driver.background().submit(lambda: None).result()
    placement.renew()
    return placement


@pytest.mark.usefixtures("new_context")
def test_probes_see_gpcs_and_each_pair_of_sms_once() -> None:
    """Nothing else runs there. Half as many clusters of two are launched as there are SMs."""
    count = torch.cuda.get_device_properties(DEVICE).multi_processor_count

    placement = probed(gpc_placement.Placement(Config(cluster_m=2), 1, count // 2, DEVICE))

    sizes = Counter(placement.observation.gpcs.values()).values()
    assert sum(size for size in sizes if 12 <= size <= 18) >= 0.8 * count
    assert sorted(sm // 2 for sm in placement.observation.sms) == list(range(count // 2))
    assert placement.final
    table = probed(gpc_placement.Placement(Config(cluster_m=2), 8, 8, DEVICE)).table
    assert sorted(table.tolist()) == list(range(64))


@pytest.fixture
def end_other_work() -> Iterator[Callable[[], None]]:
    """Work beside what is tested, until it is called: on sixteen SMs, as NCCL's, one launch after
    another, each with so much shared memory that nothing of ours has room beside it.
    """
    variant = smid_probe.ProbeVariant(1)
    occupy = compile.load(variant, lambda: smid_probe.compile_variant(variant))
    sms, ended = torch.empty(16, dtype=torch.int32, device=DEVICE), threading.Event()

    def launch() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not ended.is_set():
                for _ in range(50):
                    occupy(sms, 1)
                stream.synchronize()

    def end() -> None:
        ended.set()
        thread.join()

    torch.cuda.synchronize()
    thread = threading.Thread(target=launch)
    thread.start()
    yield end
    end()


# Of a product of 16x8 tiles.
CONFIG = Config(
    tile_m=64,
    tile_n=128,
    consumers=1,
    producer_registers=0,
    consumer_registers=0,
    stages=8,
    cluster_m=1,
)


@pytest.mark.filterwarnings(f"ignore:outblas. {WARNING}")
def test_a_call_planned_beside_other_work_gets_the_table_of_one_that_is_planned_later(
    new_context: Callable[[], None],
    end_other_work: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """200 calls run beside that work, the others alone, for a minute at most. All are right."""
    a, b = (torch.randint(-4, 5, (1024, 1024), device=DEVICE).bfloat16() for _ in range(2))
    expected, out = (a.double() @ b.double()).bfloat16(), torch.empty_like(a)
    watched, placements = gpc_placement.watched, []

    def record(bind: Any, placement: gpc_placement.Placement) -> Any:
        placements.append(placement)
        return watched(bind, placement)

    monkeypatch.setattr(gpc_placement, "watched", record)
    launch = gemm.plan(problem(a, b, out), CONFIG)
    (placement,) = placements

    def call() -> None:
        out.fill_(torch.nan)
        launch(a, b, None, out, 1.0, 0.0)
        assert torch.equal(out, expected)

    for _ in range(200):
        call()
    end_other_work()
    until = time.monotonic() + 60
    while not placement.observation.final and time.monotonic() < until:
        call()
        time.sleep(0.01)  # for the thread that probes
    call()
    assert placement.final
    new_context()

    later = probed(gpc_placement.Placement(CONFIG, 16, 8, DEVICE))

    assert later.final
    assert later.observation.locations() == placement.observation.locations()

"""What probes see of a GPU, and calls that are planned while other work has some of its SMs."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.probed_gpu import unprobed_context

from outblas.core.problem import problem
from outblas.device import driver
from outblas.hopper import gemm
from outblas.hopper.gemm import gpc_placement, smid_probe
from outblas.hopper.gemm.kernel import Config
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


@pytest.mark.usefixtures("new_context")
def test_probes_see_gpcs_and_each_pair_of_sms_once() -> None:
    """Nothing else runs there. Half as many clusters of two are launched as there are SMs."""
    count = torch.cuda.get_device_properties(DEVICE).multi_processor_count

    placement = gpc_placement.Placement(Config(cluster_m=2), 1, count // 2, DEVICE)

    sizes = Counter(placement.observation.gpcs.values()).values()
    assert sum(size for size in sizes if 12 <= size <= 18) >= 0.8 * count
    assert sorted(sm // 2 for sm in placement.observation.sms) == list(range(count // 2))
    assert placement.final
    table = gpc_placement.table(Config(cluster_m=2), 8, 8, DEVICE)
    assert sorted(table.tolist()) == list(range(64))


class OtherWork:
    """Work beside what is tested: on sixteen SMs, as NCCL's, one launch after another, each with so
    much shared memory that nothing of ours has room beside it.
    """

    def __init__(self) -> None:
        variant = smid_probe.ProbeVariant(1)
        self._occupy = compile.load(variant, lambda: smid_probe.compile_variant(variant))
        self._sms = torch.empty(16, dtype=torch.int32, device=DEVICE)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._launch)
        torch.cuda.synchronize()
        self._thread.start()

    def end(self) -> None:
        """Returns when the last launch has ended."""
        self._ended.set()
        self._thread.join()

    def _launch(self) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not self._ended.is_set():
                for _ in range(50):
                    self._occupy(self._sms, 1)
                stream.synchronize()


@pytest.fixture
def other_work() -> Iterator[OtherWork]:
    """Work on sixteen SMs, until the test ends it or is over."""
    work = OtherWork()
    yield work
    work.end()


class CheckedCall:
    """A product of 16x8 tiles, planned when it is made; each call of it checks its result."""

    config = Config(
        tile_m=64,
        tile_n=128,
        consumers=1,
        producer_registers=0,
        consumer_registers=0,
        stages=8,
        cluster_m=1,
    )
    grid = 16, 8

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        operands = [torch.randint(-4, 5, (1024, 1024), device=DEVICE) for _ in range(2)]
        self._a, self._b = (operand.bfloat16() for operand in operands)
        self._expected = (self._a.double() @ self._b.double()).bfloat16()
        self._out = torch.empty_like(self._a)
        watched, placements = gpc_placement.watched, []

        def record(bind: Any, placement: gpc_placement.Placement) -> Any:
            placements.append(placement)
            return watched(bind, placement)

        monkeypatch.setattr(gpc_placement, "watched", record)
        self._launch = gemm.plan(problem(self._a, self._b, self._out), self.config)
        (self.placement,) = placements

    def __call__(self) -> None:
        self._out.fill_(torch.nan)
        self._launch(self._a, self._b, None, self._out, 1.0, 0.0)
        assert torch.equal(self._out, self._expected)

    def until_final(self, seconds: float) -> None:
        """Calls until there is no better table, for so long at most, and once with that table."""
        until = time.monotonic() + seconds
        while not self.placement.observation.final and time.monotonic() < until:
            self()
        self()


@pytest.mark.filterwarnings(f"ignore:outblas. {WARNING}")
def test_a_call_planned_beside_other_work_gets_the_table_of_one_that_is_planned_later(
    new_context: Callable[[], None], other_work: OtherWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 calls run beside that work, the others alone, for a minute at most. All are right."""
    call = CheckedCall(monkeypatch)
    for _ in range(200):
        call()
    other_work.end()
    call.until_final(seconds=60)
    assert call.placement.final
    new_context()

    later = gpc_placement.Placement(call.config, *call.grid, DEVICE)

    assert later.final
    assert later.observation.locations() == call.placement.observation.locations()

"""Cold weights: which calls are timed with them, and that no call finds its weights in L2."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.bench_machine import VirtualGpu, install

from outblas.bench import cold, turn
from outblas.bench.campaign import Campaign
from outblas.bench.operation import Operation
from outblas.bench.providers import Provider
from outblas.bench.record import Device, Record
from outblas.bench.tasks import GemmTask

MIB = 1 << 20
L2 = 50 * MIB


@pytest.mark.parametrize(
    ("shape", "bound"),
    [
        pytest.param((16, 4096, 4096), True, id="few rows"),
        pytest.param((256, 8192, 57344), True, id="the most rows that are few"),
        pytest.param((257, 8192, 57344), False, id="many rows"),
        pytest.param((2048, 2048, 2048), True, id="all of it fits twice into L2"),
        pytest.param((4096, 4096, 4096), False, id="100 MB"),
    ],
)
def test_calls_of_few_rows_or_bytes_are_timed_cold(
    shape: tuple[int, int, int], bound: bool
) -> None:
    assert GemmTask(shape, "nt").is_memory_bound(Operation(), L2) is bound


# ---- copies
@pytest.mark.parametrize(
    ("weights", "count"),
    [
        pytest.param(torch.ones(512, 512, dtype=torch.bfloat16).t(), 200, id="small"),
        pytest.param(torch.ones(8192, 8192, dtype=torch.bfloat16), 2, id="larger than L2"),
    ],
)
def test_copies_have_twice_the_bytes_of_l2_and_are_two_at_least(
    weights: torch.Tensor, count: int
) -> None:
    copies = cold.copies(weights, L2)

    assert [copy.stride() for copy in copies] == [weights.stride()] * count
    assert all(torch.equal(copy, weights) for copy in copies)


# ---- a campaign on a device with an L2
class Cache:
    """Weights that were read last, as many bytes as L2 holds."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: OrderedDict[int, int] = OrderedDict()

    def has(self, weights: torch.Tensor) -> bool:
        """Whether these weights are there; they are, from now on."""
        address, size = weights.data_ptr(), weights.numel() * weights.element_size()
        found = address in self.held
        self.held[address] = size
        self.held.move_to_end(address)
        while sum(self.held.values()) > self.size:
            self.held.popitem(last=False)
        return found


WARM_US, COLD_US = 20.0, 60.0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> VirtualGpu:
    """A virtual device whose L2 holds three times the weights of a shape of 64."""
    device = VirtualGpu()
    install(device, monkeypatch)
    operands = tuple(torch.ones(64, 64, dtype=torch.bfloat16) for _ in range(3))
    monkeypatch.setattr(Operation, "operands", lambda *_: operands)
    monkeypatch.setattr(Device, "current", lambda dtype: Device(None, 3 * 64 * 64 * 2))
    monkeypatch.setattr(cold, "copy_gbs", lambda: 1.0)
    return device


Run = Callable[..., dict[str, Record]]


@pytest.fixture
def run(gpu: VirtualGpu) -> Run:
    """Runs a campaign of a base and of one other, whose calls are faster when L2 has their weights:
    its records, by mode.
    """
    cache = Cache(3 * 64 * 64 * 2)

    def prepare(a: Any, b: torch.Tensor, out: Any) -> Callable[..., None]:
        def call(b: torch.Tensor = b) -> None:
            gpu.launch("call", WARM_US if cache.has(b) else COLD_US)

        return call

    def run(*modes: str, shape: tuple[int, int, int] = (64, 64, 64)) -> dict[str, Record]:
        base = Provider("cublas", "", prepare, trusted=True)
        other = replace(base, name="other")
        records = Campaign([base, other]).run([GemmTask(shape, "nt")], modes)
        return {record.mode: record for record in records if record.provider == "other"}

    return run


def test_a_burst_finds_its_weights_in_l2(run: Run) -> None:
    assert run("burst")["burst"].us == pytest.approx(WARM_US, rel=0.01)


def test_no_call_of_a_cold_burst_finds_its_weights_in_l2(run: Run) -> None:
    assert run("cold")["cold"].us == pytest.approx(COLD_US, rel=0.01)


def test_a_cold_burst_has_its_share_of_the_bandwidth_of_a_copy(run: Run) -> None:
    record = run("cold")["cold"]

    nbytes = 3 * 64 * 64 * 2
    assert record.gbs == pytest.approx(nbytes / COLD_US / 1e3, rel=0.01)
    assert record.bandwidth_share == pytest.approx(record.gbs)  # of 1 GB/s


def test_a_call_that_memory_does_not_bound_is_not_timed_cold(run: Run) -> None:
    assert set(run("burst", "cold", shape=(512, 512, 512))) == {"burst"}


def test_long_calls_take_the_weights_in_turn_too(gpu: VirtualGpu) -> None:
    weights = [torch.full((1,), float(number)) for number in range(3)]
    order: list[int] = []

    batch = cold.batch(lambda b: order.append(int(b)), weights, turn.SHORT_US * 2, short=False)
    order.clear()
    batch.run()

    assert order == [0, 1, 2] * 3
    assert batch.calls == 9

"""Protocols and campaigns of the bench on a virtual GPU: who is timed, in which order, how, and
what is made of it.
"""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.bench_machine import Machine, SteadyClock, VirtualGpu, install
from support.commands import invoke

from outblas.bench import burst, campaign, clock, power, schedule, sustained, turn
from outblas.bench.providers import Provider
from outblas.bench.record import Record
from outblas.bench.statistics import SUSTAINED_TOLERANCE, ratio
from outblas.bench.sustained import Turn
from outblas.bench.tasks import GemmTask
from outblas.verify.kernels import Refused


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> VirtualGpu:
    """A virtual device, which the bench times."""
    device = VirtualGpu()
    install(device, monkeypatch)
    return device


# ---- protocols
def batch_of(gpu: VirtualGpu, name: str, us: float) -> turn.Batch:
    """One call of a kernel."""
    return turn.Batch(lambda: gpu.launch(name, us), 1)


@pytest.fixture
def two_batches(gpu: VirtualGpu) -> dict[str, tuple[Callable[[], object], turn.Batch]]:
    """Warm calls and batches of a kernel of 100 µs and of one of 200."""

    def warm() -> None:
        gpu.launch("warm", 50.0)  # longer than the host takes to launch the next one

    return {"a": (warm, batch_of(gpu, "a", 100.0)), "b": (warm, batch_of(gpu, "b", 200.0))}


def test_burst_keeps_rounds_together_and_times_no_warm_call(
    two_batches: dict[str, Any], gpu: VirtualGpu
) -> None:
    samples = burst.run(two_batches, SteadyClock(), rounds=4)

    timed = [name for name in gpu.launched if name != "warm"]
    assert timed == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert samples["a"].us == pytest.approx([100.0] * 4)
    assert samples["b"].us == pytest.approx([200.0] * 4)
    assert samples["b"].mhz == [1500.0] * 4


def test_sustained_runs_the_base_before_and_after_every_turn(gpu: VirtualGpu) -> None:
    batches = {"cublas": batch_of(gpu, "cublas", 8000.0), "ours": batch_of(gpu, "ours", 8000.0)}

    turns = sustained.run(batches, "cublas", SteadyClock(), None, passes=3)

    assert [name for name, _ in turns] == ["cublas", "ours"] * 3 + ["cublas"]


def test_sustained_times_the_second_half_of_a_turn(gpu: VirtualGpu) -> None:
    """The first half still runs on the heat of the turn before."""

    def kernel() -> None:
        first_half = gpu.device < 1e6
        gpu.launch("cublas", 4000.0 if first_half else 8000.0)

    turns = sustained.run(
        {"cublas": turn.Batch(kernel, 1)}, "cublas", SteadyClock(), None, passes=0
    )

    assert turns[0][1].us == pytest.approx(8000.0)


@pytest.fixture
def slowing_turns() -> list[tuple[str, Turn]]:
    """Turns of the base and of one that is a tenth faster, on a board that slows down all the
    time.
    """
    machine = Machine({"cublas": 100.0, "ours": 90.0}, seed=0, drift=3.0, noise=0.0)
    order = schedule.turns("cublas", ["ours"], 3)
    return [(name, Turn(machine.time(name), 1400.0, 700.0)) for name in order]


def test_sustained_holds_each_turn_against_its_neighbours(
    slowing_turns: list[tuple[str, Turn]],
) -> None:
    """Neighbours cancel what a mean over the run would not."""
    turns, base = sustained.pair(slowing_turns, "cublas")["ours"]

    spread = ratio(base, [t.us for t in turns])
    assert spread.median == pytest.approx(1 / 0.9, rel=1e-9)
    assert spread.verdict(SUSTAINED_TOLERANCE) == "faster"


@pytest.mark.parametrize(
    ("us", "calls"), [(0.5, 400), (3.4, 295), (10.0, 100), (99.0, 11), (400.0, 8)]
)
def test_graphs_hold_as_many_calls_as_fill_a_millisecond(us: float, calls: int) -> None:
    assert turn.graph_calls(us) == calls


@pytest.mark.parametrize("host_us", [1.0, 12.0, 60.0, 250.0])
@pytest.mark.parametrize("us", [3.0, 40.0, 150.0, 900.0])
def test_a_slow_host_does_not_pass_for_a_long_call(
    us: float, host_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = VirtualGpu()
    gpu.HOST_US = host_us
    install(gpu, monkeypatch)

    assert turn.rough_us(lambda: gpu.launch("ours", us)) == pytest.approx(us, rel=0.15)


# ---- clock and power
def test_clock_compares_each_sm_with_itself() -> None:
    """SM 0 runs at 1500 MHz and SM 1 at 1600; SM 7 stamped only once."""
    before = [[0, 1_000, 50_000], [1, 900_000, 50_032], [7, 5, 50_000]]
    after = [[1, 900_000 + 160_000, 150_032], [0, 1_000 + 150_000, 150_000]]

    assert clock.mhz(before, after) == pytest.approx(1550)


@dataclass
class FakeNvml:
    """As pynvml of a board whose energy counter has these readings, one after another, in mJ."""

    readings: list[int]
    NVMLError = RuntimeError

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return self.readings.pop(0)


def test_energy_meter_ignores_a_counter_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    when_made, sampled = 5, [10, 10, 20, 20, 90_000, 90_000, 180_000, 180_000]
    renewed_at = [1.0, 1.1, 1.2]  # at 20, at 90,000 and at 180,000 mJ
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([when_made, *sampled]))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(uuid="0"))
    monkeypatch.setattr(power, "time", SimpleNamespace(perf_counter=lambda: renewed_at.pop(0)))
    meter = power.EnergyMeter()
    meter.reset()

    for _ in sampled:
        meter.sample()

    assert meter.watts() == pytest.approx((180_000 - 20) / 1000 / 0.2)


# ---- campaigns
@dataclass(frozen=True)
class VirtualProvider(Provider):
    """A provider whose calls take that many µs on a virtual device, and what its check says."""

    said: str | None = None
    raised: Exception | None = None

    def fault(self, case: Any) -> str | None:
        if self.raised is not None:
            raise self.raised
        return self.said


@pytest.fixture
def provider(gpu: VirtualGpu) -> Callable[..., VirtualProvider]:
    """Makes providers of the virtual device, whose times scatter by half a percent."""
    scatter = random.Random(0)

    def make(name: str, us: float, **how: Any) -> VirtualProvider:
        def prepare(a: Any, b: Any, out: Any) -> Callable[[], None]:
            return lambda *_: gpu.launch(name, us * scatter.gauss(1, 0.005))

        return VirtualProvider(name, "", prepare, **how)

    return make


Run = Callable[..., dict[str, Record]]


@pytest.fixture
def run(provider: Callable[..., VirtualProvider]) -> Run:
    """Runs a campaign of one shape beside a base that is as fast as the first provider: the
    records of a mode, by provider.
    """

    def run(
        *providers: VirtualProvider, us: float, modes: tuple[str, ...] = ("burst",)
    ) -> dict[str, Record]:
        base = replace(provider("cublas", us), trusted=True)
        records = campaign.Campaign([base, *providers]).run(
            [GemmTask((512, 512, 512), "nt")], modes
        )
        return {f"{r.provider} {r.mode}": r for r in records}

    return run


CHECKS = [
    pytest.param(
        {"said": "wrong: 1 of 4 elements"}, "wrong: 1 of 4 elements", False, id="wrong result"
    ),
    pytest.param(
        {"raised": Refused("TMA needs 16 bytes")}, "refused: TMA needs 16 bytes", True, id="refusal"
    ),
    pytest.param(
        {"raised": RuntimeError("out of\nresources")},
        "failed: RuntimeError: out of resources",
        False,
        id="crash",
    ),
]


@pytest.mark.parametrize(("how", "check", "passed"), CHECKS)
def test_a_kernel_that_fails_its_check_is_not_timed(
    how: dict[str, Any],
    check: str,
    passed: bool,
    run: Run,
    provider: Callable[..., VirtualProvider],
    gpu: VirtualGpu,
) -> None:
    records = run(provider("ours", 150.0, **how), us=150.0)

    ours = records["ours burst"]
    assert ours.check == check
    assert ours.passed == passed  # a refusal is no failure
    assert ours.us is None
    assert "ours" not in gpu.launched


def test_short_calls_run_in_graphs(run: Run, provider: Callable[..., VirtualProvider]) -> None:
    ours = run(provider("ours", 20.0), us=20.0)["ours burst"]

    assert ours.graph
    assert ours.calls == pytest.approx(1000 / 20, rel=0.05)
    assert ours.host_us == pytest.approx(VirtualGpu.HOST_US)


def test_long_calls_run_eagerly(run: Run, provider: Callable[..., VirtualProvider]) -> None:
    ours = run(provider("ours", 150.0), us=150.0)["ours burst"]

    assert not ours.graph
    assert ours.calls == turn.CALLS
    assert ours.ratio_apart is None


def test_the_command_prints_and_saves_what_it_times(
    provider: Callable[..., VirtualProvider], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base = replace(provider("cublas", 150.0), trusted=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("outblas.bench.environment.environment", lambda: {"gpu": "virtual"})
    monkeypatch.setattr(
        "outblas.bench.providers.competitors", lambda *_: [base, provider("ours", 150.0)]
    )
    saved = tmp_path / "bench.json"
    options = "bench", "--shapes", "512", "--mode", "burst"

    table = invoke(*options, "--save", saved).stdout
    report = json.loads(invoke(*options, "--json").stdout)

    assert "virtual, bfloat16, 512, nt, burst" in table
    assert [entry["provider"] for entry in json.loads(saved.read_text())["results"]] == [
        "cublas",
        "ours",
    ]
    assert report["results"][1]["check"] == "exact"

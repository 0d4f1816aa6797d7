"""The bench without a GPU: statistics, schedules and protocols on synthetic timings, providers, records, command."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from typer.testing import CliRunner

from outblas import shapes
from outblas.bench import burst, campaign, chart, clock, power, providers, record, schedule, sustained, turn
from outblas.bench.providers import Provider
from outblas.bench.record import UNCHECKED, Device, Record
from outblas.bench.statistics import BURST_TOLERANCE, SUSTAINED_TOLERANCE, _rank, ratio
from outblas.bench.sustained import Turn
from outblas.cli import app
from outblas.cli.bench import COLUMNS, row, split_names
from outblas.verify.kernels import Refused


@dataclass
class Machine:
    """A GPU that heats up: every call slows as the run goes on, each turn suffers from what ran before it."""

    us: dict[str, float]
    seed: int
    drift: float = 0.1
    noise: float = 0.005  # relative; with any, one turn in twenty also stumbles
    after: dict[str, float] = field(default_factory=dict)  # by provider, how much slower the next turn is
    turns: int = 0
    previous: str = ""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def time(self, name: str) -> float:
        heat = 1 + self.drift * self.turns / 60
        inherited = 1 + self.after.get(self.previous, 0.0)
        self.turns += 1
        self.previous = name
        stumble = 1.3 if self.noise and self.random.random() < 0.05 else 1.0
        return self.us[name] * heat * inherited * stumble * self.random.gauss(1, self.noise)

    def burst(self, rounds: int) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in self.us}
        for name in itertools.chain(*schedule.rounds(list(self.us), rounds)):
            times[name].append(self.time(name))
        return times


@pytest.mark.parametrize(
    ("us", "machine", "verdict", "least"),
    [
        (100.0, {}, "tied", 195),
        (100.0, {"noise": 0.02}, "tied", 185),  # 95% confidence: at most about one in twenty
        (100.2, {}, "tied", 190),  # 0.2% is less than the protocol can tell
        (98.0, {}, "faster", 198),
        (102.0, {}, "slower", 198),
        (98.0, {"drift": 0.5}, "faster", 195),
    ],
)
def test_drift_and_noise_hide_no_difference_and_make_none(us: float, machine: Any, verdict: str, least: int) -> None:
    """Of a provider of `us` beside a base of 100 and a bystander, over 200 machines of different luck."""
    said = []
    for seed in range(200):
        times = Machine({"base": 100.0, "other": us, "bystander": 180.0}, seed, **machine).burst(18)
        said.append(ratio(times["base"], times["other"]).verdict(BURST_TOLERANCE))
    assert said.count(verdict) >= least


def test_ratio() -> None:
    spread = ratio([10.0, 10.0, 20.0, 10.0, 10.0], [10.0, 5.0, 10.0, 8.0, 4.0])
    assert (spread.low, spread.high) == pytest.approx((1.1, 2.3))
    assert (spread.sure_low, spread.median, spread.sure_high) == (1.0, 2.0, 2.5)  # five rounds: the extremes
    assert ratio([1.0] * 15, [1.0] * 15).verdict(0.0) == "tied"
    for base, times in (([1.0], [1.0]), ([1.0, 2.0], [1.0])):
        with pytest.raises(ValueError, match="expected as many, at least 2"):
            ratio(base, times)


def test_ranks_enclose_the_median_with_95_percent_confidence() -> None:
    assert [_rank(n) for n in (2, 5, 6, 9, 15, 25)] == [0, 0, 0, 1, 3, 7]


def test_a_median_within_the_tolerance_is_a_tie_however_sure() -> None:
    assert ratio([1.004] * 20, [1.0] * 20).verdict(BURST_TOLERANCE) == "tied"
    assert ratio([1.004] * 20, [1.0] * 20).verdict(SUSTAINED_TOLERANCE) == "faster"
    assert ratio([0.9] * 9 + [1.1] * 6, [1.0] * 15).verdict(BURST_TOLERANCE) == "tied"  # unsure


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_rounds_are_balanced(n: int) -> None:
    names = [f"p{i}" for i in range(n)]
    orders = list(schedule.rounds(names, 2 * n))
    assert all(sorted(order) == names for order in orders)
    places = Counter((name, place) for order in orders for place, name in enumerate(order))
    followed = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(followed) == n * (n - 1)
    assert {*places.values(), *followed.values()} == {2}


def test_rounds_complete_the_design() -> None:
    assert [schedule.whole_rounds(n, 15) for n in range(1, 8)] == [16, 16, 18, 16, 20, 18, 28]


def test_what_a_provider_does_to_the_next_one_is_shared() -> None:
    """One provider leaves the device 10% slower: with a plain rotation the same one would always pay for it."""
    us = {"base": 100.0, "hot": 100.0, "other": 100.0}
    times = Machine(us, seed=3, drift=0.0, noise=0.0, after={"hot": 0.1}).burst(12)
    paid = [sum(105 < t < 115 for t in times[name]) for name in ("base", "other")]
    assert abs(paid[0] - paid[1]) <= 2
    assert min(paid) >= 2


def test_turns_put_the_base_around_every_other() -> None:
    order = schedule.turns("base", ["a", "b"], 3)
    assert order == ["base", "a", "base", "b", "base", "b", "base", "a", "base", "a", "base", "b", "base"]
    assert schedule.turns("base", [], 2) == ["base", "base", "base"]


def test_burst_keeps_rounds_together(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, progress = [], Mock()
    monkeypatch.setattr(burst, "_turn", lambda warm, batch, *rest: seen.append(batch) or (float(batch), 1500.0))
    samples = burst.run({"a": (None, 1), "b": (None, 2)}, None, rounds=4, progress=progress)
    assert seen == [1, 2, 2, 1, 1, 2, 2, 1]
    assert samples["b"] == burst.Samples([2.0] * 4, [1500.0] * 4)
    assert progress.call_count == 4


def test_sustained_holds_each_turn_against_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A board that slows down all the time: neighbours cancel what a mean over the run would not."""
    machine = Machine({"cublas": 100.0, "ours": 90.0}, seed=0, drift=3.0, noise=0.0)
    monkeypatch.setattr(sustained, "_turn", lambda batch, *rest: Turn(machine.time(batch), 1400.0, 700.0))
    done = sustained.run({"cublas": "cublas", "ours": "ours"}, "cublas", None, None, passes=3)
    assert [name for name, _ in done] == ["cublas", "ours"] * 3 + ["cublas"]
    pairs = sustained.pair(done, "cublas")
    turns, base = pairs["ours"]
    spread = ratio(base, [t.us for t in turns])
    assert spread.median == pytest.approx(1 / 0.9, rel=1e-9)
    assert spread.verdict(SUSTAINED_TOLERANCE) == "faster"
    own, against = pairs["cublas"]
    assert [t.us for t in own] == against


def test_clock_compares_each_sm_with_itself() -> None:
    before = [[0, 1_000, 50_000], [1, 900_000, 50_032], [7, 5, 50_000]]
    after = [[1, 900_000 + 160_000, 150_032], [0, 1_000 + 150_000, 150_000]]
    assert clock.mhz(before, after) == pytest.approx(1550)  # 1500 and 1600 MHz; SM 7 stamped once


def test_power_takes_two_renewals() -> None:
    assert [power.mean_power(renewals) for renewals in ([], [(1.0, 5000)])] == [None, None]


def test_energy_meter_ignores_a_counter_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = object.__new__(power.EnergyMeter)
    meter.reset()
    readings = [10, 10, 20, 20, 90_000, 90_000, 180_000, 180_000]
    monkeypatch.setattr(power.EnergyMeter, "_read", Mock(side_effect=readings))
    monkeypatch.setattr(power.time, "perf_counter", Mock(side_effect=[1.0, 1.1, 1.2]))
    for _ in readings:
        meter.sample()
    assert meter.watts() == pytest.approx((180_000 - 20) / 1000 / 0.2)


def test_figures() -> None:
    spread = ratio([200.0, 200.0], [100.0, 100.0])
    found = record.figures((1024, 2048, 512), [100.0, 100.0], [1500.0, 1500.0], spread, Device(4096 * 132))
    assert found["tflops"] == pytest.approx(2 * 1024 * 2048 * 512 / 100e-6 / 1e12)
    assert found["utilisation"] == pytest.approx(found["tflops"] * 1e12 / (4096 * 132 * 1500e6))
    assert (found["ratio"], found["us"], found["clock_mhz"]) == (2.0, 100.0, 1500.0)
    assert record.figures((8, 8, 8), [1.0, 1.0], [1.0, 1.0], spread, Device(None))["utilisation"] is None


def test_energy() -> None:
    found = record.energy((4096, 4096, 4096), [200.0, 200.0], [700.0, 700.0])
    assert found["joules"] == pytest.approx(0.14)
    assert found["pj_per_flop"] == pytest.approx(0.14e12 / (2 * 4096**3))
    assert set(record.energy((8, 8, 8), [1.0, 1.0], [700.0, None]).values()) == {None}


def test_graphs_hold_as_many_calls_as_fill_a_millisecond() -> None:
    assert [turn.graph_calls(us) for us in (0.5, 3.4, 10.0, 99.0, 400.0)] == [400, 295, 100, 11, 8]


def test_providers_by_name() -> None:
    assert split_names("a, b[k=v,k=2],c") == ["a", "b[k=v,k=2]", "c"]
    assert split_names("") == []
    assert providers.parse("cublas").trusted
    plain = providers.parse("hopper.tma_wgmma")
    assert (plain.label, plain.trusted) == ("hopper.tma_wgmma", False)
    assert providers.parse("hopper.tma_wgmma[tile_m=128,tile_k=64]").label == "hopper.tma_wgmma[tile_m=128]"
    labels = [p.label for p in campaign.distinct([providers.parse("cublas")] * 3 + [plain] * 2)]
    assert labels == ["cublas", "cublas (2)", "cublas (3)", "hopper.tma_wgmma", "hopper.tma_wgmma (2)"]


BAD = {
    "--kernels hopper.nothing": "kernel is 'hopper.nothing', expected one of",
    "--kernels portable[block_m=7": "expected NAME or NAME",
    "--kernels cublas[a=1]": "takes no config",
    "--kernels portable[nothing=1]": "config has 'nothing=1'",
    "--kernels portable[block_m=x]": "expected an integer",
    "--ladder nothing": "expected a ladder",
    "--shapes 12x": "--shapes is '12x'",
    "--shapes 0": "expected sizes of at least 1",
    "--dtype int8": "--dtype is 'int8'",
    "--layout xx": "--layout is 'xx'",
    "--layout ,": "--layout is ','",
    "--mode fast": "--mode is 'fast'",
    "--rounds 1": "--rounds",
    "--save /nowhere/file.json": "--save is '/nowhere/file.json'",
    "--chart chart.txt": "--chart is 'chart.txt'",
}


@pytest.mark.parametrize(("arguments", "message"), BAD.items())
def test_bad_arguments_are_usage_errors(arguments: str, message: str) -> None:
    result = CliRunner().invoke(app, f"bench {arguments}")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.no_gpu
def test_without_a_gpu_nothing_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign.Campaign, "run", lambda *rest: pytest.fail("timed"))
    saved = tmp_path / "bench.json"
    result = CliRunner().invoke(app, f"bench --save {saved} --json")
    assert "No NVIDIA GPU" in result.stderr
    assert (result.exit_code, result.stdout) == (3, "")
    assert not saved.exists()


def fake(name: str, us: float, fault: str | Exception | None = None, *, trusted: bool = False) -> Provider:
    """A provider that takes `us`, and whose check finds a fault or raises it."""

    class Fake(Provider):
        def fault(self, case: Any) -> str | None:
            if isinstance(fault, Exception):
                raise fault
            return fault

    return Fake(name, "", lambda a, b, out: lambda: us, trusted)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A campaign whose device is synthetic: only what is timed, when, and what is made of it are real."""
    machine = Machine({}, seed=0, drift=0.02)

    def turn_of(warm: Any, batch: turn.Batch, *rest: Any) -> tuple[float, float]:
        us = float(batch.run())
        machine.us[str(us)] = us
        return machine.time(str(us)), 1500.0

    for owner, name, stand_in in (
        (campaign, "Clock", lambda: None),
        (campaign, "EnergyMeter", Mock(side_effect=RuntimeError)),
        (campaign, "normal", lambda *rest: (torch.empty(1, dtype=torch.bfloat16),) * 3),
        (Device, "current", lambda dtype: Device(None)),
        (torch.cuda, "synchronize", lambda: None),
        (turn, "rough_us", lambda call: call()),
        (turn, "host_us", lambda call, us: 12.0),
        (turn, "eager", lambda call, calls=8: turn.Batch(call, calls)),
        (turn, "graph", turn.Batch),
        (turn, "graph_apart", lambda call, calls: turn.Batch(lambda: 5 + (call() if call else 0), calls)),
        (burst, "_turn", turn_of),
        (sustained, "_turn", lambda batch, *rest: Turn(*turn_of(None, batch), None)),
    ):
        monkeypatch.setattr(owner, name, stand_in)
    return machine


def run(us: float, *others: Provider, modes: tuple[str, ...] = ("burst",)) -> list[Record]:
    """Records of a campaign of a base and `ours`, both of `us`, and others."""
    entrants = [fake("cublas", us, trusted=True), fake("ours", us), *others]
    return list(campaign.Campaign(entrants).run([(512, 512, 512)], ["nt"], modes))


def test_a_kernel_that_fails_its_check_is_not_timed(board: Machine) -> None:
    wrong, other = fake("wrong", 1.0, "wrong: 1 of 4 elements"), fake("other", 2.0, Refused("TMA needs 16 bytes"))
    records = run(150.0, wrong, other, fake("crash", 3.0, RuntimeError("out of\nresources")))
    assert [(r.provider, r.check, r.passed, r.us is not None) for r in records] == [
        ("cublas", UNCHECKED, True, True),
        ("ours", "exact", True, True),
        ("wrong", "wrong: 1 of 4 elements", False, False),
        ("other", "refused: TMA needs 16 bytes", True, False),
        ("crash", "failed: RuntimeError: out of resources", False, False),
    ]
    assert not {"1.0", "2.0", "3.0"} & set(board.us)
    assert records[1].verdict == "tied"


def test_short_calls_run_in_graphs_and_apart(board: Machine) -> None:
    _, ours = run(20.0)
    assert (ours.graph, ours.calls, ours.host_us) == (True, 50, 12.0)
    assert ours.us_apart == pytest.approx(20, rel=0.05)
    assert ours.ratio_apart == pytest.approx(1, abs=0.02)
    _, long = run(150.0)
    assert (long.graph, long.calls, long.ratio_apart) == (False, 8, None)


def test_sustained_reports_no_watts_without_a_counter(board: Machine) -> None:
    *others, ours = run(150.0, modes=("burst", "sustained"))
    assert [r.mode for r in (*others, ours)] == ["burst", "burst", "sustained", "sustained"]
    assert (ours.rounds, ours.watts, ours.pj_per_flop, ours.host_us) == (3, None, None, None)
    assert ours.ratio == pytest.approx(1, abs=0.02)


RECORD = Record(
    provider="portable", config="block_m=64", shape=(512, 512, 512), dtype="bfloat16", layout="nt", mode="burst",
    check="exact", rounds=15, calls=300, graph=True, ratio=1.02, ratio_low=1.01, ratio_high=1.03, verdict="faster",
    ratio_apart=1.0, us_apart=3.3, tflops=80.0, us=3.3, host_us=20.0, clock_mhz=1790.0, utilisation=0.08,
)  # fmt: skip


def test_records() -> None:
    assert json.loads(json.dumps(RECORD.record())) == {**vars(RECORD), "shape": [512, 512, 512]}
    cells = dict(zip(COLUMNS, row(RECORD), strict=True))
    assert (cells["provider"], cells["× cuBLAS"]) == ("portable[block_m=64]", "1.020 (1.010–1.030)")
    assert (cells["W"], cells["apart"]) == ("–", "1.000")


def test_chart(tmp_path: Path) -> None:
    base = replace(RECORD, provider="cublas", config="", ratio=1.0, ratio_low=1.0, ratio_high=1.0)
    slow = replace(RECORD, mode="sustained", watts=700.0, joules=0.1, pj_per_flop=1.1)
    large = replace(slow, shape=(1024, 1024, 1024))
    skinny = replace(RECORD, shape=(16, 512, 512))
    failed = Record(provider="x", config="", shape=(8, 8, 8), dtype="bfloat16", layout="nt", mode="burst", check="no")
    report = {
        "environment": {"gpu": "G", "torch": "2", "cuda": "13", "driver": "5"},
        "results": [r.record() for r in (base, RECORD, slow, large, skinny, failed)],
    }
    for name in ("chart.png", "chart.svg"):
        chart.draw(report, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 3000
    assert "16x512x512" in (tmp_path / "chart.svg").read_text()
    with pytest.raises(ValueError, match="no figures"):
        chart.draw({**report, "results": [failed.record()]}, tmp_path / "none.png")


def test_suite() -> None:
    assert len(shapes.SUITE) == 11
    assert shapes.parse("suite,64, 8x16x24")[-2:] == [(64, 64, 64), (8, 16, 24)]
    assert [shapes.to_text(s) for s in ((4, 4, 4), (8, 16, 24))] == ["4", "8x16x24"]


def test_outblas_is_timed_as_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kernel's name: what was tuned, or the rule's."""
    matmul, out = Mock(), torch.empty(2, 2)
    monkeypatch.setattr("outblas.ops.matmul", matmul)
    providers.parse("outblas").prepare(torch.eye(2), torch.eye(2), out)()
    assert [call.kwargs for call in matmul.mock_calls] == [{"out": out}]
    with pytest.raises(ValueError, match="outblas takes no config"):
        providers.parse("outblas[slots=4]")


def test_torch_compile_compiles_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo runs a function eagerly after eight recompilations: the suite has eleven shapes."""
    counter, compile = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile(f, backend=counter, dynamic=False))
    for n in range(2, 14):
        out = torch.empty(n, n)
        providers.parse("torch.compile").prepare(torch.eye(n), torch.full((n, n), float(n)), out)()
        assert out.eq(n).all()
    assert counter.frame_count == 12

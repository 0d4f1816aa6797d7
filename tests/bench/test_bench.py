"""The bench without a GPU: statistics, schedules and protocols on synthetic timings, providers,
records, command.
"""

import dataclasses
import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import invoke, refuses

from outblas.bench import (
    burst,
    campaign,
    chart,
    clock,
    power,
    providers,
    record,
    schedule,
    sustained,
    turn,
)
from outblas.bench.providers import Provider
from outblas.bench.record import Device, Record
from outblas.bench.statistics import BURST_TOLERANCE, SUSTAINED_TOLERANCE, Verdict, _rank, ratio
from outblas.bench.sustained import Turn
from outblas.cli.bench import COLUMNS, row, split_names
from outblas.core import shapes
from outblas.verify.kernels import Refused


class Machine:
    """A GPU that heats up: every call slows as the run goes on, each turn suffers from what ran
    before it.
    """

    def __init__(
        self, us: dict[str, float], *, seed: int, drift: float = 0.1, noise: float = 0.005
    ) -> None:
        """`noise` is relative; with any, one turn in twenty also stumbles."""
        self.us = us
        self.random = random.Random(seed)
        self.drift, self.noise = drift, noise
        self.turns = 0
        self.previous = ""
        self.after = dict.fromkeys(us, 0.0)  # how much slower the next turn is

    def time(self, name: str) -> float:
        heat = 1 + self.drift * self.turns / 60
        inherited = 1 + self.after.get(self.previous, 0.0)
        self.turns += 1
        self.previous = name
        stumble = 1.3 if self.noise and self.random.random() < 0.05 else 1.0
        return self.us[name] * heat * inherited * stumble * self.random.gauss(1, self.noise)

    def burst(self, rounds: int) -> dict[str, list[float]]:
        times = {name: [] for name in self.us}
        for order in schedule.rounds(list(self.us), rounds):
            for name in order:
                times[name].append(self.time(name))
        return times


def verdicts(us: float, runs: int = 200, **machine: Any) -> Counter[Verdict]:
    """What is said of a provider of `us` beside a base of 100 and a bystander, over machines of
    different luck.
    """
    found = Counter()
    for seed in range(runs):
        times = Machine(
            {"base": 100.0, "other": us, "bystander": 180.0}, seed=seed, **machine
        ).burst(schedule.whole_rounds(3, 15))
        found[ratio(times["base"], times["other"]).verdict(BURST_TOLERANCE)] += 1
    return found


def test_equal_providers_are_tied_under_drift_and_noise() -> None:
    assert verdicts(100.0)["tied"] >= 195
    assert verdicts(100.0, noise=0.02)["tied"] >= 185  # 95% confidence: at most about one in twenty
    assert verdicts(100.2)["tied"] >= 190  # 0.2% is less than the protocol can tell


def test_differences_beyond_the_tolerance_are_found() -> None:
    assert verdicts(98.0)["faster"] >= 198
    assert verdicts(102.0)["slower"] >= 198
    assert verdicts(98.0, drift=0.5)["faster"] >= 195


def test_ratio_cancels_drift() -> None:
    times = Machine({"base": 100.0, "other": 80.0}, seed=1, drift=1.0, noise=0.0).burst(16)
    assert max(times["base"]) > 1.4 * min(times["base"])
    assert ratio(times["base"], times["other"]).median == pytest.approx(1.25, rel=0.01)


def test_ratio() -> None:
    spread = ratio([10.0, 10.0, 20.0, 10.0, 10.0], [10.0, 5.0, 10.0, 8.0, 4.0])
    assert spread.median == 2.0
    assert (spread.low, spread.high) == (pytest.approx(1.1), pytest.approx(2.3))
    assert (spread.sure_low, spread.sure_high) == (1.0, 2.5)  # five rounds: the extremes
    assert ratio([1.0] * 15, [1.0] * 15).verdict(0.0) == "tied"
    for base, times in (([1.0], [1.0]), ([1.0, 2.0], [1.0])):
        with pytest.raises(ValueError, match="expected as many, at least 2"):
            ratio(base, times)


def test_ranks_enclose_the_median() -> None:
    assert [_rank(n) for n in (2, 5, 6, 9, 15, 25)] == [0, 0, 0, 1, 3, 7]
    generator = random.Random(0)
    for n in (6, 9, 15, 25):
        inside = 0
        for _ in range(2000):
            values = sorted(generator.random() for _ in range(n))
            inside += values[_rank(n)] <= 0.5 <= values[-1 - _rank(n)]
        assert inside / 2000 >= 0.94


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
    assert set(places.values()) == {2}
    assert len(followed) == n * (n - 1)
    assert set(followed.values()) == {2}


def test_rounds_complete_the_design() -> None:
    assert [schedule.whole_rounds(n, 15) for n in range(1, 8)] == [16, 16, 18, 16, 20, 18, 28]


def test_what_a_provider_does_to_the_next_one_is_shared() -> None:
    """One provider leaves the device 10% slower: with a plain rotation the same one would always
    pay for it.
    """
    machine = Machine({"base": 100.0, "hot": 100.0, "other": 100.0}, seed=3, drift=0.0, noise=0.0)
    machine.after["hot"] = 0.1
    times = machine.burst(12)
    paid = {name: sum(t > 105 and t < 115 for t in times[name]) for name in ("base", "other")}
    assert abs(paid["base"] - paid["other"]) <= 2
    assert min(paid.values()) >= 2


def test_turns_put_the_base_around_every_other() -> None:
    order = schedule.turns("base", ["a", "b"], 3)
    assert order == [
        "base",
        "a",
        "base",
        "b",
        "base",
        "b",
        "base",
        "a",
        "base",
        "a",
        "base",
        "b",
        "base",
    ]
    assert schedule.turns("base", [], 2) == ["base", "base", "base"]


def test_burst_keeps_rounds_together(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        burst,
        "_turn",
        lambda warm, batch, clock, idle: seen.append(batch) or (float(batch), 1500.0),
    )
    batches = {"a": (None, 1), "b": (None, 2)}
    ticks = []
    samples = burst.run(batches, None, rounds=4, progress=lambda: ticks.append(1))
    assert seen == [1, 2, 2, 1, 1, 2, 2, 1]
    assert samples["b"].us == [2.0] * 4
    assert samples["b"].mhz == [1500.0] * 4
    assert len(ticks) == 4


def test_sustained_holds_each_turn_against_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A board that slows down all the time: neighbours cancel what a mean over the run
    would not.
    """
    machine = Machine({"cublas": 100.0, "ours": 90.0}, seed=0, drift=3.0, noise=0.0)
    monkeypatch.setattr(
        sustained, "_turn", lambda batch, *rest: Turn(machine.time(batch), 1400.0, 700.0)
    )
    batches = {"cublas": "cublas", "ours": "ours"}
    done = sustained.run(batches, "cublas", None, None, passes=3)
    assert [name for name, _ in done] == ["cublas", "ours"] * 3 + ["cublas"]
    turns, base = sustained.pair(done, "cublas")["ours"]
    spread = ratio(base, [t.us for t in turns])
    assert spread.median == pytest.approx(1 / 0.9, rel=1e-9)
    assert spread.verdict(SUSTAINED_TOLERANCE) == "faster"
    own, against = sustained.pair(done, "cublas")["cublas"]
    assert [t.us for t in own] == against


def test_clock_compares_each_sm_with_itself() -> None:
    before = [[0, 1_000, 50_000], [1, 900_000, 50_032], [7, 5, 50_000]]
    after = [[1, 900_000 + 160_000, 150_032], [0, 1_000 + 150_000, 150_000]]
    assert clock.mhz(before, after) == pytest.approx(1550)  # 1500 and 1600 MHz; SM 7 stamped once


def test_power_is_taken_between_renewals() -> None:
    assert power.mean_power([]) is None
    assert power.mean_power([(1.0, 5000)]) is None
    assert power.mean_power([(1.0, 5000), (1.1, 75_000), (1.2, 145_000)]) == pytest.approx(700)


def test_energy_meter_ignores_a_counter_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([10, 10, 20, 20, 90_000, 90_000, 180_000, 180_000])
    now = iter([1.0, 1.1, 1.2])
    meter = object.__new__(power.EnergyMeter)
    meter.reset()
    monkeypatch.setattr(power.EnergyMeter, "_read", lambda self: next(readings))
    monkeypatch.setattr(power.time, "perf_counter", lambda: next(now))
    for _ in range(8):
        meter.sample()
    assert meter.watts() == pytest.approx((180_000 - 20) / 1000 / 0.2)


def test_figures() -> None:
    spread = ratio([200.0, 200.0], [100.0, 100.0])
    found = record.figures(
        (1024, 2048, 512), [100.0, 100.0], [1500.0, 1500.0], spread, Device(4096 * 132)
    )
    assert found["tflops"] == pytest.approx(2 * 1024 * 2048 * 512 / 100e-6 / 1e12)
    assert found["utilisation"] == pytest.approx(found["tflops"] * 1e12 / (4096 * 132 * 1500e6))
    assert (found["ratio"], found["us"], found["clock_mhz"]) == (2.0, 100.0, 1500.0)
    assert (
        record.figures((8, 8, 8), [1.0, 1.0], [1.0, 1.0], spread, Device(None))["utilisation"]
        is None
    )


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
    assert (
        providers.parse("hopper.tma_wgmma[tile_m=128,tile_k=64]").label
        == "hopper.tma_wgmma[tile_m=128]"
    )
    twice = campaign.distinct([providers.parse("cublas")] * 3 + [plain, plain])
    assert [p.label for p in twice] == [
        "cublas",
        "cublas (2)",
        "cublas (3)",
        "hopper.tma_wgmma",
        "hopper.tma_wgmma (2)",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kernels", "hopper.nothing"), "--kernels is 'hopper.nothing', expected one of"),
        (("--kernels", "portable[block_m=7"), "expected NAME or NAME"),
        (("--kernels", "cublas[a=1]"), "takes no config"),
        (("--kernels", "portable[nothing=1]"), "config has 'nothing=1'"),
        (("--kernels", "portable[block_m=x]"), "expected an integer"),
        (("--ladder", "nothing"), "expected a ladder"),
        (("--shapes", "12x"), "--shapes is '12x'"),
        (("--shapes", "0"), "expected sizes of at least 1"),
        (("--dtype", "int8"), "--dtype is 'int8'"),
        (("--layout", "xx"), "--layout is 'xx'"),
        (("--layout", ","), "--layout is ','"),
        (("--mode", "fast"), "--mode is 'fast'"),
        (("--rounds", "1"), "--rounds"),
        (("--save", "/nowhere/file.json"), "--save is '/nowhere/file.json'"),
        (("--chart", "chart.txt"), "--chart is 'chart.txt'"),
    ],
)
def test_bad_arguments_are_usage_errors(arguments: tuple[str, ...], message: str) -> None:
    refuses(message, "bench", *arguments)


@pytest.mark.no_gpu
def test_without_a_gpu_nothing_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign.Campaign, "run", lambda *rest: pytest.fail("timed"))
    saved = tmp_path / "bench.json"
    result = invoke("bench", "--save", saved, "--json", code=3)
    assert "No NVIDIA GPU" in result.stderr
    assert result.stdout == ""
    assert not saved.exists()


def fake(
    name: str,
    *,
    fault: str | None = None,
    refusal: str | None = None,
    us: float = 100.0,
    crash: str = "",
) -> Provider:
    def prepare(a: Any, b: Any, out: Any) -> Any:
        return lambda: us

    class Fake(Provider):
        def fault(self, case: Any) -> str | None:
            if refusal:
                raise Refused(refusal)
            if crash:
                raise RuntimeError(crash)
            return fault

    return Fake(name, "", prepare)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A campaign whose device is synthetic: only what is timed, when, and what is made of it are
    real.
    """
    machine = Machine({}, seed=0, drift=0.02)

    class NoClock:
        def start(self, wait_us: float = 0.0) -> None: ...
        def stop(self) -> None: ...
        def mhz(self) -> float:
            return 1500.0

    def turn_of(warm: Any, batch: turn.Batch, *rest: Any) -> tuple[float, float]:
        us = float(batch.run())
        machine.us[str(us)] = us
        return machine.time(str(us)), 1500.0

    def no_meter() -> None:
        raise RuntimeError

    monkeypatch.setattr(campaign, "Clock", NoClock)
    monkeypatch.setattr(campaign, "EnergyMeter", no_meter)
    monkeypatch.setattr(
        campaign, "normal", lambda *rest: (torch.empty(1, dtype=torch.bfloat16),) * 3
    )
    monkeypatch.setattr(Device, "current", lambda dtype: Device(None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(turn, "rough_us", lambda call: call())
    monkeypatch.setattr(turn, "host_us", lambda call, us: 12.0)
    monkeypatch.setattr(turn, "eager", lambda call, calls=8: turn.Batch(call, calls))
    monkeypatch.setattr(turn, "graph", lambda call, calls: turn.Batch(call, calls))
    monkeypatch.setattr(
        turn,
        "graph_apart",
        lambda call, calls: turn.Batch((lambda: 5 + call()) if call else (lambda: 5), calls),
    )
    monkeypatch.setattr(burst, "_turn", turn_of)
    monkeypatch.setattr(sustained, "_turn", lambda batch, *rest: Turn(*turn_of(None, batch), None))
    return machine


def run(*entrants: Provider, modes: tuple[str, ...] = ("burst",)) -> dict[tuple[str, str], Record]:
    base = dataclasses.replace(
        fake("cublas", us=entrants[0].prepare(None, None, None)()), trusted=True
    )
    found = campaign.Campaign([base, *entrants]).run([(512, 512, 512)], ["nt"], modes)
    return {(r.provider, r.mode): r for r in found}


def test_a_kernel_that_fails_its_check_is_not_timed(board: Machine) -> None:
    right, wrong = fake("right", us=150.0), fake("wrong", fault="wrong: 1 of 4 elements", us=1.0)
    crash = fake("crash", crash="out of\nresources", us=3.0)
    records = run(right, wrong, fake("other", refusal="TMA needs 16 bytes", us=2.0), crash)
    assert records["crash", "burst"].check == "failed: RuntimeError: out of resources"
    assert not records["crash", "burst"].passed
    assert records["wrong", "burst"].check == "wrong: 1 of 4 elements"
    assert records["other", "burst"].check == "refused: TMA needs 16 bytes"
    assert all(records[name, "burst"].us is None for name in ("wrong", "other", "crash"))
    assert not {"1.0", "2.0", "3.0"} & set(board.us)
    assert [
        name for name in ("cublas", "right", "wrong", "other") if not records[name, "burst"].passed
    ] == ["wrong"]
    assert records["right", "burst"].check == "exact"
    assert records["right", "burst"].verdict == "tied"


def test_short_calls_run_in_graphs_and_apart(board: Machine) -> None:
    records = run(fake("ours", us=20.0))
    ours = records["ours", "burst"]
    assert (ours.graph, ours.calls, ours.host_us) == (True, 50, 12.0)
    assert ours.us_apart == pytest.approx(20, rel=0.05)
    assert ours.ratio_apart == pytest.approx(1, abs=0.02)
    long = run(fake("ours", us=150.0))["ours", "burst"]
    assert (long.graph, long.calls, long.ratio_apart) == (False, 8, None)


def test_sustained_reports_no_watts_without_a_counter(board: Machine) -> None:
    records = run(fake("ours", us=150.0), modes=("burst", "sustained"))
    ours = records["ours", "sustained"]
    assert (ours.rounds, ours.watts, ours.pj_per_flop, ours.host_us) == (3, None, None, None)
    assert ours.ratio == pytest.approx(1, abs=0.02)
    assert {mode for _, mode in records} == {"burst", "sustained"}


RECORD = Record(
    provider="portable",
    config="block_m=64",
    shape=(512, 512, 512),
    dtype="bfloat16",
    layout="nt",
    mode="burst",
    check="exact",
    rounds=15,
    calls=300,
    graph=True,
    ratio=1.02,
    ratio_low=1.01,
    ratio_high=1.03,
    verdict="faster",
    ratio_apart=1.0,
    us_apart=3.3,
    tflops=80.0,
    us=3.3,
    host_us=20.0,
    clock_mhz=1790.0,
    utilisation=0.08,
)


def test_records() -> None:
    keys = (
        "ratio ratio_low ratio_high tflops us host_us clock_mhz utilisation watts joules "
        "pj_per_flop mode check"
    )
    assert set(keys.split()) <= set(RECORD.record())
    assert json.loads(json.dumps(RECORD.record()))["shape"] == [512, 512, 512]
    cells = dict(zip(COLUMNS, row(RECORD), strict=True))
    assert cells["× cuBLAS"] == "1.020 (1.010–1.030)"
    assert cells["provider"] == "portable[block_m=64]"
    assert (cells["W"], cells["apart"]) == ("–", "1.000")


def test_chart(tmp_path: Path) -> None:
    base = dataclasses.replace(
        RECORD, provider="cublas", config="", ratio=1.0, ratio_low=1.0, ratio_high=1.0
    )
    slow = dataclasses.replace(RECORD, mode="sustained", watts=700.0, joules=0.1, pj_per_flop=1.1)
    large = dataclasses.replace(slow, shape=(1024, 1024, 1024))
    skinny = dataclasses.replace(RECORD, shape=(16, 512, 512))
    failed = Record(
        provider="x",
        config="",
        shape=(8, 8, 8),
        dtype="bfloat16",
        layout="nt",
        mode="burst",
        check="no",
    )
    report = {
        "environment": {"gpu": "G", "torch": "2", "cuda": "13", "driver": "5"},
        "results": [r.record() for r in (base, RECORD, slow, large, skinny, failed)],
    }
    for name in ("chart.png", "chart.svg"):
        chart.draw(report, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 3000
    text = (tmp_path / "chart.svg").read_text()
    assert "16x512x512" in text
    with pytest.raises(ValueError, match="no figures"):
        chart.draw({**report, "results": [failed.record()]}, tmp_path / "none.png")


def test_suite() -> None:
    assert len(shapes.SUITE) == 11
    assert shapes.parse("suite,64, 8x16x24")[-2:] == [(64, 64, 64), (8, 16, 24)]
    assert [shapes.to_text(s) for s in ((4, 4, 4), (8, 16, 24))] == ["4", "8x16x24"]


def test_outblas_is_timed_as_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kernel's name: what was tuned, or the rule's."""
    asked = []
    monkeypatch.setattr("outblas.api.matmul", lambda a, b, **how: asked.append(how))
    out = torch.empty(2, 2)
    providers.parse("outblas").prepare(torch.eye(2), torch.eye(2), out)()
    assert asked == [{"out": out}]
    with pytest.raises(ValueError, match="outblas takes no config"):
        providers.parse("outblas[stages=4]")


def test_torch_compile_compiles_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo runs a function eagerly after eight recompilations: the suite has eleven shapes."""
    compiled, compile = [], torch.compile

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(inputs)
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compile(f, backend=backend, dynamic=False)
    )
    for n in range(2, 14):
        out = torch.empty(n, n)
        providers.parse("torch.compile").prepare(torch.eye(n), torch.full((n, n), float(n)), out)()
        assert out.eq(n).all()
    assert len(compiled) == 12

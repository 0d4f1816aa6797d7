"""One workload's driver, with a worker that is played: budgets, shared stores, finals, and a worker that goes down."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import faulty_kernel
import pytest
from faulty_kernel import Config
from sweeps import H100, SUBJECT, WORKLOAD

from outblas.autotune import ahead, finals, racing, tuning
from outblas.autotune.isolated import Down
from outblas.autotune.records import Gpu, Trial, Workload, now
from outblas.autotune.store import Store
from outblas.autotune.subjects import Subject
from outblas.autotune.tuning import Job, Outcome
from outblas.autotune.worker import Entry, Screened
from outblas.configs import from_text, to_text

pytestmark = pytest.mark.usefixtures("faulty_log")


@dataclass
class FakeBench:
    """Stands for a worker: µs by a config's number, 100 for cuBLAS; `down` may raise before any call."""

    down: Callable[[str, Config | None], None] = lambda call, config: None
    seconds: float = 0.0
    sleep: Callable[[float], None] = time.sleep
    calls: list[tuple[str, Any]] = field(default_factory=list)
    restarts: int = 0
    trial_seconds: float = 0.5
    entered: set[Entry] = field(default_factory=set)

    def open(self, workload: Workload) -> float:
        self._called("open", None)
        return 100.0

    def screen(self, workload: Workload, entry: Entry, best_us: float | None) -> Screened:
        config = self._called("screen", entry)
        us = 50.0 + config.number
        return Screened("ok", us=us, ratio=100 / us, ratio_low=100 / us, ratio_high=100 / us)

    def enter(self, workload: Workload, entry: Entry) -> Screened:
        self._called("enter", entry)
        self.entered.add(entry)
        return Screened("ok")

    def race(self, entries: Sequence[Entry], rounds: int) -> tuple[list[float], list[list[float]]]:
        configs = [self._called("race", entry) for entry in entries]
        if not self.entered >= set(entries):
            raise Down("crash", "the worker is another one")
        return [100.0] * rounds, [[50.0 + config.number] * rounds for config in configs]

    def forget(self, entries: Sequence[Entry]) -> None:
        self._called("forget", None)

    def _called(self, call: str, entry: Entry | None) -> Any:
        config = from_text(Config, entry[1]) if entry else None
        self.sleep(self.seconds)
        self.calls.append((call, config))
        try:
            self.down(call, config)
        except Down:
            self.restarts += 1
            self.entered.clear()
            raise
        return config

    def configs(self, call: str) -> list[int]:
        return [config.number for name, config in self.calls if name == call]


def tune(store: Store, bench: FakeBench, *, compilers: Any = None, on: Gpu = H100, **options: Any) -> Outcome:
    job = Job(options.pop("subjects", (SUBJECT,)), WORKLOAD, **options)
    return tuning.tune(job, on, bench, compilers, store)  # type: ignore[arg-type]


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store(path) as store:
        yield store


def test_three_sweeps_share_a_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What two measure is not what two died of."""
    monkeypatch.setenv("FAULTY_CONFIGS", "12")
    benches = [FakeBench(seconds=0.02) for _ in range(3)]
    found: list[Outcome] = []
    threads = [threading.Thread(target=lambda b=bench: found.append(tune(store, b, top_k=1))) for bench in benches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert Counter(trial.status for trial in store.trials()) == {"ok": 12}
    assert sum(outcome.new for outcome in found) == 12
    assert sum(len(bench.configs("screen")) for bench in benches) <= 12 + 3


def test_the_fastest_reach_the_finals(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_CONFIGS", "10")
    bench = FakeBench()
    found = tune(store, bench, top_k=3)
    assert sorted(bench.configs("screen")) == list(range(10))
    assert sorted(set(bench.configs("race"))) == [0, 1, 2]
    assert found.winner is not None
    assert from_text(Config, found.winner.config).number == 0
    assert from_text(Config, found.winner.runner_up).number == 1
    assert (found.winner.screened, found.winner.valid) == (10, 10)
    assert found.winner.separated
    assert found.winner.lead == pytest.approx(51 / 50)
    assert found.winner.ratio == 2.0
    assert [from_text(Config, f.config).number for f in found.winner.finalists] == [0, 1, 2]
    assert store.winners() == [found.winner]


def test_winners_of_before_race_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_CONFIGS", "5")
    winner = tune(store, FakeBench(), top_k=1).winner
    assert winner is not None
    store.crown(replace(winner, config=to_text(Config(number=4)), when="2999-01-01T00:00:00+00:00"))
    monkeypatch.setenv("FAULTY_CONFIGS", "6")
    bench = FakeBench()
    tune(store, bench, top_k=1)
    assert bench.configs("screen") == [5]
    assert set(bench.configs("race")) == {0, 4}
    other = FakeBench()
    tune(store, other, top_k=1, on=replace(H100, driver="1"))
    assert set(other.configs("race")) == {0}
    assert len(other.configs("screen")) == 6


def test_a_sweep_with_nothing_new_keeps_its_winners(store: Store) -> None:
    first, bench = tune(store, FakeBench()), FakeBench()
    found = tune(store, bench)
    assert bench.calls == []
    assert found.new == 0
    assert found.finished
    assert found.winners == first.winners
    assert found.trials == first.trials
    anew = FakeBench()
    assert tune(store, anew, resume=False).new == 3
    assert set(anew.configs("race")) == {0, 1, 2}


def test_each_kernel_has_a_winner(store: Store) -> None:
    other = Subject("other", "faulty_kernel")
    found = tune(store, FakeBench(), top_k=1, subjects=(SUBJECT, other))
    assert {winner.kernel for winner in found.winners} == {"faulty", "other"}
    assert len({winner.finalists for winner in found.winners}) == 1


def test_what_a_sweep_began_twice_and_never_ended_is_given_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "PATIENCE", 1.0)
    source = SUBJECT.fingerprint
    for _ in range(2):
        store.begin(H100, WORKLOAD, "faulty", source, to_text(Config(number=1)))
    bench = FakeBench()
    found = tune(store, bench)
    by_number = {from_text(Config, trial.config).number: trial for trial in found.trials}
    assert by_number[1].status == "crash"
    assert "2 sweeps ended while they measured it" in by_number[1].reason
    assert 1 not in bench.configs("screen")
    assert [by_number[i].status for i in (0, 2)] == ["ok", "ok"]


def test_what_others_measure_right_now_is_not_given_up(store: Store) -> None:
    """As `begun`, a config that two sweeps measure looks like one that two sweeps died of."""
    source, config = SUBJECT.fingerprint, to_text(Config(number=1))
    for _ in range(2):
        store.begin(H100, WORKLOAD, "faulty", source, config)
    theirs = Trial(
        gpu=H100, workload=WORKLOAD, kernel="faulty", source=source, config=config, status="ok", us=1.0, when=now()
    )
    threading.Timer(0.3, store.add, [theirs]).start()
    bench = FakeBench()
    found = tune(store, bench)
    assert 1 not in bench.configs("screen")
    assert [trial.status for trial in found.trials] == ["ok"] * 3


def test_measuring_anew(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for us in (0, 1, 2, 3):
        bench = FakeBench()
        monkeypatch.setattr(bench, "screen", lambda *_, us=us: Screened("ok", us=90.0 + us, ratio=1.0))
        found = tune(store, bench, resume=False)
        assert [trial.status for trial in found.trials] == ["ok"] * 3
        assert found.new == 3
        assert {trial.us for trial in store.trials()} == {90.0 + us}


def test_a_workload_that_goes_down_is_said_to_fail(store: Store) -> None:
    def down(call: str, config: Config | None) -> None:
        if call == "open":
            raise Down("crash", "no operands")

    found = tune(store, FakeBench(down))
    assert not found.finished
    assert found.trials == []
    assert found.winner is None


def test_a_finalist_that_fails_takes_nobody_along(store: Store) -> None:
    """It passed its screen, and takes the worker down in the finals, and with it all that had entered."""

    def down(call: str, config: Config | None) -> None:
        if call == "enter" and config and config.number == 1:
            raise Down("crash", "a bad day")

    found = tune(store, FakeBench(down))
    assert found.finished
    assert found.winner is not None
    assert [from_text(Config, f.config).number for f in found.winner.finalists] == [0, 2]


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_race_that_goes_down(store: Store, when: str) -> None:
    """Some rival takes the worker down as soon as it races; the others go on."""
    raced = Counter[int]()

    def down(call: str, config: Config | None) -> None:
        if call == "race" and config and config.number == 1:
            raced[1] += 1
            if when == "at once" or raced[1] > 1:
                raise Down("device lost", "an illegal access")

    bench = FakeBench(down)
    found = tune(store, bench)
    assert found.finished
    assert found.winner is not None
    assert from_text(Config, found.winner.config).number == 0
    assert [from_text(Config, f.config).number for f in found.winner.finalists] == [0, 2]


def test_a_worker_that_goes_down_at_forgetting(store: Store) -> None:
    def down(call: str, config: Config | None) -> None:
        if call == "forget":
            raise Down("crash", "gone")

    assert tune(store, FakeBench(down)).winner is not None


class Clock:
    """Stands for `time` where only calls of a worker take any."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_budget_ends_a_screen_and_leaves_time_for_finals(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_CONFIGS", "1000")
    clock = Clock()
    for module in (tuning, ahead, racing):
        monkeypatch.setattr(module, "time", clock)
    bench = FakeBench(seconds=0.01, sleep=clock.sleep)
    found = tune(store, bench, seconds=1.0, top_k=2)
    assert 0.75 < clock.now - 1000 < 1.1
    assert not found.finished
    assert 30 < found.new == len(bench.configs("screen")) < 40  # each opens its worker first
    assert found.winner is not None
    assert found.winner.valid == 1000
    assert found.winner.rounds >= finals.BATCH
    assert tune(store, FakeBench(), top_k=2).new == 1000 - found.new


class SlowCompilers:
    """Whose compiles never end."""

    workers = 1

    def __init__(self) -> None:
        self.futures: list[Future[float]] = []

    def submit(self, *_: object) -> Future[float]:
        self.futures.append(Future())
        return self.futures[-1]


@pytest.mark.timeout(15)
def test_budget_ends_compiles_too(store: Store) -> None:
    began = time.monotonic()
    compilers = SlowCompilers()
    found = tune(store, FakeBench(), compilers=compilers, seconds=1.0)
    assert time.monotonic() - began < 10
    assert all(future.cancelled() for future in compilers.futures)
    assert not found.finished


def test_few_are_compiled_ahead(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_CONFIGS", "20")
    futures: list[Future[float]] = []
    bench = FakeBench()

    class Eager:
        workers = 2

        def submit(self, subject: Subject, workload: Workload, config: str, arch: int) -> Future[float]:
            futures.append(Future())
            futures[-1].set_result(1.5)
            assert len(futures) - len(bench.configs("screen")) <= ahead.AHEAD * self.workers
            return futures[-1]

    found = tune(store, bench, compilers=Eager())
    assert len(futures) == found.new == 20
    assert {trial.compile_s for trial in found.trials} == {1.5}


def test_configs_that_share_a_compile(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = faulty_kernel.space
    monkeypatch.setenv("FAULTY_CONFIGS", "6")
    monkeypatch.setattr(
        faulty_kernel,
        "space",
        lambda *_: replace(whole(None, None), compiled_as=lambda c: replace(c, number=c.number % 2)),  # type: ignore[arg-type]
    )
    futures: list[Future[float]] = []

    class Eager:
        workers = 2

        def submit(self, *_: object) -> Future[float]:
            futures.append(Future())
            futures[-1].set_result(1.0)
            return futures[-1]

    found = tune(store, FakeBench(), compilers=Eager())
    assert len(futures) == 2
    assert found.new == 6

"""One workload's driver, with a worker that is played: budgets, shared stores, finals, and a worker that goes down."""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Timer

import faulty_kernel
import pytest
from faulty_kernel import Config
from sweeps import H100, SUBJECT, WORKLOAD

from outblas.autotune import ahead, finals, racing, tuning
from outblas.autotune.isolated import Down
from outblas.autotune.records import Trial, now
from outblas.autotune.store import Store
from outblas.autotune.subjects import Subject
from outblas.autotune.tuning import Job
from outblas.autotune.worker import Entry, Screened
from outblas.configs import from_text, to_text

pytestmark = pytest.mark.usefixtures("faulty_log")

ONE = to_text(Config(number=1))


def number(of):
    return from_text(Config, of.config).number


@dataclass
class FakeBench:
    """Stands for a worker: µs by a config's number, 100 for cuBLAS. Goes `down` at that call of that config, but for
    the first `spared` times."""

    down: tuple[str, int | None] | None = None
    spared: int = 0
    us: float = 50.0
    seconds: float = 0.0
    sleep: Callable[[float], None] = time.sleep
    calls: list[tuple[str, int | None]] = field(default_factory=list)
    restarts: int = 0
    entered: set[Entry] = field(default_factory=set)

    def open(self, workload):
        self._called("open")
        return 100.0

    def screen(self, workload, entry, best_us):
        us = self._called("screen", entry)
        return Screened("ok", us=us, ratio=100 / us, ratio_low=100 / us, ratio_high=100 / us)

    def enter(self, workload, entry):
        self._called("enter", entry)
        self.entered.add(entry)
        return Screened("ok")

    def race(self, entries, rounds):
        times = [[self._called("race", entry)] * rounds for entry in entries]
        if not self.entered >= set(entries):
            raise Down("crash", "the worker is another one")
        return [100.0] * rounds, times

    def forget(self, entries):
        self._called("forget")

    def _called(self, call, entry=None):
        config = from_text(Config, entry[1]).number if entry else None
        self.sleep(self.seconds)
        self.calls.append((call, config))
        if self.down == (call, config) and self.calls.count(self.down) > self.spared:
            self.restarts += 1
            self.entered.clear()
            raise Down("crash", "a bad day")
        return self.us + (config or 0)

    def configs(self, call):
        return [config for name, config in self.calls if name == call]


@dataclass
class FakeCompilers:
    """Whose compiles have taken `seconds`, or never end. `most`: by how many the bench was behind."""

    bench: FakeBench
    seconds: float | None = None
    workers: int = 2
    futures: list[Future[float]] = field(default_factory=list)
    most: int = 0

    def submit(self, *_):
        self.futures.append(Future())
        if self.seconds is not None:
            self.futures[-1].set_result(self.seconds)
        self.most = max(self.most, len(self.futures) - len(self.bench.configs("screen")))
        return self.futures[-1]


@pytest.fixture
def store(path):
    with Store(path) as store:
        yield store


@pytest.fixture
def tune(store, monkeypatch):
    def tuned(bench, configs=3, *, on=H100, subjects=(SUBJECT,), compilers=None, **options):
        monkeypatch.setenv("FAULTY_CONFIGS", str(configs))
        return tuning.tune(Job(subjects, WORKLOAD, **options), on, bench, compilers, store)

    return tuned


def test_three_sweeps_share_a_store(tune, store):
    """What two measure is not what two died of."""
    benches = [FakeBench(seconds=0.02) for _ in range(3)]
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(lambda bench: tune(bench, 12, top_k=1), benches))
    assert Counter(trial.status for trial in store.trials()) == {"ok": 12}
    assert sum(outcome.new for outcome in found) == 12
    assert sum(len(bench.configs("screen")) for bench in benches) <= 12 + 3


def test_the_fastest_reach_the_finals(tune, store):
    bench = FakeBench()
    winner = tune(bench, 10, top_k=3).winner
    assert sorted(bench.configs("screen")) == list(range(10))
    assert sorted(set(bench.configs("race"))) == [0, 1, 2]
    assert number(winner) == 0
    assert from_text(Config, winner.runner_up).number == 1
    assert (winner.screened, winner.valid) == (10, 10)
    assert winner.separated
    assert winner.lead == pytest.approx(51 / 50)
    assert winner.ratio == 2.0
    assert list(map(number, winner.finalists)) == [0, 1, 2]
    assert store.winners() == [winner]


def test_winners_of_before_race_again(tune, store):
    winner = tune(FakeBench(), 5, top_k=1).winner
    store.crown(replace(winner, config=to_text(Config(number=4)), when="2999-01-01T00:00:00+00:00"))
    bench, other = FakeBench(), FakeBench()
    tune(bench, 6, top_k=1)
    assert bench.configs("screen") == [5]
    assert set(bench.configs("race")) == {0, 4}
    tune(other, 6, top_k=1, on=replace(H100, driver="1"))
    assert set(other.configs("race")) == {0}
    assert len(other.configs("screen")) == 6


def test_a_sweep_with_nothing_new_keeps_its_winners(tune):
    first, bench, anew = tune(FakeBench()), FakeBench(), FakeBench()
    found = tune(bench)
    assert bench.calls == []
    assert (found.new, found.finished) == (0, True)
    assert (found.winners, found.trials) == (first.winners, first.trials)
    assert tune(anew, resume=False).new == 3
    assert set(anew.configs("race")) == {0, 1, 2}


def test_each_kernel_has_a_winner(tune):
    found = tune(FakeBench(), top_k=1, subjects=(SUBJECT, Subject("other", "faulty_kernel")))
    assert {winner.kernel for winner in found.winners} == {"faulty", "other"}
    assert len({winner.finalists for winner in found.winners}) == 1


def begin_twice(store):
    for _ in range(2):
        store.begin(H100, WORKLOAD, "faulty", SUBJECT.fingerprint, ONE)


def test_what_a_sweep_began_twice_and_never_ended_is_given_up(tune, store, monkeypatch):
    monkeypatch.setattr(tuning, "PATIENCE", 1.0)
    begin_twice(store)
    bench = FakeBench()
    trials = {number(trial): trial for trial in tune(bench).trials}
    assert {i: trial.status for i, trial in trials.items()} == {0: "ok", 1: "crash", 2: "ok"}
    assert "2 sweeps ended while they measured it" in trials[1].reason
    assert 1 not in bench.configs("screen")


def test_what_others_measure_right_now_is_not_given_up(tune, store):
    """As `begun`, a config that two sweeps measure looks like one that two sweeps died of."""
    begin_twice(store)
    theirs = Trial(
        gpu=H100, workload=WORKLOAD, kernel="faulty", source=SUBJECT.fingerprint, config=ONE, status="ok", us=1.0,
        when=now(),
    )  # fmt: skip
    Timer(0.3, store.add, [theirs]).start()
    bench = FakeBench()
    found = tune(bench)
    assert 1 not in bench.configs("screen")
    assert [trial.status for trial in found.trials] == ["ok"] * 3


def test_measuring_anew(tune, store):
    for us in (50.0, 60.0, 70.0, 80.0):
        found = tune(FakeBench(us=us), resume=False)
        assert [trial.status for trial in found.trials] == ["ok"] * 3
        assert found.new == 3
        assert {trial.us for trial in store.trials()} == {us, us + 1, us + 2}


def test_a_workload_that_goes_down_is_said_to_fail(tune):
    found = tune(FakeBench(("open", None)))
    assert (found.finished, found.trials, found.winner) == (False, [], None)


@pytest.mark.parametrize(("call", "spared"), [("enter", 0), ("race", 0), ("race", 1)])
def test_a_finalist_that_fails_takes_nobody_along(tune, call, spared):
    """It passed its screen, and takes the worker down in the finals, and with it all that had entered."""
    found = tune(FakeBench((call, 1), spared))
    assert found.finished
    assert number(found.winner) == 0
    assert list(map(number, found.winner.finalists)) == [0, 2]


def test_a_worker_that_goes_down_at_forgetting(tune):
    assert tune(FakeBench(("forget", None))).winner is not None


class Clock:
    """Stands for `time` where only calls of a worker take any."""

    now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_budget_ends_a_screen_and_leaves_time_for_finals(tune, monkeypatch):
    clock = Clock()
    for module in (tuning, ahead, racing):
        monkeypatch.setattr(module, "time", clock)
    bench = FakeBench(seconds=0.01, sleep=clock.sleep)
    found = tune(bench, 1000, seconds=1.0, top_k=2)
    assert 0.75 < clock.now - 1000 < 1.1
    assert not found.finished
    assert 30 < found.new == len(bench.configs("screen")) < 40  # each opens its worker first
    assert found.winner.valid == 1000
    assert found.winner.rounds >= finals.BATCH
    assert tune(FakeBench(), 1000, top_k=2).new == 1000 - found.new


@pytest.mark.timeout(15)
def test_budget_ends_compiles_too(tune):
    began = time.monotonic()
    bench = FakeBench()
    compilers = FakeCompilers(bench)
    found = tune(bench, compilers=compilers, seconds=1.0)
    assert time.monotonic() - began < 10
    assert all(future.cancelled() for future in compilers.futures)
    assert not found.finished


def test_few_are_compiled_ahead(tune):
    bench = FakeBench()
    compilers = FakeCompilers(bench, seconds=1.5)
    found = tune(bench, 20, compilers=compilers)
    assert compilers.most <= ahead.AHEAD * compilers.workers
    assert len(compilers.futures) == found.new == 20
    assert {trial.compile_s for trial in found.trials} == {1.5}


def test_configs_that_share_a_compile(tune, monkeypatch):
    whole = faulty_kernel.space
    by_parity = {"compiled_as": lambda config: replace(config, number=config.number % 2)}
    monkeypatch.setattr(faulty_kernel, "space", lambda *of: replace(whole(*of), **by_parity))
    bench = FakeBench()
    compilers = FakeCompilers(bench, seconds=1.0)
    assert tune(bench, 6, compilers=compilers).new == 6
    assert len(compilers.futures) == 2

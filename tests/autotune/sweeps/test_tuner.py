"""One workload's driver, with a worker that is played: budgets, shared stores, finals, and a worker
that goes down.
"""

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Timer
from typing import Any
from unittest.mock import Mock

import pytest
from support import faulty_kernel
from support.fake_bench import Clock, FakeWorker, number, number_in
from support.faulty_kernel import Config
from support.sweeps import H100, SUBJECT, WORKLOAD

from outblas.autotune.measure import compile_pool as compiling
from outblas.autotune.measure import finals as racing
from outblas.autotune.measure import prefetch
from outblas.autotune.measure import race as finals
from outblas.autotune.measure.isolated import Cancelled
from outblas.autotune.measure.progress import silent
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import Gpu, Trial, now
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps import screening, tuner
from outblas.autotune.sweeps.tuner import Job, Outcome
from outblas.core.configs import from_text, to_text

pytestmark = pytest.mark.usefixtures("faulty_log")

ONE = to_text(Config(number=1))


@dataclass
class FakeCompilers:
    """Whose compiles have taken `seconds`, or never end; those of configs 1 and 3 are `killed` so
    many times.

    `most`: by how many the bench was behind.
    """

    bench: FakeWorker
    seconds: float | None = None
    workers: int = 2
    futures: list[Future[float]] = field(default_factory=list)
    most: int = 0
    killed: int = 0

    def submit(self, subject, workload, config, arch) -> Future[float]:
        self.futures.append(Future())
        if self.killed and number_in(config) in (1, 3):
            self.killed -= 1
            self.futures[-1].set_exception(
                compiling.CompileError("killed", "the compiler was killed")
            )
        elif self.seconds is not None:
            self.futures[-1].set_result(self.seconds)
        self.most = max(self.most, len(self.futures) - len(self.bench.configs("screen")))
        return self.futures[-1]


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store(path) as store:
        yield store


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of budgets, which passes only where somebody sleeps."""
    clock = Clock()
    for module in (tuner, screening, prefetch, racing):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def tune(store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    def tuned(
        bench: FakeWorker,
        configs: int = 3,
        *,
        on: Gpu = H100,
        subjects: Any = (SUBJECT,),
        compilers: Any = None,
        report=silent,
        **options: Any,
    ) -> Outcome:
        monkeypatch.setenv("FAULTY_CONFIGS", str(configs))
        return tuner.tune(Job(subjects, WORKLOAD, **options), on, bench, compilers, store, report)

    return tuned


def test_three_sweeps_share_a_store(tune: Callable[..., Outcome], store: Store) -> None:
    """What two measure is not what two died of."""
    benches = [FakeWorker(seconds=0.02) for _ in range(3)]
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(lambda bench: tune(bench, 12, top_k=1), benches))
    assert Counter(trial.status for trial in store.trials()) == {"ok": 12}
    assert sum(outcome.new for outcome in found) == 12
    assert sorted(config for bench in benches for config in bench.configs("screen")) == list(
        range(12)
    )


def test_the_fastest_reach_the_finals(tune: Callable[..., Outcome], store: Store) -> None:
    bench = FakeWorker()
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


def test_measuring_without_the_lock_comes_with_the_outcome(tune: Callable[..., Outcome]) -> None:
    told = []
    outcome = tune(
        FakeWorker(unlocked="no lock can be had"),
        report=lambda progress: told.append(progress.message),
    )
    assert outcome.unlocked == "no lock can be had"
    assert told[-1] == "no lock can be had"


def test_winners_of_before_race_again(tune: Callable[..., Outcome], store: Store) -> None:
    winner = tune(FakeWorker(), 5, top_k=1).winner
    store.record_best(
        replace(winner, config=to_text(Config(number=4)), when="2999-01-01T00:00:00+00:00")
    )
    bench, other = FakeWorker(), FakeWorker()
    tune(bench, 6, top_k=1)
    assert bench.configs("screen") == [5]
    assert set(bench.configs("race")) == {0, 4}
    tune(other, 6, top_k=1, on=replace(H100, driver="1"))
    assert set(other.configs("race")) == {0}
    assert len(other.configs("screen")) == 6


def test_a_sweep_with_nothing_new_keeps_its_winners(tune: Callable[..., Outcome]) -> None:
    first, bench, anew = tune(FakeWorker()), FakeWorker(), FakeWorker()
    found = tune(bench)
    assert bench.calls == []
    assert (found.new, found.finished) == (0, True)
    assert (found.winners, found.trials) == (first.winners, first.trials)
    assert tune(anew, resume=False).new == 3
    assert set(anew.configs("race")) == {0, 1, 2}


def test_each_kernel_has_a_winner(tune):
    found = tune(
        FakeWorker(), top_k=1, subjects=(SUBJECT, TuneTarget("other", "support.faulty_kernel"))
    )
    assert {winner.kernel for winner in found.winners} == {"faulty", "other"}
    assert len({winner.finalists for winner in found.winners}) == 1


def facts(config):
    return H100, WORKLOAD, "faulty", SUBJECT.fingerprint, config


def test_what_another_measures_is_waited_for(
    tune: Callable[..., Outcome], store: Store, path: Path
) -> None:
    """However long it takes: a live driver that is slow brands nothing."""
    theirs = Trial(
        gpu=H100,
        workload=WORKLOAD,
        kernel="faulty",
        source=SUBJECT.fingerprint,
        config=ONE,
        status="ok",
        us=1.0,
        when=now(),
    )
    with Store(path) as beside:
        assert beside.claim(*facts(ONE)).granted
        Timer(0.7, beside.add, [theirs]).start()
        bench = FakeWorker()
        found = tune(bench)
    assert 1 not in bench.configs("screen")
    assert [trial.status for trial in found.trials] == ["ok"] * 3
    assert found.new == 2


def test_what_another_gives_back_is_measured(tune: Callable[..., Outcome], path: Path) -> None:
    with Store(path) as beside:
        beside.claim(*facts(ONE))
        Timer(0.5, beside.release, facts(ONE)).start()
        bench = FakeWorker()
        assert tune(bench).new == 3
    assert bench.configs("screen") == [0, 2, 1]


def test_a_budget_ends_the_waiting(tune: Callable[..., Outcome], path: Path, clock: Clock) -> None:
    with Store(path) as beside:
        beside.claim(*facts(ONE))
        found = tune(FakeWorker(), seconds=1.0)
    assert (found.finished, len(found.trials)) == (False, 2)
    assert found.winner is not None


def test_an_interrupt_ends_the_waiting(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTY_CONFIGS", "3")
    stopped = Event()
    with Store(path) as beside:
        beside.claim(*facts(ONE))
        Timer(0.5, stopped.set).start()
        with pytest.raises(Cancelled):
            tuner.tune(
                Job((SUBJECT,), WORKLOAD), H100, FakeWorker(), None, store, stopped=stopped.is_set
            )


@pytest.mark.parametrize("error", [KeyboardInterrupt, Cancelled, RuntimeError])
def test_whatever_ends_a_sweep_gives_its_lease_back(
    tune: Callable[..., Outcome], store: Store, path: Path, error
) -> None:
    bench = FakeWorker()
    bench.screen = Mock(side_effect=error)  # type: ignore[method-assign]
    with Store(path) as beside:
        with pytest.raises(error):
            tune(bench)
        for i in range(3):
            assert beside.claim(*facts(to_text(Config(number=i)))).granted


def killed_times(count):
    """A worker that is killed from outside whenever it measures config 1, so many times."""
    bench = FakeWorker(("screen", 1), status="killed")
    bench.dies = count
    return bench


@pytest.mark.parametrize(("times", "order"), [(1, [0, 1, 1, 2]), (2, [0, 1, 1, 2, 1])])
def test_a_killed_worker_is_tried_again_at_once_and_at_the_end(
    tune: Callable[..., Outcome], times: int, order
) -> None:
    bench = killed_times(times)
    found = tune(bench)
    assert bench.configs("screen") == order
    assert [trial.status for trial in found.trials] == ["ok"] * 3
    assert (found.finished, found.unmeasured) == (True, [])


def test_what_is_killed_again_and_again_is_left_unmeasured(
    tune: Callable[..., Outcome], store: Store
) -> None:
    bench, reports = killed_times(9), []
    found = tune(bench, report=lambda progress: reports.append(dict(progress.failures)))
    assert bench.configs("screen") == [0, 1, 1, 2, 1]
    (left,) = found.unmeasured
    assert (left.kernel, left.config) == ("faulty", ONE)
    assert left.reason == "killed from outside 3 times: a bad day"
    assert (
        {number(trial) for trial in found.trials}
        == {number(trial) for trial in store.trials()}
        == {0, 2}
    )
    assert not found.finished
    assert found.winner is not None
    assert reports[-1] == {"unmeasured": 1}
    later = tune(FakeWorker())
    assert (later.finished, later.new, later.unmeasured) == (True, 1, [])


def test_killed_compiles_are_tried_again_and_then_left_unmeasured(
    tune: Callable[..., Outcome], store: Store
) -> None:
    bench = FakeWorker()
    compilers = FakeCompilers(bench, seconds=1.5, killed=1)
    assert tune(bench, compilers=compilers).finished
    assert len(compilers.futures) == 4
    assert bench.configs("screen") == [0, 2, 1]
    compilers = FakeCompilers(bench, seconds=1.5, killed=99)
    found = tune(bench, 4, compilers=compilers)
    (left,) = found.unmeasured
    assert (
        left.reason
        == "its compiler was killed from outside again and again: the compiler was killed"
    )
    assert len(store.trials()) == 3


@pytest.mark.parametrize(
    ("call", "times", "left"),
    [
        ("enter", 1, [0, 1, 2]),
        ("race", 1, [0, 1, 2]),
        ("race", 2, [0, 1, 2]),
        ("enter", 2, [0, 2]),
        ("race", 4, [0, 2]),
    ],
)
def test_a_killed_finalist_is_not_out_at_once(
    tune: Callable[..., Outcome], call: str, times: int, left
) -> None:
    bench = killed_times(times)
    bench.down = (call, 1)
    assert sorted(map(number, tune(bench).winner.finalists)) == left


def test_machines_that_went_down_are_a_crash(
    tune: Callable[..., Outcome], store: Store, path: Path
) -> None:
    """One may: it is measured at the end. Two say that it was the config."""
    for losses in (1, 2):
        config = to_text(Config(number=losses))
        store.claim(*facts(config))
        with sqlite3.connect(path) as connection:
            connection.execute(
                "UPDATE leases SET machine_losses = ? WHERE config = ?", [losses, config]
            )
        store.release(*facts(config))
    bench = FakeWorker()
    trials = {number(trial): trial for trial in tune(bench, 4).trials}
    assert bench.configs("screen") == [0, 3, 1]
    assert [trials[i].status for i in range(4)] == ["ok", "ok", "crash", "ok"]
    assert trials[2].reason == "the machine went down 2 times while it was measured"


def test_what_has_failed_is_measured_anew(tune: Callable[..., Outcome], store: Store) -> None:
    tune(FakeWorker(("screen", 1), status="out of memory"))
    tune(FakeWorker(("screen", 3), status="refused"), 4)
    assert Counter(trial.status for trial in store.trials()) == {
        "ok": 2,
        "out of memory": 1,
        "refused": 1,
    }
    idle, again, last = FakeWorker(), FakeWorker(), FakeWorker()
    tune(idle, 4)
    assert idle.configs("screen") == []
    found = tune(again, 4, retry_failed=True)
    assert again.configs("screen") == [1]
    assert (found.new, found.finished) == (1, True)
    assert Counter(trial.status for trial in store.trials()) == {"ok": 3, "refused": 1}
    tune(last, 4, retry_failed=True)
    assert last.configs("screen") == []


def test_two_who_retry_share_what_has_failed(
    tune: Callable[..., Outcome], store: Store, path: Path
) -> None:
    tune(FakeWorker(status="crash", down=("screen", None)), 8)
    assert len(store.trials()) == 8
    benches = [FakeWorker(seconds=0.02) for _ in range(2)]
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda bench: tune(bench, 8, top_k=1, retry_failed=True), benches))
    assert sorted(config for bench in benches for config in bench.configs("screen")) == list(
        range(8)
    )
    assert {trial.status for trial in store.trials()} == {"ok"}


def test_measuring_anew(tune: Callable[..., Outcome], store: Store) -> None:
    for us in (50.0, 60.0, 70.0, 80.0):
        found = tune(FakeWorker(us=us), resume=False)
        assert [trial.status for trial in found.trials] == ["ok"] * 3
        assert found.new == 3
        assert {trial.us for trial in store.trials()} == {us, us + 1, us + 2}


def test_a_workload_that_goes_down_is_said_to_fail(tune: Callable[..., Outcome]) -> None:
    found = tune(FakeWorker(("open", None)))
    assert (found.finished, found.trials, found.winner) == (False, [], None)


@pytest.mark.parametrize(("call", "spared"), [("enter", 0), ("race", 0), ("race", 1)])
def test_a_finalist_that_fails_takes_nobody_along(
    tune: Callable[..., Outcome], call: str, spared: int
) -> None:
    """It passed its screen, and takes the worker down in the finals, and with it all that had
    entered.
    """
    found = tune(FakeWorker((call, 1), spared))
    assert found.finished
    assert number(found.winner) == 0
    assert list(map(number, found.winner.finalists)) == [0, 2]


def test_a_worker_that_goes_down_at_forgetting(tune: Callable[..., Outcome]) -> None:
    assert tune(FakeWorker(("forget", None))).winner is not None


def test_budget_ends_a_screen_and_leaves_time_for_finals(
    tune: Callable[..., Outcome], clock: Clock
) -> None:
    bench = FakeWorker(seconds=0.01, sleep=clock.sleep)
    found = tune(bench, 1000, seconds=1.0, top_k=2)
    assert 0.75 < clock.now - 1000 < 1.1
    assert not found.finished
    assert 30 < found.new == len(bench.configs("screen")) < 40  # each opens its worker first
    assert found.winner.valid == 1000
    assert found.winner.rounds >= finals.BATCH
    assert tune(FakeWorker(), 1000, top_k=2).new == 1000 - found.new


def test_budget_ends_compiles_too(tune: Callable[..., Outcome]) -> None:
    """Those of these compilers never end."""
    bench = FakeWorker()
    compilers = FakeCompilers(bench)
    found = tune(bench, compilers=compilers, seconds=1.0)
    assert all(future.cancelled() for future in compilers.futures)
    assert not found.finished


def test_few_are_compiled_ahead(tune: Callable[..., Outcome]) -> None:
    bench = FakeWorker()
    compilers = FakeCompilers(bench, seconds=1.5)
    found = tune(bench, 20, compilers=compilers)
    assert compilers.most <= prefetch.AHEAD * compilers.workers
    assert len(compilers.futures) == found.new == 20
    assert {trial.compile_s for trial in found.trials} == {1.5}


def test_configs_that_share_a_compile(
    tune: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = faulty_kernel.space
    by_parity = {"compile_key": lambda config: replace(config, number=config.number % 2)}
    monkeypatch.setattr(faulty_kernel, "space", lambda *of: replace(whole(*of), **by_parity))
    bench = FakeWorker()
    compilers = FakeCompilers(bench, seconds=1.0)
    assert tune(bench, 6, compilers=compilers).new == 6
    assert len(compilers.futures) == 2

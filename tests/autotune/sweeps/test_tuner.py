"""One workload's driver, with a worker that is played: finals, shared stores, waiting for others,
budgets, compiles, winners of related workloads, and workers that are killed or fail.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Timer
from typing import Any
from unittest.mock import Mock

import pytest
from support import faulty_kernel
from support.clocks import Clock
from support.fake_bench import FakeWorker, number, number_in
from support.faulty_kernel import Config
from support.sweeps import H100, SUBJECT, WORKLOAD

from outblas.autotune.measure import compile_pool, finals
from outblas.autotune.measure.compile_pool import Compiled
from outblas.autotune.measure.isolated import Cancelled
from outblas.autotune.measure.progress import Report, silent
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import Gpu, Identity, Trial, Workload, now
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps import screening, tuner
from outblas.autotune.sweeps.options import SweepOptions
from outblas.autotune.sweeps.outcome import Job, Outcome
from outblas.base.configs import to_text

pytestmark = pytest.mark.usefixtures("faulty_log")

Tune = Callable[..., Outcome]
ONE = to_text(Config(number=1))
COLD, FUSED = replace(WORKLOAD, weights="cold"), replace(WORKLOAD, epilogue="bias+gelu")


@dataclass
class FakeCompilers:
    """Stands for the compilers. Their compiles have taken `seconds`, or never end for None; those
    of configs 1 and 3 are `killed` so many times.
    """

    bench: FakeWorker
    seconds: float | None = None
    workers: int = 2
    futures: list[Future[Compiled]] = field(default_factory=list)
    killed: int = 0

    def submit(
        self, subject: object, workload: object, config: str, arch: object
    ) -> Future[Compiled]:
        self.futures.append(Future())
        if self.killed and number_in(config) in (1, 3):
            self.killed -= 1
            self.futures[-1].set_result(Compiled("killed", "the compiler was killed"))
        elif self.seconds is not None:
            self.futures[-1].set_result(Compiled(seconds=self.seconds))
        return self.futures[-1]


@pytest.fixture(name="tune")
def _tune(store: Store, monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Tunes the faulty kernel, which has so many sound configs, with a worker that is played."""

    def tune(
        bench: FakeWorker,
        configs: int = 3,
        *,
        on: Gpu = H100,
        targets: tuple[TuneTarget, ...] = (SUBJECT,),
        compilers: Any = None,
        report: Report = silent,
        workload: Workload = WORKLOAD,
        seconds: float | None = None,
        **options: Any,
    ) -> Outcome:
        monkeypatch.setenv("FAULTY_CONFIGS", str(configs))
        job = Job(targets, workload, SweepOptions(**options), seconds)
        return tuner.Tuning(job, on, bench, compilers, store, report).run()  # type: ignore[arg-type]

    return tune


def facts(config: str) -> Identity:
    """A config of the faulty kernel, as `Store.claim` takes it."""
    return H100, WORKLOAD, "faulty", SUBJECT.fingerprint, config


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of budgets, which passes only where somebody sleeps."""
    clock = Clock()
    for module in (tuner, screening, compile_pool, finals):
        monkeypatch.setattr(module, "time", clock)
    return clock


# Finals, and what earlier sweeps have found.


def test_the_winner_has_its_figures(tune: Tune) -> None:
    winner = tune(FakeWorker(), 10, top_k=3).winner

    assert (winner.screened, winner.valid) == (10, 10)
    assert winner.lead == pytest.approx(51 / 50)
    assert winner.ratio == 2.0


def win(tune: Tune, store: Store, workload: Workload, count: int, number: int) -> None:
    """Has a config of so many win at a workload, by a later finals."""
    winner = tune(FakeWorker(), count, top_k=1, workload=workload).winner
    config = to_text(Config(number=number))
    store.record_best(replace(winner, config=config, when="2999-01-01T00:00:00+00:00"))


def test_the_winner_of_before_races_again(tune: Tune, store: Store) -> None:
    win(tune, store, WORKLOAD, 5, 4)
    bench = FakeWorker()

    tune(bench, 6, top_k=1)

    assert bench.configs("screen") == [5]
    assert set(bench.configs("race")) == {0, 4}


@pytest.mark.parametrize(
    ("before", "now", "screened", "raced"),
    [
        (WORKLOAD, COLD, [0, 1, 9], {0, 9}),
        (COLD, WORKLOAD, [0, 1, 9], {0, 9}),
        (WORKLOAD, FUSED, [0, 1, 9], {0, 9}),
        (FUSED, WORKLOAD, [0, 1], {0}),
    ],
    ids=["warm to cold", "cold to warm", "bare to fused", "fused to bare"],
)
def test_what_won_at_a_related_workload_is_measured_whatever_is_proposed(
    tune: Tune,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    before: Workload,
    now: Workload,
    screened: list[int],
    raced: set[int],
) -> None:
    monkeypatch.setattr(faulty_kernel, "EPILOGUES", True, raising=False)
    win(tune, store, before, 10, 9)
    bench = FakeWorker()

    found = tune(bench, 10, trials=2, top_k=1, workload=now)

    assert sorted(bench.configs("screen")) == screened
    assert set(bench.configs("race")) == raced
    assert {trial.workload for trial in found.trials} == {now}


def test_a_sweep_with_nothing_new_keeps_its_winners(tune: Tune) -> None:
    first, bench = tune(FakeWorker()), FakeWorker()

    found = tune(bench)

    assert bench.calls == []
    assert (found.new, found.finished) == (0, True)
    assert (found.winners, found.trials) == (first.winners, first.trials)


def test_a_sweep_that_does_not_resume_measures_races_and_replaces_all(
    tune: Tune, store: Store
) -> None:
    for us in (50.0, 60.0):
        bench = FakeWorker(us=us)

        found = tune(bench, resume=False)

        assert found.new == 3
        assert set(bench.configs("race")) == {0, 1, 2}
        assert {trial.us for trial in store.trials()} == {us, us + 1, us + 2}


def test_each_kernel_has_a_winner(tune: Tune) -> None:
    other = TuneTarget("other", "support.faulty_kernel")

    found = tune(FakeWorker(), top_k=1, targets=(SUBJECT, other))

    assert {winner.kernel for winner in found.winners} == {"faulty", "other"}
    assert len({winner.finalists for winner in found.winners}) == 1


# What other drivers measure.


def test_what_another_measures_is_waited_for(tune: Tune, path: Path) -> None:
    """However long it takes: a live driver that is slow brands nothing."""
    gpu, workload, kernel, source, config = facts(ONE)
    identity: Any = {"gpu": gpu, "workload": workload, "kernel": kernel, "source": source}
    theirs = Trial(**identity, config=config, status="ok", us=1.0, when=now())
    with Store(path) as beside:
        assert beside.claim(facts(ONE))
        Timer(0.7, beside.add, [theirs]).start()
        bench = FakeWorker()
        found = tune(bench)
    assert 1 not in bench.configs("screen")
    assert [trial.status for trial in found.trials] == ["ok"] * 3
    assert found.new == 2


def test_what_another_gives_back_is_measured_at_the_end(tune: Tune, path: Path) -> None:
    bench = FakeWorker()
    with Store(path) as beside:
        beside.claim(facts(ONE))
        Timer(0.7, beside.release, [facts(ONE)]).start()
        assert tune(bench).finished
    assert bench.configs("screen") == [0, 2, 1]


def test_a_budget_ends_the_waiting(tune: Tune, path: Path, clock: Clock) -> None:
    with Store(path) as beside:
        beside.claim(facts(ONE))
        found = tune(FakeWorker(), seconds=1.0)
    assert (found.finished, len(found.trials)) == (False, 2)
    assert found.winner is not None


def test_an_interrupt_ends_the_waiting(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTY_CONFIGS", "3")
    stopped = Event()
    with Store(path) as beside:
        beside.claim(facts(ONE))
        Timer(0.5, stopped.set).start()
        worker: Any = FakeWorker()
        job = Job((SUBJECT,), WORKLOAD)
        with pytest.raises(Cancelled):
            tuner.Tuning(job, H100, worker, None, store, stopped=stopped.is_set).run()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_whatever_ends_a_sweep_gives_its_claim_back(
    tune: Tune, path: Path, error: type[BaseException]
) -> None:
    bench = FakeWorker()
    bench.screen = Mock(side_effect=error)  # type: ignore[method-assign]
    with Store(path) as beside:
        with pytest.raises(error):
            tune(bench)
        for i in range(3):
            assert beside.claim(facts(to_text(Config(number=i))))


# Budgets and compiles.


def test_budget_ends_a_screen_and_leaves_time_for_finals(tune: Tune, clock: Clock) -> None:
    bench = FakeWorker(seconds=0.01, sleep=clock.sleep)
    found = tune(bench, 100, seconds=1.0, top_k=2)

    assert 0.75 < clock.now - 1000 < 1.1
    assert not found.finished
    assert 30 < found.new == len(bench.configs("screen")) < 40  # each opens its worker first
    assert found.winner.valid == 100
    assert found.winner.rounds >= finals.BATCH
    assert tune(FakeWorker(), 100, top_k=2).new == 100 - found.new


def test_budget_ends_compiles_too(tune: Tune) -> None:
    """Those of these compilers never end."""
    compilers = FakeCompilers(FakeWorker())
    found = tune(compilers.bench, compilers=compilers, seconds=1.0)

    assert all(future.cancelled() for future in compilers.futures)
    assert not found.finished


def test_configs_that_share_a_compile(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = faulty_kernel.space
    by_parity: dict[str, Any] = {
        "compile_key": lambda config: replace(config, number=config.number % 2)
    }
    monkeypatch.setattr(faulty_kernel, "space", lambda *of: replace(whole(*of), **by_parity))
    compilers = FakeCompilers(FakeWorker(), seconds=1.0)

    assert tune(compilers.bench, 6, compilers=compilers).new == 6
    assert len(compilers.futures) == 2


@pytest.mark.parametrize(
    ("kills", "order", "unmeasured"), [(1, [0, 1, 2], []), (99, [0, 2], [ONE])]
)
def test_a_killed_compile_is_tried_again(
    tune: Tune, kills: int, order: list[int], unmeasured: list[str]
) -> None:
    compilers = FakeCompilers(FakeWorker(), seconds=1.5, killed=kills)

    found = tune(compilers.bench, compilers=compilers)

    assert compilers.bench.configs("screen") == order
    assert [left.config for left in found.unmeasured] == unmeasured
    assert found.finished == (not unmeasured)
    for left in found.unmeasured:
        assert left.reason == "killed again and again: the compiler was killed"


# Workers that are killed, and configs that fail.


def killed_times(count: int, call: str = "screen") -> FakeWorker:
    """A worker that is killed from outside at a call of config 1, so many times."""
    bench = FakeWorker((call, 1), status="killed")
    bench.dies = count
    return bench


@pytest.mark.parametrize("kills", [2, 9])
def test_a_killed_worker_is_tried_again_and_then_left(tune: Tune, store: Store, kills: int) -> None:
    bench, progress = killed_times(kills), []

    found = tune(bench, report=lambda each: progress.append(dict(each.failures)))

    assert bench.configs("screen") == [0, 1, 1, 1, 2]
    assert {trial.status for trial in store.trials()} == {"ok"}
    assert found.winner is not None
    assert found.finished == (kills < 3)
    assert progress[-1] == ({} if kills < 3 else {"unmeasured": 1})
    assert [(left.config, left.reason) for left in found.unmeasured] == (
        [] if kills < 3 else [(ONE, "killed from outside 3 times: a bad day")]
    )


@pytest.mark.parametrize(("kills", "left"), [(2, [0, 1, 2]), (4, [0, 2])])
def test_a_killed_finalist_is_not_out_at_once(tune: Tune, kills: int, left: list[int]) -> None:
    winner = tune(killed_times(kills, "race")).winner

    assert sorted(map(number, winner.finalists)) == left


@pytest.mark.parametrize("spared", [0, 1])
def test_a_finalist_that_fails_takes_nobody_along(tune: Tune, spared: int) -> None:
    """It passed its screen, and takes the worker down in the finals."""
    found = tune(FakeWorker(("race", 1), spared))

    assert found.finished
    assert number(found.winner) == 0
    assert list(map(number, found.winner.finalists)) == [0, 2]


def test_what_has_failed_is_measured_anew_on_request(tune: Tune, store: Store) -> None:
    """But for what was refused: that has nothing to do with the day."""
    tune(FakeWorker(("screen", 1), status="out of memory"))
    tune(FakeWorker(("screen", 3), status="refused"), 4)
    for options, measured in (({}, []), ({"retry_failed": True}, [1])):
        bench = FakeWorker()

        found = tune(bench, 4, **options)

        assert bench.configs("screen") == measured
        assert (found.new, found.finished) == (len(measured), True)
    assert Counter(trial.status for trial in store.trials()) == {"ok": 3, "refused": 1}


def test_a_workload_that_goes_down_is_said_to_fail(tune: Tune) -> None:
    found = tune(FakeWorker(("open", None)))

    assert (found.finished, found.trials, found.winner) == (False, [], None)

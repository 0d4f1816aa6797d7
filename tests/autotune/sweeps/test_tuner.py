"""One workload's driver, with a worker that is played: shared stores, finals, waiting for others,
budgets and compiles.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event, Timer
from typing import Any
from unittest.mock import Mock

import pytest
from support import faulty_kernel
from support.clocks import Clock
from support.fake_bench import FakeWorker
from support.faulty_kernel import Config
from support.jobs import ONE, FakeCompilers, facts
from support.sweeps import H100, SUBJECT, WORKLOAD

from outblas.autotune.measure import finals as racing
from outblas.autotune.measure import prefetch
from outblas.autotune.measure import race as finals
from outblas.autotune.measure.isolated import Cancelled
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import Trial, now
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps import screening, tuner
from outblas.autotune.sweeps.outcome import Job, Outcome
from outblas.base.configs import to_text

pytest_plugins = ("support.sweep_fixtures",)

pytestmark = pytest.mark.usefixtures("faulty_log")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of budgets, which passes only where somebody sleeps."""
    clock = Clock()
    for module in (tuner, screening, prefetch, racing):
        monkeypatch.setattr(module, "time", clock)
    return clock


# Finals.


def test_the_winner_has_its_figures(tune: Callable[..., Outcome]) -> None:
    winner = tune(FakeWorker(), 10, top_k=3).winner

    assert (winner.screened, winner.valid) == (10, 10)
    assert winner.separated
    assert winner.lead == pytest.approx(51 / 50)
    assert winner.ratio == 2.0


@pytest.fixture
def won_before(tune: Callable[..., Outcome], store: Store) -> None:
    """Of five configs that were tuned, 0 won, and 4 by a later finals."""
    winner = tune(FakeWorker(), 5, top_k=1).winner
    later = replace(winner, config=to_text(Config(number=4)), when="2999-01-01T00:00:00+00:00")
    store.record_best(later)


@pytest.mark.usefixtures("won_before")
def test_the_winner_of_before_races_again(tune: Callable[..., Outcome]) -> None:
    bench = FakeWorker()

    tune(bench, 6, top_k=1)

    assert bench.configs("screen") == [5]
    assert set(bench.configs("race")) == {0, 4}


def test_a_sweep_with_nothing_new_keeps_its_winners(tune: Callable[..., Outcome]) -> None:
    first, bench = tune(FakeWorker()), FakeWorker()

    found = tune(bench)

    assert bench.calls == []
    assert (found.new, found.finished) == (0, True)
    assert (found.winners, found.trials) == (first.winners, first.trials)


def test_a_sweep_that_does_not_resume_measures_and_races_all(tune: Callable[..., Outcome]) -> None:
    tune(FakeWorker())
    bench = FakeWorker()

    found = tune(bench, resume=False)

    assert found.new == 3
    assert set(bench.configs("race")) == {0, 1, 2}


def test_each_kernel_has_a_winner(tune):
    found = tune(
        FakeWorker(), top_k=1, targets=(SUBJECT, TuneTarget("other", "support.faulty_kernel"))
    )

    assert {winner.kernel for winner in found.winners} == {"faulty", "other"}
    assert len({winner.finalists for winner in found.winners}) == 1


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
        worker: Any = FakeWorker()
        job = Job((SUBJECT,), WORKLOAD)
        with pytest.raises(Cancelled):
            tuner.tune(job, H100, worker, None, store, stopped=stopped.is_set)


@pytest.mark.parametrize("error", [KeyboardInterrupt, Cancelled, RuntimeError])
def test_whatever_ends_a_sweep_gives_its_claim_back(
    tune: Callable[..., Outcome], store: Store, path: Path, error
) -> None:
    bench = FakeWorker()
    bench.screen = Mock(side_effect=error)  # type: ignore[method-assign]
    with Store(path) as beside:
        with pytest.raises(error):
            tune(bench)
        for i in range(3):
            assert beside.claim(*facts(to_text(Config(number=i)))).granted


def test_budget_ends_a_screen_and_leaves_time_for_finals(
    tune: Callable[..., Outcome], clock: Clock
) -> None:
    bench = FakeWorker(seconds=0.01, sleep=clock.sleep)
    found = tune(bench, 100, seconds=1.0, top_k=2)

    assert 0.75 < clock.now - 1000 < 1.1
    assert not found.finished
    assert 30 < found.new == len(bench.configs("screen")) < 40  # each opens its worker first
    assert found.winner.valid == 100
    assert found.winner.rounds >= finals.BATCH
    assert tune(FakeWorker(), 100, top_k=2).new == 100 - found.new


def test_budget_ends_compiles_too(tune: Callable[..., Outcome]) -> None:
    """Those of these compilers never end."""
    bench = FakeWorker()
    compilers = FakeCompilers(bench)
    found = tune(bench, compilers=compilers, seconds=1.0)

    assert all(future.cancelled() for future in compilers.futures)
    assert not found.finished


def test_configs_that_share_a_compile(
    tune: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = faulty_kernel.space
    by_parity: dict[str, Any] = {
        "compile_key": lambda config: replace(config, number=config.number % 2)
    }
    monkeypatch.setattr(faulty_kernel, "space", lambda *of: replace(whole(*of), **by_parity))
    bench = FakeWorker()
    compilers = FakeCompilers(bench, seconds=1.0)

    assert tune(bench, 6, compilers=compilers).new == 6
    assert len(compilers.futures) == 2

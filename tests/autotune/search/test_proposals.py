"""What is measured of a strategy's proposals, what it hears of the results, and what a bad strategy
is told.

The kernel is tests/support/faulty_kernel.py, whose configs differ by a number: six of them, each as
fast as predicted.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.clocks import Clock
from support.fake_bench import FakeWorker, number
from support.sweeps import H100, SUBJECT, WORKLOAD

from outblas.autotune import Strategy, StrategyError, SweepOptions
from outblas.autotune.measure import compile_pool, finals
from outblas.autotune.search import strategy as strategies
from outblas.autotune.search.plan import MOST_STALE_BATCHES, batches
from outblas.autotune.search.prune import prune
from outblas.autotune.search.strategy import Search
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps import tuner
from outblas.autotune.sweeps.outcome import Job, Outcome

pytestmark = pytest.mark.usefixtures("faulty_log")


@pytest.fixture(autouse=True)
def _six_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_CONFIGS", "6")


class Proposing(Strategy):
    """Proposes what a function of the search says."""

    def __init__(self, propose: Callable[[Search], Any]) -> None:
        self._propose = propose

    def propose(self, search: Search) -> Any:
        return self._propose(search)


def tune(
    strategy: Strategy,
    store: Store,
    bench: FakeWorker | None = None,
    seconds: float | None = None,
    **options: Any,
) -> Outcome:
    """What comes of a job with a strategy, measured by a worker that is played."""
    job = Job((SUBJECT,), WORKLOAD, SweepOptions(**options), seconds, strategy)
    return tuner.Tuning(job, H100, bench or FakeWorker(), None, store).run()  # type: ignore[arg-type]


def measured_order(strategy: Strategy, store: Store, **options: Any) -> tuple[list[int], Outcome]:
    """The numbers of the configs that are measured, in their order, and the outcome."""
    bench = FakeWorker()
    outcome = tune(strategy, store, bench, **options)
    return bench.configs("screen"), outcome


# What is measured.


@pytest.mark.parametrize(
    "nothing", [[], [[]], iter(())], ids=["no batch", "an empty batch", "an empty iterator"]
)
def test_who_proposes_nothing_has_the_kernels_own_configs_measured(
    store: Store, nothing: Any
) -> None:
    order, outcome = measured_order(Proposing(lambda search: nothing), store)

    assert order == [0]
    assert outcome.finished
    assert number(outcome.winner) == 0
    assert outcome.plan.valid - len(outcome.plan.ranked) == 5


def test_a_config_that_is_proposed_twice_is_measured_once(store: Store) -> None:
    def propose(search: Search) -> Any:
        for start in (2, 0, 2, 1):
            yield [*search.candidates[start:], *search.candidates[start:]]

    order, outcome = measured_order(Proposing(propose), store)

    assert order == [0, 2, 3, 4, 5, 1]
    assert outcome.finished


def test_proposals_beyond_the_trials_of_one_kernel_keep_nobody_from_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More batches in a row than may be stale have configs that are new, and one too many."""
    monkeypatch.setenv("FAULTY_CONFIGS", str(MOST_STALE_BATCHES + 50))
    other = TuneTarget("other", "support.faulty_kernel")
    candidates = prune([SUBJECT, other], WORKLOAD, H100).candidates

    def propose(search: Search) -> Any:
        for target in (SUBJECT, other):
            yield from ([each] for each in search.candidates if each.target == target)

    found = batches(Proposing(propose), Search(WORKLOAD, H100, candidates, trials=2))

    assert [(each.target.name, each.config.number) for batch in found for each in batch] == [
        ("other", 0),  # its own config, which comes with the first batch
        ("faulty", 0),
        ("faulty", 1),
        ("other", 1),
        ("other", 2),
    ]


# What a strategy hears.


def test_a_strategy_hears_of_results_and_goes_by_them(store: Store) -> None:
    seen = []

    class Downhill(Strategy):
        """Proposes the config below the best so far, until there is none."""

        def propose(self, search: Search) -> Any:
            yield [search.candidates[4]]
            while (best := search.best()) is not None:
                seen.append((best.config.number, sorted(c.config.number for c in search.measured)))
                below = best.config.number - 1
                lower = [c for c in search.candidates if c.config.number == below]
                if not lower or lower[0] in search.measured:
                    return
                yield lower

    order, outcome = measured_order(Downhill(), store)

    assert order == [0, 4]
    assert seen == [(0, [0, 4])]
    assert outcome.finished
    assert [number(trial) for trial in outcome.trials] == [0, 4]
    assert (outcome.plan.valid, len(outcome.plan.ranked)) == (6, 2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of budgets, on which only what is measured takes time."""
    found = Clock()
    for module in (tuner, strategies, compile_pool, finals):
        monkeypatch.setattr(module, "time", found)
    return found


def test_a_budget_ends_the_proposals(store: Store, clock: Clock) -> None:
    left = []

    def propose(search: Search) -> Any:
        for candidate in search.candidates:
            left.append(search.seconds_left)
            yield [candidate]

    bench = FakeWorker(seconds=0.2, sleep=clock.sleep)

    outcome = tune(Proposing(propose), store, bench, seconds=1.0, top_k=1)

    assert not outcome.finished
    assert len(outcome.plan.ranked) == len(outcome.trials) + 1
    assert left == pytest.approx([0.75, 0.15, 0.0])
    assert outcome.winner is not None


# Bad strategies.


def foreign(search: Search) -> Any:
    return [[replace(search.candidates[0], text="number=99")]]


def endless(search: Search) -> Any:
    while True:
        yield search.candidates[:2]


def raising(search: Search) -> Any:
    yield search.candidates[:3]
    raise KeyError("tile")


BAD: dict[str, tuple[Callable[[Search], Any], str]] = {
    "unknown config": (foreign, r"proposed faulty\[number=99\], expected one of search.candidates"),
    "a config": (lambda search: [[search.candidates[0].config]], r"proposed Config\(number=0"),
    "text": (lambda search: ["number=1"], "proposed 'number=1', expected a list of candidates"),
    "no list": (lambda search: search.candidates, "expected a list of candidates"),
    "none in a list": (lambda search: [None], "proposed None, expected a list of candidates"),
    "no batches": (lambda search: None, r"raised TypeError\(.*not iterable"),
    "endless": (endless, f"proposed nothing new {MOST_STALE_BATCHES} times in a row"),
    "raises": (raising, r"raised KeyError\('tile'\)"),
    "raises at once": (lambda search: 1 / 0, r"raised ZeroDivisionError\('division by zero'\)"),
}


@pytest.mark.parametrize(("propose", "message"), BAD.values(), ids=BAD)
def test_a_bad_strategy_is_told_what_is_wrong(
    propose: Callable[[Search], Any], message: str, store: Store
) -> None:
    with pytest.raises(StrategyError, match=message) as error:
        tune(Proposing(propose), store)

    assert str(error.value).startswith("strategy Proposing ")
    assert str(error.value).endswith(f", at {WORKLOAD}")

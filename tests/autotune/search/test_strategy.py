"""Search strategies: in which order they propose, what a search tells them, and their names."""

import functools
import re
from dataclasses import replace
from typing import Any

import pytest
from support.sweeps import H100

from outblas.autotune import Grid, ModelRanked, Random, Strategy
from outblas.autotune.search import gpu
from outblas.autotune.search.candidates import Candidate
from outblas.autotune.search.plan import batches
from outblas.autotune.search.prune import Plan, problem, prune
from outblas.autotune.search.strategy import Search, strategy_of
from outblas.autotune.search.target import of
from outblas.autotune.store.records import Trial, Workload, now
from outblas.base.configs import to_text

pytestmark = pytest.mark.usefixtures("faulty_log")

SQUARE = Workload(4096, 4096, 4096)


@functools.cache
def pruned(workload: Workload) -> Plan:
    """The configs of `portable` on an H100."""
    return prune([of("portable")], workload, H100)


class Proposing(Strategy):
    """A strategy that cannot be made without an argument."""

    def __init__(self, propose: object) -> None:
        pass

    def propose(self, search: Search) -> Any:
        return ()


def first_batch(strategy: Strategy, search: Search) -> tuple[Candidate, ...]:
    return next(batches(strategy, search))


# Orders.


def test_a_grid_is_in_the_order_of_the_space() -> None:
    search = Search(SQUARE, H100, pruned(SQUARE).candidates)
    space = of("portable").load().space(problem(SQUARE), gpu.machine(H100))
    places = {to_text(config): place for place, config in enumerate(space.configs())}

    batch = first_batch(Grid(), search)

    found = [places[candidate.text] for candidate in batch]
    assert found == sorted(found)
    assert len(batch) == len(search.candidates) > 50
    assert list(batch) != search.ranked()


def test_a_random_order_depends_on_the_seed_and_the_workload_alone() -> None:
    candidates = pruned(SQUARE).candidates
    other = [replace(candidate, predicted_us=1.0) for candidate in reversed(candidates)]
    smaller = replace(SQUARE, M=2048)

    one, again, reseeded, elsewhere = (
        [candidate.text for candidate in first_batch(Random(seed), Search(workload, H100, listed))]
        for seed, workload, listed in (
            (1, SQUARE, candidates),
            (1, SQUARE, other),
            (2, SQUARE, candidates),
            (1, smaller, candidates),
        )
    )

    assert one == again
    assert len({*map(tuple, (one, reseeded, elsewhere))}) == 3
    assert sorted(one) == sorted(reseeded) == sorted(elsewhere)


# What a search tells a strategy.


@pytest.fixture
def search() -> Search:
    """The search of `portable` at a small product, of which nothing is measured."""
    workload = Workload(64, 64, 64)
    return Search(workload, H100, pruned(workload).candidates)


def record(search: Search, candidate: Candidate, status: Any, us: float | None) -> None:
    """Tells a search what was measured of a candidate."""
    search.record(
        Trial(
            gpu=H100,
            workload=search.workload,
            kernel="portable",
            source="",
            config=candidate.text,
            status=status,
            us=us,
            when=now(),
        )
    )


def test_the_best_of_a_search_is_the_fastest_that_is_right(search: Search) -> None:
    first, second, third = search.candidates[:3]
    record(search, first, "ok", 9.0)
    record(search, second, "ok", 8.0)
    record(search, third, "wrong", None)

    assert search.best() == second
    assert [trial.status for trial in search.measured.values()] == ["ok", "ok", "wrong"]


# Names.


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("grid", Grid),
        ("ranked", ModelRanked),
        ("random", Random),
        ("outblas.autotune:Grid", Grid),
        (Grid, Grid),
    ],
)
def test_a_name_or_a_class_is_a_strategy(strategy: Any, expected: type[Strategy]) -> None:
    assert isinstance(strategy_of(strategy), expected)


NEEDS_AN_ARGUMENT = "expected a class that can be made without arguments"


@pytest.mark.parametrize(
    ("strategy", "error", "message"),
    [
        ("luck", ValueError, "strategy is 'luck', expected one of grid, ranked, random, "),
        ("", ValueError, "strategy is ''"),
        ("random:x y", ValueError, "strategy is 'random:x y'"),
        ("json:Nothing", ValueError, "expected a class: module 'json' has no attribute"),
        ("json:dumps", TypeError, "strategy is 'json:dumps', expected a subclass of outblas"),
        ("no_such_module:X", ImportError, "strategy is 'no_such_module:X', which cannot be imp"),
        (Proposing, TypeError, NEEDS_AN_ARGUMENT),
        (Strategy, TypeError, NEEDS_AN_ARGUMENT),
        (int, TypeError, "expected a subclass of outblas.autotune.Strategy"),
        (7, TypeError, "strategy is 7, expected a subclass"),
    ],
)
def test_a_strategy_that_is_none_is_an_error(
    strategy: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        strategy_of(strategy)

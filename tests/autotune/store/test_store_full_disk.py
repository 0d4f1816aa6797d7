"""Stores on a disk that is full or refuses to write: no result is lost while the process lives."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.disks import leave_room, refusing
from support.stored import H100, WORKLOAD, kept, silent, trial, warned, winner

from outblas.autotune.store.store import Store

PLENTY = 1_000_000  # pages
RESULTS = 200
LEASED = H100, WORKLOAD, "k", "s", "x=1"


@pytest.fixture
def full(path: Path) -> Iterator[Store]:
    """An open store with `RESULTS` trials and a winner, of which the full disk has only some."""
    with silent(), Store(path) as store:
        store.add(trial(0))
        leave_room(store)
        for number in range(1, RESULTS):
            store.add(trial(number))
        store.record_best(winner())
        yield store


def test_a_full_disk_is_warned_of_once(path: Path) -> None:
    with Store(path) as store:
        store.add(trial(0))
        leave_room(store)

        with pytest.warns(UserWarning, match="is full; results are kept in memory") as said:
            added = [store.add(trial(number)) for number in range(1, RESULTS)]

        assert all(added)
        assert len(said) == 1
        leave_room(store, PLENTY)


def test_a_full_disk_costs_no_result(full: Store) -> None:
    assert full.in_memory
    assert full.trials() == [trial(number) for number in range(RESULTS)]
    assert full.winners() == [winner()]
    assert not full.add(trial(150)), "it is there already"


def test_others_see_what_the_full_disk_has(path: Path, full: Store) -> None:
    assert full.in_memory

    with Store(path) as beside:
        assert 1 <= len(beside.trials()) < RESULTS


def test_a_lease_on_a_full_disk_is_granted_and_not_made_up_for(path: Path, full: Store) -> None:
    assert full.claim(*LEASED).granted

    leave_room(full, PLENTY)
    full.add(trial(RESULTS))

    with Store(path) as beside:
        assert beside.claim(*LEASED).granted


def test_results_are_written_once_there_is_room(path: Path, full: Store) -> None:
    with Store(path) as beside:
        beside.add(trial(500))

    leave_room(full, PLENTY)

    assert full.add(trial(RESULTS))
    assert not full.in_memory
    assert len(full.trials()) == RESULTS + 2  # with the other's


def test_what_was_written_late_is_complete_and_in_order(path: Path, full: Store) -> None:
    with Store(path) as beside:
        beside.add(trial(500))
    leave_room(full, PLENTY)
    full.add(trial(RESULTS))

    full.close()

    assert kept(path) == [*(trial(number) for number in range(RESULTS + 1)), trial(500)]
    with Store(path) as store:
        assert store.winners() == [winner()]


@pytest.fixture
def waiting(path: Path) -> Store:
    """An open store with 100 trials, of which the full disk has only some."""
    with silent():
        store = Store(path)
        leave_room(store)
        for number in range(100):
            store.add(trial(number))
    assert store.in_memory
    return store


def test_closing_writes_what_waits(path: Path, waiting: Store) -> None:
    leave_room(waiting, PLENTY)

    waiting.close()

    assert len(kept(path)) == 100


def test_closing_on_a_full_disk_says_what_is_lost(waiting: Store) -> None:
    leave_room(waiting)

    with pytest.warns(UserWarning, match="the last [0-9]+ results are lost"):
        waiting.close()


REFUSALS = ["database or disk is full", "disk I/O error", "attempt to write a readonly database"]


@pytest.mark.parametrize("message", REFUSALS)
def test_any_refusal_to_write_costs_no_result(path: Path, message: str) -> None:
    with silent(), Store(path) as store:
        with refusing(message):
            assert store.add(trial(0))
            assert store.add(trial(1))
            assert store.trials() == [trial(0), trial(1)]

        assert store.add(trial(2))

    assert len(kept(path)) == 3


def test_a_store_on_a_disk_that_is_full_already_lives_in_memory(path: Path) -> None:
    with (
        refusing("disk is full"),
        warned("disk is full; .* lost when the process ends", path) as store,
    ):
        assert store.add(trial())
        assert store.trials() == [trial()]

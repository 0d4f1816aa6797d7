"""A store's side of leases: who gets one, who lives and who is dead, and when one ends."""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clocks import Clock
from support.disks import leave_room
from support.leased import CONFIG, config, leases_of, watched
from support.stored import WORKLOAD, silent, sql, trial
from support.sweeps import soon

from outblas.autotune.store import leases
from outblas.autotune.store.leases import Claim, Holder, Observer, Owner
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps.job_view import JobView

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
GRANTED, HELD = Claim(granted=True), Claim(held=True)


@pytest.fixture
def mine(path: Path) -> Iterator[Store]:
    """A store."""
    with Store(path) as store:
        yield store


@pytest.fixture
def others(path: Path, mine: Store) -> Iterator[Store]:
    """Another store object of the same file."""
    with Store(path) as store:
        yield store


# Claims.


def test_a_lease_is_granted_to_the_first_who_asks(mine: Store) -> None:
    assert mine.claim(*CONFIG) == GRANTED


def test_a_lease_is_for_one_driver_and_one_thread_of_it(mine: Store, others: Store) -> None:
    mine.claim(*CONFIG)

    assert mine.claim(*CONFIG) == others.claim(*CONFIG) == HELD


def test_a_lease_is_of_one_config(mine: Store, others: Store) -> None:
    mine.claim(*CONFIG)

    assert others.claim(*config("x=2")) == GRANTED


def test_a_lease_that_is_held_is_not_granted_again(mine: Store, others: Store) -> None:
    mine.claim(*CONFIG)

    assert others.claim(*CONFIG, again=True) == HELD


def test_a_lease_that_was_given_back_is_free(mine: Store, others: Store) -> None:
    mine.claim(*CONFIG)

    mine.release(*CONFIG)

    assert others.claim(*CONFIG) == GRANTED


def test_others_cannot_give_a_lease_back(mine: Store, others: Store) -> None:
    mine.claim(*CONFIG)

    others.release(*CONFIG)

    assert others.claim(*CONFIG) == HELD


def test_closing_a_store_gives_its_leases_back(path: Path, mine: Store, others: Store) -> None:
    others.claim(*CONFIG)

    others.close()

    assert leases_of(path) == []
    assert mine.claim(*CONFIG) == GRANTED


def test_a_store_that_was_never_closed_holds_nothing(path: Path) -> None:
    forgotten = Store(path)
    forgotten.claim(*CONFIG)

    del forgotten

    with Store(path) as store:
        assert store.claim(*CONFIG).granted


# Trials.

DONE = trial(config="x=1")


def test_a_trial_ends_its_lease(path: Path, mine: Store) -> None:
    mine.claim(*CONFIG)

    assert mine.add(DONE)

    assert leases_of(path) == []


def test_what_has_a_trial_is_known(mine: Store, others: Store) -> None:
    mine.add(DONE)

    assert mine.claim(*CONFIG) == others.claim(*CONFIG) == Claim(known=DONE)


def test_what_has_a_trial_is_leased_again_to_whoever_insists(mine: Store, others: Store) -> None:
    mine.add(DONE)

    assert others.claim(*CONFIG, again=True) == GRANTED
    assert mine.claim(*CONFIG) == Claim(known=DONE)
    assert mine.claim(*CONFIG, again=True) == HELD


def test_what_the_disk_refuses_is_not_claimed_later(path: Path, mine: Store) -> None:
    """A claim is about this moment: only results are made up for."""
    mine.add(trial(0))
    leave_room(mine)
    with silent():
        for number in range(1, 200):
            assert mine.claim(*config(f"x={number}")).granted
            mine.add(trial(config=f"x={number}"))
    assert mine.in_memory
    assert mine.claim(*config("x=0")).granted

    leave_room(mine, 1_000_000)
    mine.add(trial(1000))

    assert leases_of(path) == []
    assert len(mine.trials()) == 201


# Owners that live, and owners that are dead.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the stores that are opened from now on, by which they watch others' leases."""
    found = Clock()
    monkeypatch.setattr(leases, "Holder", lambda: Holder(observer=Observer(found.monotonic)))
    return found


def another(**changes: Any) -> Owner:
    """The owner that this process would be if it had opened another store, or with changes."""
    return Owner(**vars(Owner.here()) | {"nonce": "another"} | changes)


def claim_for(path: Path, owner: Owner | str) -> None:
    """Takes the lease of `CONFIG` as another owner would."""
    with Store(path) as store:
        store.claim(*CONFIG)
        sql(path, f"UPDATE leases SET owner = '{owner}'")


SHORT, LONG = leases.LEASE_SECONDS - 5, leases.LEASE_SECONDS + 5
TAKEN_OVER = Claim(granted=True, taken_over=True)


@pytest.fixture(
    params=[{"host": "node7"}, {"pid_namespace": "pid:[1]"}, {"boot": ""}],
    ids=["on another host", "in another namespace of processes", "of an unknown boot"],
)
def elsewhere(path: Path, request: pytest.FixtureRequest) -> None:
    """The lease of `CONFIG` has an owner that cannot be asked whether it lives."""
    claim_for(path, another(**request.param))


@linux
@pytest.mark.usefixtures("elsewhere")
def test_an_owner_that_cannot_be_asked_lives_while_its_heart_beats(
    path: Path, clock: Clock
) -> None:
    with Store(path) as store:
        assert watched(path, store, clock, 100, beat=True) == HELD
        assert watched(path, store, clock, SHORT) == HELD


@linux
@pytest.mark.usefixtures("elsewhere")
def test_an_owner_that_cannot_be_asked_is_dead_when_its_heart_has_stopped(
    path: Path, clock: Clock
) -> None:
    with Store(path) as store:
        assert watched(path, store, clock, LONG) == TAKEN_OVER


def test_a_lease_that_is_taken_again_is_watched_anew(path: Path, clock: Clock) -> None:
    """By its owner, with no beat in between: as the first one, that one may live for a while
    without.
    """
    owner = another(host="node7")
    with Store(path) as store:
        for _ in range(3):
            claim_for(path, owner)
            assert watched(path, store, clock, SHORT) == HELD
            sql(path, "DELETE FROM leases")


@pytest.mark.parametrize("leap", [1e6, -1e6, 1e9])
def test_a_leap_of_the_clock_proves_no_death(path: Path, clock: Clock, leap: float) -> None:
    claim_for(path, another(host="node7"))
    with Store(path) as store:
        assert store.claim(*CONFIG) == HELD

        clock.now += leap

        assert store.claim(*CONFIG) == HELD


def test_several_leaps_of_the_clock_prove_no_death(path: Path, clock: Clock) -> None:
    claim_for(path, another(host="node7"))
    with Store(path) as store:
        for leap in (1e6, -1e6, 1e9):
            assert store.claim(*CONFIG) == HELD
            clock.now += leap

        assert store.claim(*CONFIG) == HELD


@linux
@pytest.mark.parametrize("before", [0, 1], ids=["the first", "another"])
def test_a_machine_that_goes_down_is_counted(path: Path, clock: Clock, before: int) -> None:
    """And nothing else: a driver that died elsewhere, or here, says nothing."""
    claim_for(path, another(boot="earlier"))
    sql(path, f"UPDATE leases SET machine_losses = {before}")
    with Store(path) as store:
        found = watched(path, store, clock, LONG)

        assert found == Claim(granted=True, taken_over=True, machine_losses=before + 1)


@linux
def test_the_machines_that_went_down_are_known_after_a_release(path: Path, clock: Clock) -> None:
    claim_for(path, another(boot="earlier"))
    with Store(path) as store:
        watched(path, store, clock, LONG)

        store.release(*CONFIG)

        assert store.claim(*CONFIG) == Claim(granted=True, machine_losses=1)


@linux
@pytest.mark.parametrize(
    "gone",
    [
        pytest.param({"pid": 1 << 22}, id="no such process"),
        pytest.param({"started": "1"}, id="another process has its number"),
        pytest.param({"nonce": "closed"}, id="a store of this process that is closed"),
    ],
)
def test_the_lease_of_a_dead_owner_of_this_machine_is_free(
    path: Path, gone: dict[str, Any]
) -> None:
    claim_for(path, another(**gone))

    with Store(path) as store:
        assert store.claim(*CONFIG) == TAKEN_OVER


def test_a_damaged_lease_is_taken_over(path: Path, clock: Clock) -> None:
    claim_for(path, "nobody")
    sql(path, "UPDATE leases SET beat = 'x', machine_losses = 'many'")

    with Store(path) as store:
        assert watched(path, store, clock, LONG) == TAKEN_OVER


# The heart.


@pytest.fixture
def quick_heart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores that are opened from now on say that they live every 20 ms."""
    monkeypatch.setattr(leases, "Heart", functools.partial(leases.Heart, seconds=0.02))


def hearts() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "outblas leases"}


def beat_of(path: Path) -> int:
    (lease,) = leases_of(path)
    return int(lease["beat"])


def beats_beyond(path: Path, beat: int) -> Callable[[], bool]:
    """Whether the heart has beaten more often than this, asked when it is called."""
    return lambda: beat_of(path) > beat


@pytest.mark.usefixtures("quick_heart")
def test_the_heart_beats_while_there_is_a_lease(path: Path) -> None:
    with Store(path) as store:
        for _ in range(2):  # the second time with another heart, if the first has stopped
            store.claim(*CONFIG)

            assert soon(beats_beyond(path, beat_of(path) + 2))

            store.release(*CONFIG)


@pytest.mark.usefixtures("quick_heart")
def test_the_heart_stops_when_there_is_no_lease(path: Path) -> None:
    before = hearts()
    with Store(path) as store:
        store.claim(*CONFIG)
        assert hearts() - before

        store.release(*CONFIG)

        assert soon(lambda: not hearts() - before)


@pytest.mark.usefixtures("quick_heart")
def test_the_heart_stops_when_the_store_is_closed(path: Path) -> None:
    before = hearts()
    store = Store(path)
    store.claim(*CONFIG)
    assert hearts() - before

    store.close()

    assert soon(lambda: not hearts() - before)


# A job's view of the store.


def test_a_clusters_view_counts_the_workers_that_died(mine: Store) -> None:
    """The driver's view counts them; the worker's, which asks it, hands on what it says."""
    driver = JobView(mine, WORKLOAD)
    for deaths in range(3):
        worker = JobView(driver, WORKLOAD)

        assert worker.claim(*CONFIG) == Claim(granted=True, worker_deaths=deaths)

        driver.worker_died()


def test_the_lease_of_a_clusters_worker_ends_with_it(mine: Store, others: Store) -> None:
    driver = JobView(mine, WORKLOAD)
    JobView(driver, WORKLOAD).claim(*CONFIG)
    assert others.claim(*CONFIG) == HELD

    driver.worker_died()

    assert others.claim(*CONFIG) == GRANTED


FIGURES = dict.fromkeys(("us", "ratio", "ratio_low", "ratio_high", "clock_mhz"))


def test_a_retry_takes_what_another_driver_measured_before_its_lease(
    mine: Store, others: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one measures the config after this one saw its failure, and is done with it when
    this one asks for the lease.
    """
    retried = config("sms=1")
    mine.add(trial(config="sms=1", status="hang", reason="not done", **FIGURES))
    view = JobView(mine, WORKLOAD, retry_failed=True)
    claim = mine.claim

    def claim_late(*facts: Any, again: bool = False) -> Claim:
        if again:
            assert others.claim(*retried, again=True).granted
            others.add(trial(config="sms=1", us=50.0), replace=True)
        return claim(*facts, again=again)

    monkeypatch.setattr(mine, "claim", claim_late)

    found = view.claim(*retried)

    assert not found.granted
    assert found.known is not None
    assert found.known.us == 50.0
    assert others.claim(*retried, again=True).granted, "the lease was not given back"

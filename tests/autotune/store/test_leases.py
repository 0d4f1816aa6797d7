"""Leases of configs: the protocol in a model and its faults, and a store's side of it with real
processes.
"""

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from support import lease_model
from support.lease_model import Faults, ProtocolFault
from support.stored import BARE, H100, WORKLOAD, silent, trial
from support.sweeps import soon

from outblas.autotune.store import leases, queries
from outblas.autotune.store.leases import Claim, Holder, Observer, Owner
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps.job_view import JobView

PLACE = (H100, WORKLOAD, "hopper.hilbert", "abc", "x=1")
FIGURES = ("us", "ratio", "ratio_low", "ratio_high", "clock_mhz")
linux = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")

CALM = Faults(brief_stops=3, worker_kills=2)
ROUGH = (
    Faults(kills=2, worker_kills=1),
    Faults(stops=3),
    Faults(interrupts=2, kills=1),
    Faults(outages=1, brief_stops=1),
    Faults(kills=1, stops=2, stops_for_good=1, interrupts=1, worker_kills=1, outages=1),
)


@pytest.mark.parametrize("seed", range(25))
def test_each_config_is_measured_once_where_nobody_dies(seed: int) -> None:
    lease_model.run(seed, CALM)


@pytest.mark.parametrize("faults", ROUGH, ids=str)
def test_whoever_dies_costs_no_config(faults) -> None:
    lease_model.run_many(range(8), faults)


def always(value):
    return lambda *_, **__: value


def granting(self, identity, *, again=False):
    def claim(connection):
        self._take(connection, identity, 0)
        return Claim(granted=True)

    return claim


def releasing_anyones(self, identity):
    return lambda connection: queries._delete(connection, "leases", identity)


# What the model must find: a rule that is left out, and under what.
BROKEN = {
    "no lease": (Holder, "claiming", granting, CALM),
    "no beat": (Holder, "beating", always(lambda connection: None), CALM),
    "a leap of the observer's clock counts": (leases, "LOOK_SECONDS", 1e9, CALM),
    "a lease that is short for its beats": (leases, "LEASE_SECONDS", 3.0, CALM),
    "silent owners live for ever": (Observer, "is_stale", always(False), Faults(stops_for_good=1)),
    "every silent owner is dead": (Observer, "is_stale", always(True), CALM),
    "dead processes live for ever": (leases, "life", always("alive"), Faults(kills=2)),
    "a process number is an owner": (
        leases,
        "life",
        lambda owner, me: "alive" if leases._process(owner.pid)[0] else "dead",
        Faults(kills=2),
    ),
    "a lease outlives its trial": (queries, "_delete", always(None), CALM),
    "an interrupt keeps its lease": (
        Holder,
        "releasing",
        always(lambda connection: None),
        Faults(interrupts=3),
    ),
    "others' leases are released": (Holder, "releasing", releasing_anyones, Faults(stops=5)),
    "a death speaks against the config": (Holder, "_went_down", always(True), Faults(kills=4)),
    "a killed worker speaks against the config": (lease_model, "KILLED", "crash", CALM),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_the_model_finds_what_is_left_out(fault, monkeypatch: pytest.MonkeyPatch) -> None:
    target, name, broken, faults = BROKEN[fault]
    monkeypatch.setattr(target, name, broken)
    if name == "life":
        holder = leases.Holder
        monkeypatch.setattr(
            lease_model, "Holder", lambda owner, observer: holder(owner, observer, life=broken)
        )
    monkeypatch.setattr(lease_model, "END", 3_000.0)
    with pytest.raises(ProtocolFault):
        lease_model.run_many(range(300), faults)


def leases_of(path):
    with sqlite3.connect(path) as connection:
        connection.row_factory = sqlite3.Row
        return queries.select(connection, "leases")


@pytest.fixture
def two(path):
    with Store(path) as store, Store(path) as beside:
        yield store, beside


def test_a_lease_is_for_one(two, path: Path) -> None:
    store, beside = two
    assert store.claim(*PLACE) == Claim(granted=True)
    assert store.claim(*PLACE) == beside.claim(*PLACE) == Claim(held=True)
    assert beside.claim(*PLACE[:-1], "x=2") == Claim(granted=True)
    beside.release(*PLACE)  # is not beside's
    assert beside.claim(*PLACE) == Claim(held=True)
    store.release(*PLACE)
    assert beside.claim(*PLACE) == Claim(granted=True)
    assert beside.claim(*PLACE[:-1], "x=2", again=True) == Claim(held=True)
    beside.close()
    assert leases_of(path) == []
    assert store.claim(*PLACE) == Claim(granted=True)


def test_a_trial_ends_the_lease(two, path: Path) -> None:
    store, beside = two
    done = trial(config="x=1")
    store.claim(*PLACE)
    assert store.add(done)
    assert leases_of(path) == []
    assert store.claim(*PLACE) == beside.claim(*PLACE) == Claim(known=done)
    assert beside.claim(*PLACE, again=True) == Claim(granted=True)
    assert store.claim(*PLACE) == Claim(known=done)
    assert store.claim(*PLACE, again=True) == Claim(held=True)


def test_a_store_that_was_never_closed_holds_nothing(path: Path) -> None:
    forgotten = Store(path)
    forgotten.claim(*PLACE)
    del forgotten
    with Store(path) as store:
        assert store.claim(*PLACE).granted


CLAIM = f"""{BARE}
from pathlib import Path
from outblas.autotune.store.records import Gpu, Workload
from outblas.autotune.store.store import Store
store = Store(Path(sys.argv[1]))
print(store.claim(*eval(sys.argv[2])), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(path):
    """Another process that has taken the lease, and waits."""
    command = [sys.executable, "-c", CLAIM, str(path), repr(PLACE)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert "granted=True" in process.stdout.readline()
        yield process
        process.kill()


@linux
def test_the_lease_of_a_killed_process_is_free_at_once(
    other, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LEASE_SECONDS", 1e9)
    with Store(path) as store:
        assert store.claim(*PLACE) == Claim(held=True)
        other.kill()
        assert soon(
            lambda: not leases._process(other.pid)[0] or leases._process(other.pid)[0] in "ZX"
        )
        assert store.claim(*PLACE) == Claim(granted=True, taken_over=True)


@linux
def test_the_lease_of_a_stopped_process_lapses(
    other, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after Ctrl-Z; its own trial, when it goes on, comes late and changes nothing."""
    with Store(path) as store:
        assert watching(store, monkeypatch, 100).held  # it lives, whenever it beats
        os.kill(other.pid, signal.SIGSTOP)
        os.waitpid(other.pid, os.WUNTRACED)
        found = watching(store, monkeypatch, 100)
        assert found == Claim(granted=True, taken_over=True)
        os.kill(other.pid, signal.SIGCONT)
        other.stdin.close()
        other.wait(20)
        assert store.claim(*PLACE).held  # by this one: the other gave back only what was its own


def claimed_by(path, owner) -> None:
    """The lease of PLACE, as another owner would have it."""
    with Store(path) as store:
        store.claim(*PLACE)
        with sqlite3.connect(path) as connection:
            connection.execute("UPDATE leases SET owner = ?", [str(owner)])


def another(**changes):
    return Owner(**vars(Owner.here()) | {"nonce": "another"} | changes)


def watching(store, monkeypatch: pytest.MonkeyPatch, seconds, beat=False):
    """What a claim says after others have watched a lease for so long."""
    at = [1000.0]
    monkeypatch.setattr(store._leases.observer, "clock", lambda: at[0])
    while at[0] < 1000.0 + seconds:
        if not (found := store.claim(*PLACE)).held:
            return found
        at[0] += 1.0
        if beat:
            store._write(lambda connection: connection.execute("UPDATE leases SET beat = beat + 1"))
    return store.claim(*PLACE)


@linux
@pytest.mark.parametrize(
    "elsewhere", [{"host": "node7"}, {"pid_namespace": "pid:[1]"}, {"boot": ""}]
)
def test_an_owner_that_cannot_be_asked_lives_while_its_heart_beats(
    path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere
) -> None:
    claimed_by(path, another(**elsewhere))
    with Store(path) as store:
        assert watching(store, monkeypatch, 100, beat=True).held
        assert watching(store, monkeypatch, leases.LEASE_SECONDS - 5).held
    with Store(path) as store:
        assert watching(store, monkeypatch, leases.LEASE_SECONDS + 5) == Claim(
            granted=True, taken_over=True
        )


def test_a_lease_that_is_taken_again_is_watched_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its owner, with no beat in between: as the first one, that one may live for a while
    without.
    """
    owner = another(host="node7")
    with Store(path) as store:
        for _ in range(3):
            claimed_by(path, owner)
            assert watching(store, monkeypatch, leases.LEASE_SECONDS - 5).held
            with sqlite3.connect(path) as connection:
                connection.execute("DELETE FROM leases")


def test_a_leap_of_the_clock_proves_no_death(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claimed_by(path, another(host="node7"))
    with Store(path) as store:
        at = [0.0]
        monkeypatch.setattr(store._leases.observer, "clock", lambda: at[0])
        for leap in (1e6, -1e6, 1e9):
            assert store.claim(*PLACE).held
            at[0] += leap
        assert store.claim(*PLACE).held


@linux
def test_a_machine_that_goes_down_is_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else: a driver that died elsewhere, or here, says nothing."""
    for losses in (1, 2):
        claimed_by(path, another(boot=f"boot-{losses}"))
        with sqlite3.connect(path) as connection:
            connection.execute("UPDATE leases SET machine_losses = ?", [losses - 1])
        with Store(path) as store:
            found = watching(store, monkeypatch, leases.LEASE_SECONDS + 5)
            assert found == Claim(granted=True, taken_over=True, machine_losses=losses)
            store.release(*PLACE)
            assert store.claim(*PLACE) == Claim(granted=True, machine_losses=losses)


@linux
@pytest.mark.parametrize("gone", [{"pid": 1 << 22}, {"started": "1"}, {"nonce": "closed"}])
def test_a_dead_owner_of_this_machine(path: Path, gone) -> None:
    claimed_by(path, another(**gone))
    with Store(path) as store:
        assert store.claim(*PLACE) == Claim(granted=True, taken_over=True)


def test_damaged_leases_are_taken_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claimed_by(path, "nobody")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE leases SET beat = 'x', machine_losses = 'many'")
    with Store(path) as store:
        assert watching(store, monkeypatch, leases.LEASE_SECONDS + 5) == Claim(
            granted=True, taken_over=True
        )


def test_the_heart_beats_while_there_is_a_lease(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases.Heart.__init__, "__defaults__", (0.02,))

    def beat():
        return leases_of(path)[0]["beat"]

    with Store(path) as store:
        for _ in range(2):
            assert soon(lambda: store._heart is None)
            store.claim(*PLACE)
            first = beat()
            assert soon(lambda first=first: beat() > first + 2)
            store.release(*PLACE)
        store.claim(*PLACE)
        heart = store._heart
    assert soon(lambda: not heart._thread.is_alive())


def test_what_the_disk_refuses_is_not_claimed_later(path: Path) -> None:
    """A claim is about this moment: only results are made up for."""
    with Store(path) as store:
        store.add(trial(0))
        used = store._file.execute("PRAGMA page_count").fetchone()[0]
        store._file.execute(f"PRAGMA max_page_count = {used}")
        with silent():
            for i in range(1, 200):
                facts = (*PLACE[:-1], f"x={i}")
                assert store.claim(*facts).granted
                store.add(trial(config=f"x={i}"))
        assert store.in_memory
        assert store.claim(*PLACE[:-1], "x=0").granted
        store._file.execute("PRAGMA max_page_count = 1000000")
        store.add(trial(1000))
        assert leases_of(path) == []
        assert len(store.trials()) == 201


DRIVER = f"""{BARE}
import time
from pathlib import Path
from outblas.autotune.store.records import Gpu, Trial, Workload, now
from outblas.autotune.store.store import Store
gpu, workload, kernel, source, _ = eval(sys.argv[2])
store, log = Store(Path(sys.argv[1])), open(sys.argv[3], "a", buffering=1)
left = [f"x={{i}}" for i in range(40)]
while left:
    for config in list(left):
        claim = store.claim(gpu, workload, kernel, source, config)
        if claim.granted:
            log.write(config + "\\n")
            time.sleep(0.02)
            store.add(Trial(gpu=gpu, workload=workload, kernel=kernel, source=source,
                            config=config, status="failed", when=now()))
        if not claim.held:
            left.remove(config)
    time.sleep(0.01)
store.close()
"""


def drivers(path, count):
    log = path.with_name("log")
    path.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-c", DRIVER, str(path), repr(PLACE), str(log)]
    return [
        subprocess.Popen(command) for _ in range(count)
    ], lambda: log.read_text().split() if log.exists() else []


def test_ten_drivers_measure_each_config_once(path: Path) -> None:
    processes, measured = drivers(path, 10)
    assert [process.wait(60) for process in processes] == [0] * 10
    assert sorted(measured()) == sorted(f"x={i}" for i in range(40))
    with Store(path, read_only=True) as store:
        assert len(store.trials()) == 40
    assert leases_of(path) == []


@linux
def test_drivers_that_are_killed_cost_no_config(path: Path) -> None:
    processes, measured = drivers(path, 8)
    for victim, count in zip(processes[:5], (3, 8, 13, 18, 23), strict=True):
        assert soon(lambda count=count: len(measured()) >= count)
        victim.kill()
    assert [process.wait(60) for process in processes[5:]] == [0] * 3
    assert [process.wait(60) for process in processes[:5]] == [-signal.SIGKILL] * 5
    assert set(measured()) == {f"x={i}" for i in range(40)}
    assert len(measured()) <= 40 + 5
    with Store(path, read_only=True) as store:
        assert len(store.trials()) == 40
    assert leases_of(path) == []


def test_a_clusters_view_counts_the_workers_that_died(two) -> None:
    """The driver's view counts them; the worker's, which asks it, hands on what it says."""
    driver = JobView(two[0], WORKLOAD)
    for deaths in range(3):
        worker = JobView(driver, WORKLOAD)
        assert worker.claim(*PLACE) == Claim(granted=True, worker_deaths=deaths)
        assert two[1].claim(*PLACE).held
        driver.worker_died()
        assert two[1].claim(*PLACE).granted
        two[1].release(*PLACE)


def test_a_retry_takes_what_another_driver_measured_before_its_lease(
    two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one measures the config after this one saw its failure, and is done with it when
    this one asks for the lease.
    """
    place = (*PLACE[:4], "sms=1")
    failed = trial(config="sms=1", status="hang", reason="not done", **dict.fromkeys(FIGURES))
    measured = trial(config="sms=1", us=50.0)
    mine, others = two
    mine.add(failed)
    view = JobView(mine, WORKLOAD, retry_failed=True)
    claim = mine.claim

    def late(*facts, again: bool = False) -> Claim:
        if again:
            assert others.claim(*place, again=True).granted
            others.add(measured, replace=True)
        return claim(*facts, again=again)

    monkeypatch.setattr(mine, "claim", late)
    found = view.claim(*place)
    assert not found.granted
    assert found.known is not None
    assert found.known.us == 50.0
    assert others.claim(*place, again=True).granted  # the lease was given back

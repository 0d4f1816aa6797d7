"""The store of trials: what is stored comes back, from many at once too."""

import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.leased import leases_of
from support.stored import BARE, H100, H200, OTHER, WORKLOAD, failed, fill, trial, winner

from outblas.autotune.store import sqlite, transfer, validation
from outblas.autotune.store.records import CIRCUMSTANTIAL, Gpu, Trial, Workload, now
from outblas.autotune.store.store import Store, StoreError

PLACE = (H100, WORKLOAD, "hopper.hilbert", "abc")


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    """An empty store."""
    with Store(path) as store:
        yield store


# What is stored comes back.


def test_a_store_is_in_the_cache_directory_by_default(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(path.parent))

    with Store() as store:
        assert store.path == path
        assert store.warning is None
        assert not store.in_memory
    assert path.parent.stat().st_mode & 0o777 == 0o700


TRIALS = [
    trial(0),
    failed(1),
    trial(2, gpu=H200, workload=OTHER, kernel="simt.naive", compile_s=0.0, us=3),
]


@pytest.fixture
def reopened(path: Path) -> Iterator[Store]:
    """A store with `TRIALS`, the last of which was added first, and a winner; opened again."""
    with Store(path) as store:
        for each in reversed(TRIALS):
            assert store.add(each)
        store.record_best(winner())
    with Store(path) as store:
        yield store


def test_trials_and_winners_come_back_by_date(reopened: Store) -> None:
    assert reopened.trials() == TRIALS
    assert reopened.winners() == [winner()]
    assert reopened.verify() == []


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        pytest.param({"kernel": "simt.naive"}, TRIALS[2:], id="kernel"),
        pytest.param({"workload": OTHER}, TRIALS[2:], id="workload"),
        pytest.param({"gpu": H200.key}, TRIALS[2:], id="GPU"),
        pytest.param({"kernel": "simt.naive", "workload": WORKLOAD}, [], id="kernel and workload"),
    ],
)
def test_trials_are_chosen_by_what_they_are_of(
    reopened: Store, wanted: dict[str, Any], found: list[Trial]
) -> None:
    assert reopened.trials(**wanted) == found


def test_winners_are_chosen_by_what_they_are_of(reopened: Store) -> None:
    own: dict[str, Any] = {"gpu_name": H100.name, "kernel": "hopper.hilbert", "workload": WORKLOAD}

    assert reopened.winners(**own) == [winner()]
    assert reopened.winners(gpu_name="nothing") == []


def test_a_trial_is_found_by_its_identity(reopened: Store) -> None:
    assert reopened.find(H100, *TRIALS[1].identity[1:]) == TRIALS[1]


# Of several results, the one that stays.


def test_the_first_trial_of_an_identity_stays(store: Store) -> None:
    assert store.add(trial(us=1.0))
    assert not store.add(trial(us=2.0))

    assert store.find(*PLACE, trial().config) == trial(us=1.0)


def test_a_trial_is_replaced_on_request(store: Store) -> None:
    store.add(trial(us=1.0))

    assert store.add(trial(us=2.0), replace=True)

    assert store.trials() == [trial(us=2.0)]


def test_a_trial_of_another_source_stands_beside_it(store: Store) -> None:
    store.add(trial(us=1.0))

    assert store.add(trial(us=3.0, source="def"))

    assert len(store.trials()) == 2


NEWER = winner(when="2026-03-01T00:00:00+00:00", ratio=1.2)


def test_the_winner_that_was_recorded_last_stays(store: Store) -> None:
    """Whatever the clocks said: that of a machine may have been wrong once."""
    for each in (winner(), NEWER, winner()):
        store.record_best(each)

        assert store.winners() == [each]


def test_a_winner_of_another_source_stands_beside_it(store: Store) -> None:
    other = winner(source="def", when=NEWER.when)
    store.record_best(winner())

    store.record_best(other)

    assert store.winners() == [winner(), other]


WRONG_CLOCK, RIGHT_CLOCK = winner(when="2099-01-01T00:00:00+00:00"), winner(ratio=1.2)


def test_a_new_winner_takes_the_place_of_one_of_a_wrong_clock(store: Store) -> None:
    store.record_best(WRONG_CLOCK)

    store.record_best(RIGHT_CLOCK)

    assert store.winners() == [RIGHT_CLOCK]


def test_a_merged_winner_takes_the_place_of_one_of_a_wrong_clock(store: Store) -> None:
    store.record_best(WRONG_CLOCK)

    assert store.merge([], [RIGHT_CLOCK]) == (0, 1)
    assert store.merge([], [WRONG_CLOCK]) == (0, 0)

    assert store.winners() == [RIGHT_CLOCK]


def test_a_winner_of_a_wrong_clock_counts_as_the_oldest(store: Store) -> None:
    store.record_best(RIGHT_CLOCK)

    store.record_best(winner(source="old", when=WRONG_CLOCK.when))

    assert [each.source for each in store.winners()] == ["old", "abc"]


@pytest.mark.parametrize("status", sorted(CIRCUMSTANTIAL))
def test_what_may_have_been_circumstance_stays_while_nothing_is_known(
    store: Store, status: str
) -> None:
    assert store.add(failed(status=status))

    assert not store.add(failed(status="hang", reason="another"))


@pytest.mark.parametrize("known", [trial(), failed(status="wrong")], ids=["ok", "wrong"])
@pytest.mark.parametrize("status", sorted(CIRCUMSTANTIAL))
def test_what_may_have_been_circumstance_gives_way_to_what_is_known(
    store: Store, status: str, known: Trial
) -> None:
    store.add(failed(status=status))

    assert store.add(known)

    assert not store.add(trial(us=1.0))
    assert store.trials() == [known]


def test_a_refusal_is_no_circumstance(store: Store) -> None:
    store.add(failed(status="refused"))

    assert not store.add(trial())


def test_a_result_ends_the_lease_of_its_config_whosever_it_is(path: Path, store: Store) -> None:
    with Store(path) as others:
        for each in (trial(0), trial(1)):
            others.claim(*PLACE, each.config)

        store.add(trial(0))

        assert [lease["config"] for lease in leases_of(path)] == [trial(1).config]


# What is stored.


def test_long_reasons_are_cut(store: Store) -> None:
    store.add(failed(reason="x" * 10000))

    (found,) = store.trials()
    assert found.reason == "x" * (validation.TEXT_LIMIT - 1) + "…"
    assert store.verify() == []


def test_characters_that_no_file_can_have_are_replaced(store: Store) -> None:
    store.add(failed(reason="na\udcffme\0 µs"))

    (found,) = store.trials()
    assert found.reason == "na?me\0 µs"
    assert store.verify() == []


def test_undated_trials_are_dated(store: Store) -> None:
    store.add(trial(when=""))

    (found,) = store.trials()
    assert now()[:10] >= found.when[:10] > "2026"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"us": float("nan")}, "trial.us is nan, expected a number above 0"),
        ({"us": None}, "trial.us is None"),
        ({"status": "great"}, "trial.status is 'great'"),
        ({"config": "drop table"}, "trial.config is 'drop table'"),
        ({"kernel": "No Kernel"}, "trial.kernel is 'No Kernel'"),
        ({"when": "yesterday"}, "trial.when is 'yesterday'"),
        ({"gpu": Gpu("", 90, 132)}, "trial.gpu.name"),
        ({"workload": Workload(1 << 60, 1, 1)}, "trial.workload.M"),
    ],
)
def test_what_could_not_be_read_again_is_refused(
    store: Store, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        store.add(trial(**changes))
    assert store.trials() == []


# Pruning.

NAIVE = (H200, WORKLOAD, "simt.naive", "abc", "x=1")
OLD, OF_A_NEW_SOURCE, OF_NAIVE, OF_TODAY = (
    trial(0),
    trial(1, source="new"),
    trial(2, kernel="simt.naive", gpu=H200),
    trial(9, when=""),
)


@pytest.fixture
def various(store: Store) -> Store:
    """A store of an old trial, one of a newer source, one of another kernel and GPU, one of today,
    a winner, and a lease of the other kernel.
    """
    for each in (OLD, OF_A_NEW_SOURCE, OF_NAIVE, OF_TODAY):
        store.add(each)
    store.record_best(winner())
    store.claim(*NAIVE)
    return store


def configs(store: Store) -> list[str]:
    return [each.config for each in store.trials()]


def test_pruning_needs_to_be_told_what(various: Store) -> None:
    with pytest.raises(ValueError, match="prune needs at least one of"):
        various.prune()


def test_pruning_refuses_a_negative_age(various: Store) -> None:
    with pytest.raises(ValueError, match="older_than_days is -1"):
        various.prune(older_than_days=-1)


@pytest.mark.parametrize("wanted", [{"kernel": "nothing"}, {"sources": {}}], ids=str)
def test_pruning_leaves_what_is_not_named(various: Store, wanted: dict[str, Any]) -> None:
    assert various.prune(**wanted) == 0

    assert len(various.trials()) == 4


def test_pruning_by_source_and_age_removes_old_results_of_other_sources(various: Store) -> None:
    removed = various.prune(sources={"hopper.hilbert": "new", "portable": "x"}, older_than_days=1)

    assert removed == 2  # with the winner
    assert configs(various) == [each.config for each in (OF_A_NEW_SOURCE, OF_NAIVE, OF_TODAY)]


def test_pruning_a_kernel_removes_its_trials_and_leases(various: Store) -> None:
    assert various.prune(kernel="simt.naive") == 1

    assert various.claim(*NAIVE).granted
    assert {each.gpu for each in various.trials()} == {H100}


def test_pruning_by_age_leaves_what_is_younger(various: Store) -> None:
    assert various.prune(older_than_days=1) == 4  # with the winner

    assert configs(various) == [OF_TODAY.config]


def test_pruning_everything_leaves_nothing(various: Store) -> None:
    assert various.prune(older_than_days=0) == 5

    assert various.trials() == various.winners() == various.verify() == []


def test_prune_gives_the_disk_back(path: Path) -> None:
    fill(path, 1000)
    before = path.stat().st_size
    with Store(path) as store:
        assert store.prune(kernel="hopper.hilbert") == 1001
        assert path.stat().st_size < before / 4


def test_a_store_can_be_closed_twice_and_not_read_afterwards(store: Store) -> None:
    store.close()
    store.close()

    with pytest.raises(StoreError, match="is closed"):
        store.trials()


# Many at once.

ADDING = f"""{BARE}
from pathlib import Path
from outblas.autotune.store.store import Store
from outblas.autotune.store.transfer import read
trials, _ = read(Path(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
with Store(Path(sys.argv[1])) as store:
    for i, trial in enumerate(trials):
        print(i, int(store.add(trial)), flush=True)
    print(store.warning, flush=True)
"""


def adding(path: Path, *batches: list[Trial]) -> list[Any]:
    """Processes that add a batch of trials each, once all have imported what they need."""
    processes = []
    for batch in batches:
        file = path.parent.with_name(f"{batch[0].source}.json")
        transfer.export(batch, [], file)
        arguments = [sys.executable, "-c", ADDING, str(path), str(file)]
        processes.append(
            subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        print("go", file=process.stdin, flush=True)
    return processes


def test_two_processes_add_the_same_trials(path: Path) -> None:
    trials = [trial(i) for i in range(500)]
    processes = adding(path, trials, trials)
    outputs = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [lines[-1] for lines in outputs] == ["None", "None"]
    added = [
        int(line.split()[0]) for lines in outputs for line in lines[:-1] if line.endswith(" 1")
    ]
    assert sorted(added) == list(range(500))
    with Store(path) as store:
        assert store.trials() == trials
        assert store.verify() == []


def test_what_a_killed_process_added_is_there(path: Path) -> None:
    batches = [[trial(i, source=who) for i in range(3000)] for who in "ab"]
    told = []
    for process, lines in zip(adding(path, *batches), (20, 300), strict=True):
        for _ in range(lines):
            process.stdout.readline()
        process.kill()
        told.append(lines + process.stdout.read().count("\n"))
        assert process.wait(timeout=120) == -9
    with Store(path) as store:
        assert store.warning is None
        assert store.verify() == []
        for batch, count in zip(batches, told, strict=True):
            there = [t for t in store.trials() if t.source == batch[0].source]
            assert len(there) in (count, count + 1)  # the last may not have been told
            assert there == batch[: len(there)]
        assert store.add(trial())


def test_threads_share_a_store(store: Store) -> None:
    def work(first: int) -> list[tuple[bool, bool]]:
        found = []
        for i in range(first, first + 40):
            claim = store.claim(*PLACE, "x=1")
            found.append((store.add(trial(i)), claim.granted))
            if claim.granted:
                store.release(*PLACE, "x=1")
            assert trial(i) in store.trials()
        return found

    with ThreadPoolExecutor(4) as pool:
        found = [each for of_one in pool.map(work, range(0, 80, 20)) for each in of_one]
    assert sum(added for added, _ in found) == 100
    assert any(granted for _, granted in found)
    assert store.trials() == [trial(i) for i in range(100)]


def test_a_store_that_is_locked_for_long_costs_no_result(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.02)
    fill(path, 1)
    with (
        Store(path) as store,
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other_program,
    ):
        other_program.execute("BEGIN IMMEDIATE")
        with pytest.warns(
            UserWarning, match="locked; results are kept in memory, and written as soon as"
        ):
            assert store.add(trial(1))
        assert store.in_memory
        assert store.trials() == [trial(0), trial(1)]

        other_program.execute("ROLLBACK")

        assert store.add(trial(2))
        assert not store.in_memory
    with Store(path) as store:
        assert store.trials() == [trial(0), trial(1), trial(2)]

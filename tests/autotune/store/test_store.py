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
from support.stored import BARE, H100, H200, OTHER, WORKLOAD, failed, fill, trial, winner

from outblas.autotune.store import queries, sqlite, transfer, validation
from outblas.autotune.store.records import CIRCUMSTANTIAL, Gpu, Trial, Workload, now
from outblas.autotune.store.store import Store, StoreError

PLACE = (H100, WORKLOAD, "hopper.hilbert", "abc")


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store(path) as store:
        yield store


# What is stored comes back.


def test_default_place(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(path.parent))
    with Store() as store:
        assert store.path == path
        assert store.warning is None
        assert not store.in_memory
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_trials_and_winners_come_back_by_date(path: Path) -> None:
    trials = [
        trial(0),
        failed(1),
        trial(2, gpu=H200, workload=OTHER, kernel="simt.naive", compile_s=0.0, us=3),
    ]
    with Store(path) as store:
        assert [store.add(each) for each in reversed(trials)] == [True] * 3
        store.record_best(winner())
        assert store.trials() == trials
    with Store(path) as store:
        assert store.trials() == trials
        assert store.winners() == [winner()]
        assert (
            store.trials(kernel="simt.naive")
            == store.trials(workload=OTHER)
            == store.trials(gpu=H200.key)
        )
        assert store.trials(kernel="simt.naive", workload=WORKLOAD) == []
        assert store.winners(gpu_name=H100.name, kernel="hopper.hilbert", workload=WORKLOAD) == [
            winner()
        ]
        assert store.winners(gpu_name="nothing") == []
        assert store.find(H100, *trials[1].identity[1:]) == trials[1]
        assert store.verify() == []


def test_the_first_of_an_identity_stays(store: Store) -> None:
    assert store.add(trial(us=1.0))
    assert not store.add(trial(us=2.0))
    assert store.find(*PLACE, trial().config) == trial(us=1.0)
    assert store.add(trial(us=2.0), replace=True)
    assert store.trials() == [trial(us=2.0)]
    assert store.add(trial(us=3.0, source="def"))
    assert len(store.trials()) == 2


def test_the_winner_that_was_crowned_last_stays(store: Store) -> None:
    """Whatever the clocks said: that of a machine may have been wrong once."""
    newer = winner(when="2026-03-01T00:00:00+00:00", ratio=1.2)
    for each in (winner(), newer, winner()):
        store.record_best(each)
        assert store.winners() == [each]
    store.record_best(winner(source="def", when=newer.when))
    assert store.winners() == [winner(), winner(source="def", when=newer.when)]


def test_a_winner_of_a_wrong_clock_does_not_win_for_ever(store: Store) -> None:
    wrong, right = winner(when="2099-01-01T00:00:00+00:00"), winner(ratio=1.2)
    store.record_best(wrong)
    store.record_best(right)
    assert store.winners() == [right]
    store.record_best(wrong)
    assert store.merge([], [right]) == (0, 1)
    assert store.merge([], [wrong]) == (0, 0)
    assert store.winners() == [right]
    store.record_best(winner(source="old", when=wrong.when))
    assert [each.source for each in store.winners()] == ["old", "abc"]  # as the oldest


def test_what_may_have_been_circumstance_gives_way_to_what_is_known(store: Store) -> None:
    for i, status in enumerate(sorted(CIRCUMSTANTIAL)):
        assert store.add(failed(i, status=status))
        assert not store.add(failed(i, status="hang", reason="another"))
        assert store.add(trial(i) if i % 2 else failed(i, status="wrong"))
        assert not store.add(trial(i, us=1.0))
    assert store.add(failed(50, status="refused"))
    assert not store.add(trial(50))
    assert len(store.trials()) == len(CIRCUMSTANTIAL) + 1


def test_a_result_ends_its_lease(path: Path) -> None:
    lease = {"owner": "somebody", "beat": 1, "machine_losses": 0, "when": now()}
    with Store(path) as store:
        for i in range(2):
            place = queries.identity(H100, *trial(i).identity[1:])
            sqlite.at_once(
                store._file,
                [lambda c, place=place: queries._insert(c, "leases", {**place, **lease})],
            )
        store.add(trial(0))
        left = store._read(lambda c: queries.select(c, "leases"))
        assert [row["config"] for row in left] == [trial(1).config]


def test_long_and_odd_reasons_are_kept_as_far_as_they_can_be(store: Store) -> None:
    store.add(failed(0, reason="x" * 10000))
    store.add(failed(1, reason="na\udcffme\0 µs"))
    first, second = store.trials()
    assert first.reason == "x" * (validation.TEXT_LIMIT - 1) + "…"
    assert second.reason == "na?me\0 µs"
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


def test_prune(store: Store) -> None:
    naive = (H200, WORKLOAD, "simt.naive", "abc", "x=1")
    for each in (
        trial(0),
        trial(1, source="new"),
        trial(2, kernel="simt.naive", gpu=H200),
        trial(9, when=""),
    ):
        store.add(each)
    store.record_best(winner())
    store.claim(*naive)
    with pytest.raises(ValueError, match="nothing says what to prune"):
        store.prune()
    with pytest.raises(ValueError, match="older_than_days is -1"):
        store.prune(older_than_days=-1)
    assert store.prune(kernel="nothing") == store.prune(sources={}) == 0
    assert store.prune(sources={"hopper.hilbert": "new", "portable": "x"}, older_than_days=1) == 2
    assert [t.source for t in store.trials()] == ["new", "abc", "abc"]
    assert store.prune(kernel="simt.naive") == 1
    assert store.claim(*naive).granted
    store.release(*naive)
    assert {t.gpu for t in store.trials()} == {H100}
    assert store.prune(older_than_days=1) == 1
    assert store.prune(older_than_days=0) == 1
    assert store.trials() == store.winners() == store.verify() == []


def test_prune_gives_the_disk_back(path: Path) -> None:
    fill(path, 1000)
    before = path.stat().st_size
    with Store(path) as store:
        assert store.prune(kernel="hopper.hilbert") == 1001
        assert path.stat().st_size < before / 4


def test_closed(store: Store) -> None:
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


def test_threads(store: Store) -> None:
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


def test_a_store_locked_for_long_costs_no_result(path: Path) -> None:
    fill(path, 1)
    with (
        Store(path) as store,
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as rude,
    ):
        store._file.execute("PRAGMA busy_timeout = 20")
        rude.execute("BEGIN IMMEDIATE")
        with pytest.warns(
            UserWarning, match="locked; results are kept in memory, and written as soon as"
        ):
            assert store.add(trial(1))
        assert store.in_memory
        assert store.trials() == [trial(0), trial(1)]
        rude.execute("ROLLBACK")
        assert store.add(trial(2))
        assert not store.in_memory
    with Store(path) as store:
        assert store.trials() == [trial(0), trial(1), trial(2)]

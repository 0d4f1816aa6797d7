"""The store of trials: what is stored comes back, from many at once too."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from stored import H100, H200, OTHER, WORKLOAD, failed, fill, trial, winner

import outblas
from outblas import autotune
from outblas.autotune import checks, transfer
from outblas.autotune.records import Gpu, Trial, Workload
from outblas.autotune.store import Store, StoreError

# What is stored comes back.


def test_default_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    with Store() as store:
        assert store.path == tmp_path / "cache" / "tuning.sqlite"
        assert store.warning is None
        assert not store.in_memory
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_trials_and_winners_come_back(path: Path) -> None:
    trials = [trial(0), failed(1), trial(2, gpu=H200, workload=OTHER, kernel="simt.naive", compile_s=0.0, us=3)]
    with Store(path) as store:
        assert [store.add(each) for each in trials] == [True] * 3
        store.crown(winner())
        assert store.trials() == trials
    with Store(path) as store:
        assert store.trials() == trials
        assert store.winners() == [winner()]
        assert store.trials(kernel="simt.naive") == store.trials(workload=OTHER) == store.trials(gpu=H200.key)
        assert store.trials(kernel="simt.naive", workload=WORKLOAD) == []
        assert store.winners(gpu_name=H100.name, kernel="hopper.hilbert", workload=WORKLOAD) == [winner()]
        assert store.winners(gpu_name="nothing") == []
        assert store.find(H100, *trials[1].identity[1:]) == trials[1]
        assert store.verify() == []


def test_the_first_of_an_identity_stays(path: Path) -> None:
    with Store(path) as store:
        assert store.add(trial(us=1.0))
        assert not store.add(trial(us=2.0))
        assert store.find(H100, WORKLOAD, "hopper.hilbert", "abc", trial().config) == trial(us=1.0)
        assert store.add(trial(us=2.0), replace=True)
        assert store.trials() == [trial(us=2.0)]
        assert store.add(trial(us=3.0, source="def"))
        assert len(store.trials()) == 2


def test_the_newer_winner_stays(path: Path) -> None:
    newer = winner(when="2026-03-01T00:00:00+00:00", ratio=1.2)
    with Store(path) as store:
        for each in (winner(), newer, winner()):
            store.crown(each)
        assert store.winners() == [newer]
        store.crown(winner(source="def"))
        assert store.winners() == [winner(source="def"), newer]


def test_order_is_by_date(path: Path) -> None:
    with Store(path) as store:
        for i in (5, 1, 3):
            store.add(trial(i))
        assert store.trials() == [trial(i) for i in (1, 3, 5)]


def test_begun(path: Path) -> None:
    place = (H100, WORKLOAD, "hopper.hilbert", "abc", "tile_m=128")
    with Store(path) as store, Store(path) as beside:
        assert store.begun(*place) == 0
        assert [store.begin(*place), beside.begin(*place), store.begin(*place)] == [1, 2, 3]
        assert store.begun(*place) == beside.begun(*place) == 3
        assert store.begun(*place[:4], "tile_m=64") == 0
    with Store(path) as store:
        assert store.begin(*place) == 4


def test_undated_trials_are_dated(path: Path) -> None:
    with Store(path) as store:
        store.add(trial(when=""))
        assert store.trials()[0].when > "2026"


def test_long_and_odd_reasons_are_kept_as_far_as_they_can_be(path: Path) -> None:
    with Store(path) as store:
        store.add(failed(0, reason="x" * 10000))
        store.add(failed(1, reason="na\udcffme\0 µs"))
        first, second = store.trials()
        assert first.reason == "x" * (checks.TEXT_LIMIT - 1) + "…"
        assert second.reason == "na?me\0 µs"
        assert store.verify() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"us": float("nan")}, "trial.us is nan, expected a number above 0"),
        ({"us": None}, "trial.us is None"),
        ({"status": "great"}, "trial.status is 'great'"),
        ({"config": "drop table"}, "trial.config is 'drop table'"),
        ({"kernel": "No Kernel"}, "trial.kernel"),
        ({"when": "yesterday"}, "trial.when"),
        ({"gpu": Gpu("", 90, 132)}, "trial.gpu.name"),
        ({"workload": Workload(1 << 60, 1, 1)}, "trial.workload.M"),
    ],
)
def test_what_could_not_be_read_again_is_refused(path: Path, changes: dict[str, Any], message: str) -> None:
    with Store(path) as store:
        with pytest.raises(ValueError, match=message):
            store.add(trial(**changes))
        assert store.trials() == []


def test_prune(path: Path) -> None:
    fresh = trial(9, when="")
    with Store(path) as store:
        for each in (trial(0), trial(1, source="new"), trial(2, kernel="simt.naive", gpu=H200), fresh):
            store.add(each)
        store.crown(winner())
        store.begin(H200, WORKLOAD, "simt.naive", "abc", "x=1")
        with pytest.raises(ValueError, match="nothing says what to prune"):
            store.prune()
        with pytest.raises(ValueError, match="older_than_days is -1"):
            store.prune(older_than_days=-1)
        assert store.prune(kernel="nothing") == store.prune(sources={}) == 0
        assert store.prune(sources={"hopper.hilbert": "new", "portable": "x"}, older_than_days=1) == 2
        assert [t.source for t in store.trials()] == ["new", "abc", "abc"]
        assert store.prune(kernel="simt.naive") == 1
        assert store.begun(H200, WORKLOAD, "simt.naive", "abc", "x=1") == 0
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


def test_closed(path: Path) -> None:
    store = Store(path)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.trials()


# Many at once.

# Without what `import outblas` imports besides: torch takes seconds.
ADDING = f"""
import sys, types
from pathlib import Path
for name, place in (("outblas", {outblas.__path__[0]!r}), ("outblas.autotune", {autotune.__path__[0]!r})):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [place]
from outblas.autotune.store import Store
from outblas.autotune.transfer import read
trials, _ = read(Path(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
with Store(Path(sys.argv[1])) as store:
    for i, trial in enumerate(trials):
        print(i, int(store.add(trial)), flush=True)
    print(store.warning, flush=True)
"""


def start(path: Path, trials: list[Trial]) -> subprocess.Popen[str]:
    """A process that adds trials."""
    file = path.parent.with_name(f"{trials[0].source}.json")
    transfer.export(trials, [], file)
    arguments = [sys.executable, "-c", ADDING, str(path), str(file)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def go(processes: list[subprocess.Popen[str]]) -> None:
    """Once all have imported what they need."""
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


def test_two_processes_add_the_same_trials(path: Path) -> None:
    trials = [trial(i) for i in range(500)]
    processes = [start(path, trials) for _ in range(2)]
    go(processes)
    outputs = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [lines[-1] for lines in outputs] == ["None", "None"]
    added = [int(line.split()[0]) for lines in outputs for line in lines[:-1] if line.endswith(" 1")]
    assert sorted(added) == list(range(500))
    with Store(path) as store:
        assert store.trials() == trials
        assert store.verify() == []


def test_what_a_killed_process_added_is_there(path: Path) -> None:
    trials = {who: [trial(i, source=who) for i in range(3000)] for who in "ab"}
    processes = {who: start(path, trials[who]) for who in trials}
    go(list(processes.values()))
    told: dict[str, int] = {}
    for (who, process), lines in zip(processes.items(), (20, 300), strict=True):
        assert process.stdout is not None
        for _ in range(lines):
            process.stdout.readline()
        process.kill()
        told[who] = lines + process.stdout.read().count("\n")
        assert process.wait(timeout=120) == -9
    with Store(path) as store:
        assert store.warning is None
        assert store.verify() == []
        for who, count in told.items():
            there = [t for t in store.trials() if t.source == who]
            assert len(there) in (count, count + 1)  # the last may not have been told
            assert there == trials[who][: len(there)]
        assert store.add(trial())


def test_threads(path: Path) -> None:
    added: list[bool] = []
    times: list[int] = []
    with Store(path) as store:

        def work(first: int) -> None:
            for i in range(first, first + 40):
                added.append(store.add(trial(i)))
                times.append(store.begin(H100, WORKLOAD, "hopper.hilbert", "abc", "x=1"))
                assert trial(i) in store.trials()

        threads = [threading.Thread(target=work, args=(20 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(added) == 100
        assert store.trials() == [trial(i) for i in range(100)]
        assert sorted(times) == list(range(1, 161))


def test_a_store_locked_for_long_costs_no_result(path: Path) -> None:
    fill(path, 1)
    with Store(path) as store, contextlib.closing(sqlite3.connect(path, isolation_level=None)) as rude:
        assert store._file is not None
        store._file.execute("PRAGMA busy_timeout = 20")
        rude.execute("BEGIN IMMEDIATE")
        with pytest.warns(UserWarning, match="locked; results are kept in memory, and written as soon as"):
            assert store.add(trial(1))
        assert store.in_memory
        assert store.trials() == [trial(0), trial(1)]
        rude.execute("ROLLBACK")
        assert store.add(trial(2))
        assert not store.in_memory
    with Store(path) as store:
        assert store.trials() == [trial(0), trial(1), trial(2)]

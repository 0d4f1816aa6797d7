"""The store of trials: nothing lost to kills, crowds, damage or full disks; and `outblas cache` on it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import outblas
from outblas import autotune, cache
from outblas.autotune import checks, database, transfer
from outblas.autotune.records import Finalist, Gpu, Trial, Winner, Workload
from outblas.autotune.store import Store, StoreError
from outblas.cli import cache as command

H100 = Gpu("NVIDIA H100 80GB HBM3", 90, 132, 700, "570.1", "12.8", "2.11.0", "3.6.0", "4.8.1")
H200 = Gpu("NVIDIA H200", 90, 132)
WORKLOAD = Workload(4096, 4096, 4096)
FINALIST = Finalist(
    kernel="hopper.hilbert", config="tile_m=128,slots=4", us=200.5, ratio=1.047, ratio_low=1.04, ratio_high=1.05
)
OTHER = Workload(16, 4096, 4096, "float16", "float32", "nn")


def trial(i: int = 0, **changes: Any) -> Trial:
    fields = {
        "gpu": H100,
        "workload": WORKLOAD,
        "kernel": "hopper.hilbert",
        "source": "abc",
        "config": f"tile_m=128,slots={i},order=hilbert,phases=False",
        "status": "ok",
        "us": 100.0 + i,
        "ratio": 1.01,
        "ratio_low": 1.0,
        "ratio_high": 1.02,
        "clock_mhz": 1700.0,
        "when": f"2026-01-{1 + i // 1440 % 28:02}T{i // 60 % 24:02}:{i % 60:02}:00+00:00",
    }
    return Trial(**fields | changes)


def failed(i: int = 0, **changes: Any) -> Trial:
    none = dict.fromkeys(("us", "ratio", "ratio_low", "ratio_high", "clock_mhz"))
    return trial(i, **{"status": "hang", "reason": "not done in 30 s"} | none | changes)


def winner(**changes: Any) -> Winner:
    fields = {
        "gpu": H100,
        "workload": WORKLOAD,
        "kernel": "hopper.hilbert",
        "source": "abc",
        "config": "tile_m=128,slots=4",
        "us": 200.5,
        "cublas_us": 210.0,
        "ratio": 1.047,
        "ratio_low": 1.04,
        "ratio_high": 1.05,
        "rounds": 30,
        "runner_up": "tile_m=64",
        "lead": 1.01,
        "lead_low": 1.005,
        "lead_high": 1.02,
        "confidence": 0.99,
        "separated": True,
        "screened": 60,
        "valid": 80,
        "finalists": (FINALIST, FINALIST),
        "when": "2026-02-01T00:00:00+00:00",
    }
    return Winner(**fields | changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "tuning.sqlite"


@contextlib.contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def warned(match: str, path: Path, **options: bool) -> Store:
    with pytest.warns(UserWarning, match=match):
        return Store(path, **options)


def fill(path: Path, count: int = 3) -> list[Trial]:
    trials = [trial(i) for i in range(count)]
    with Store(path) as store:
        for each in trials:
            store.add(each)
        store.crown(winner())
    return trials


def sql(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def set_aside(path: Path) -> list[Path]:
    return [p for p in path.parent.glob(f"{path.name}.corrupt-*") if not p.name.endswith(("-wal", "-shm"))]


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


# Damage.


def damage_whole(path: Path, how: str) -> None:
    data = path.read_bytes()
    match how:
        case "text":
            path.write_text("this is no database\n" * 1000)
        case "zeros":
            path.write_bytes(bytes(len(data)))
        case "one byte":
            path.write_bytes(b"S")
        case "header only":
            path.write_bytes(data[:100])
        case "garbage after the header":
            path.write_bytes(data[:100] + os.urandom(len(data) - 100))
        case "garbage in the middle":
            path.write_bytes(data[:8192] + os.urandom(4096 * 3) + data[8192 + 4096 * 3 :])
        case "no tables":
            sql(path, "DROP TABLE trials")
        case _:
            path.write_bytes(data[: int(how)])


DAMAGES = [
    *("text", "zeros", "one byte", "header only", "garbage after the header", "garbage in the middle", "no tables"),
    *("10", "99", "512", "4096", "5000", "8192", "20000", "-1", "-4096"),
]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_set_aside(path: Path, how: str) -> None:
    fill(path, 100)
    damage_whole(path, how)
    damaged = path.read_bytes()
    with warned("is damaged .* a fresh store was begun", path) as store:
        (aside,) = set_aside(path)
        assert store.warning is not None
        assert aside.name in store.warning
        assert not store.in_memory
        assert store.trials() == []
        assert store.add(trial())
        assert store.verify() == [store.warning]
    assert aside.read_bytes() == damaged
    with Store(path) as store:
        assert store.warning is None
        assert store.trials() == [trial()]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_that_is_only_read_is_empty(path: Path, how: str) -> None:
    fill(path, 100)
    damage_whole(path, how)
    before = {p: p.read_bytes() for p in path.parent.iterdir()}
    with warned("cannot be read", path, read_only=True) as store:
        assert store.trials() == store.winners() == []
        assert store.begun(H100, WORKLOAD, "x", "y", "z=1") == 0
        assert store.verify() == [store.warning]
    assert {p: p.read_bytes() for p in path.parent.iterdir()} == before


@pytest.mark.parametrize("way", ["read", "write"])
def test_damage_that_comes_later(path: Path, way: str) -> None:
    fill(path, 1000)
    with Store(path) as store, silent():
        assert store._file is not None
        store._file.execute("PRAGMA cache_size = 0")
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(os.urandom(path.stat().st_size - 4096))
        store._file.execute("PRAGMA shrink_memory")
        if way == "read":
            assert store.trials() == []
        assert store.add(trial(1))
        assert store.warning is not None
        assert "is damaged" in store.warning
        assert store.trials() == [trial(1)]
    assert len(set_aside(path)) == 1
    with Store(path) as store:
        assert store.trials() == [trial(1)]


def test_two_that_find_damage_set_it_aside_once(path: Path) -> None:
    fill(path, 10)
    first, second = Store(path), Store(path)
    with silent():
        first._open(sqlite3.DatabaseError("malformed"))
        assert first.add(trial(1))
        second._open(sqlite3.DatabaseError("malformed"))
        assert second.add(trial(2))
    assert first.trials() == second.trials() == [trial(1), trial(2)]
    first.close()
    second.close()
    assert len(set_aside(path)) == 1
    with Store(path) as store:
        assert store.trials() == [trial(1), trial(2)]


@pytest.mark.parametrize("then", ["deleted", "moved", "folder deleted"])
def test_a_file_that_goes_away_takes_no_new_result(path: Path, then: str) -> None:
    with Store(path) as store:
        store.add(trial(0))
        match then:
            case "deleted":
                path.unlink()
            case "moved":
                path.rename(path.with_name("elsewhere"))
            case "folder deleted":
                shutil.rmtree(path.parent)
        assert store.add(trial(1))
        assert store.trials() == [trial(1)]
    with Store(path) as store:
        assert store.trials() == [trial(1)]


def test_a_deleted_file_leaves_no_log_that_two_share(path: Path) -> None:
    """SQLite takes a log beside a fresh file for its own, while whoever has the deleted file writes to it."""
    first, second = Store(path), Store(path)
    assert first.add(trial(0))
    path.unlink()
    assert first.add(trial(1))
    assert second.add(trial(2))
    assert first.trials() == second.trials() == [trial(1), trial(2)]
    first.close()
    second.close()
    with Store(path) as store:
        assert store.trials() == [trial(1), trial(2)]
        assert store.verify() == []


def test_a_newer_version_is_not_touched(path: Path) -> None:
    fill(path)
    sql(path, f"PRAGMA user_version = {database.VERSION + 1}")
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(StoreError, match="is of version 2, expected 1"):
            Store(path, read_only=read_only)
    assert path.read_bytes() == before
    assert not set_aside(path)


def test_a_database_of_another_program_is_not_touched(path: Path) -> None:
    path.parent.mkdir()
    sql(path, "CREATE TABLE cookies (x)")
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(StoreError, match="is a database of another program"):
            Store(path, read_only=read_only)
    assert path.read_bytes() == before


PLANTED = [
    ("trials", "status = 'great'", "status is 'great'"),
    ("trials", "us = -1", "us is -1.0, expected a number above 0"),
    ("trials", "us = 'fast'", "us is 'fast'"),
    ("trials", "us = 9e999", "us is inf"),
    ("trials", "us = NULL", "us is None"),
    ("trials", "status = 'hang'", "us is 100.0, expected null where status is 'hang'"),
    ("trials", "ratio = 0", "ratio is 0.0"),
    ("trials", "compile_s = -1", "compile_s is -1.0"),
    ("trials", "reason = x'ff00'", "reason is b"),
    ("trials", "reason = CAST(x'ff' AS TEXT)", "reason is '"),
    ("trials", "\"when\" = 'yesterday'", "when is 'yesterday'"),
    ("trials", "\"when\" = '2026-02-30T00:00:00+00:00'", "when is '2026-02-30T"),
    ("trials", "M = 0", "workload.M is 0"),
    ("trials", "K = 'many'", "workload.K is 'many'"),
    ("trials", "dtype = 'int8'", "workload.dtype is 'int8'"),
    ("trials", "layout = 'xx'", "workload.layout is 'xx'"),
    ("trials", "out_dtype = 'float16'", "workload.out_dtype is 'float16'"),
    ("trials", "kernel = 'No'", "kernel is 'No'"),
    ("trials", "config = 'a; b'", "config is 'a; b'"),
    ("trials", "gpu = 'none'", "gpu is 'none'"),
    ("gpus", "sms = 131", "is the key of another GPU"),
    ("gpus", "arch = 'ninety'", "arch is 'ninety'"),
    ("winners", "rounds = 0", "rounds is 0"),
    ("winners", "separated = 2", "separated is 2"),
    ("winners", "confidence = 1.5", "confidence is 1.5"),
    ("winners", "finalists = 'x'", "finalists is 'x'"),
    ("winners", "finalists = '[1]'", "finalists[0] is 1"),
    ("winners", "finalists = '[[[['", "finalists is '[[[['"),
    ("begun", "times = -1", "times is -1"),
]


@pytest.mark.parametrize(("table", "change", "problem"), PLANTED)
def test_verify_finds_planted_rows_and_reading_leaves_them_out(
    path: Path, table: str, change: str, problem: str
) -> None:
    with Store(path) as store:
        store.add(trial())
        store.crown(winner())
        store.begin(H100, WORKLOAD, "hopper.hilbert", "abc", "x=1")
    sql(path, f"UPDATE {table} SET {change}")
    with Store(path) as store:
        assert any(problem in line for line in store.verify()), store.verify()
        assert len(store.trials()) == (0 if table in ("trials", "gpus") else 1)
        assert len(store.winners()) == (0 if table in ("winners", "gpus") else 1)
        assert store.begin(H100, WORKLOAD, "hopper.hilbert", "abc", "x=1") in (0, 1, 2)
        if table != "begun" and "kernel" not in change:
            store.add(trial())  # heals the row, or stands beside it
            store.crown(winner())
            assert store.trials() == [trial()]
            assert store.winners() == [winner()]


# Where nothing can be written.


@contextlib.contextmanager
def unwritable(path: Path) -> Iterator[None]:
    """Root may write in spite of modes, but not to what has the attribute i; not every file system knows it."""
    mode = path.stat().st_mode
    if os.getuid() == 0:
        if not shutil.which("chattr") or subprocess.run(["chattr", "+i", path], capture_output=True).returncode:
            pytest.skip("root may write everywhere here")
    else:
        path.chmod(mode & 0o555)
    try:
        yield
    finally:
        if os.getuid() == 0:
            subprocess.run(["chattr", "-i", path], check=True)
        else:
            path.chmod(mode)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_cannot_be_written_is_read_and_goes_on_in_memory(path: Path, what: str) -> None:
    trials = fill(path)
    with unwritable(path if what == "file" else path.parent):
        with warned("lost when the process ends", path) as store:
            assert store.in_memory
            assert store.trials() == trials
            assert store.winners() == [winner()]
            assert store.add(trial(7))
            assert not store.add(trial(0))
            assert len(store.trials()) == 4
        with Store(path, read_only=True) as store:
            assert store.warning is None
            assert store.trials() == trials
    with Store(path) as store:
        assert store.trials() == trials


def test_a_log_in_a_folder_that_cannot_be_written(path: Path) -> None:
    """A copy of a store in use, without the shared memory of those who use it: what is in the file proper is read."""
    fill(path)
    with Store(path) as store:
        store.add(trial(7))
        folder = path.parent.parent / "copy"
        shutil.copytree(path.parent, folder)
    (folder / "tuning.sqlite-shm").unlink()
    with unwritable(folder), Store(folder / path.name, read_only=True) as store:
        assert store.warning is None
        assert len(store.trials()) >= 3


def test_a_file_opened_for_reading_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = fill(path)
    real = database._connection
    monkeypatch.setattr(database, "_connection", lambda uri: real(uri.replace("mode=rwc", "mode=ro")))
    with warned("readonly", path) as store:
        assert store.in_memory
        assert store.trials() == trials
        assert store.add(trial(7))


def test_a_place_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with warned("lost when the process ends", tmp_path / "file" / "x.sqlite") as store:
        assert store.add(trial())
        assert store.trials() == [trial()]
    with silent(), Store(tmp_path / "file" / "x.sqlite", read_only=True) as store:
        assert store.trials() == []


@pytest.mark.parametrize("read_only", [False, True])
def test_a_folder_in_place_of_the_file(path: Path, read_only: bool) -> None:
    path.mkdir(parents=True)
    with warned("it is a folder", path, read_only=read_only) as store:
        assert store.trials() == []
        assert read_only or store.add(trial())
    assert path.is_dir()
    assert not list(path.iterdir())
    assert not set_aside(path)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_folder_that_others_can_write_is_not_used(path: Path, read_only: bool) -> None:
    fill(path)
    before = sorted(path.parent.iterdir())
    path.parent.chmod(0o777)
    with warned("can be written by others", path, read_only=read_only) as store:
        assert store.trials() == []
        assert read_only or store.add(trial())
    assert sorted(path.parent.iterdir()) == before


def test_reading_only_leaves_no_trace(path: Path) -> None:
    with Store(path, read_only=True) as store:
        assert store.warning is None
        assert store.trials() == store.winners() == store.verify() == []
        for write in (lambda: store.add(trial()), lambda: store.crown(winner()), lambda: store.prune(kernel="x")):
            with pytest.raises(StoreError, match="for reading only"):
                write()
    assert not path.parent.exists()
    trials = fill(path)
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in path.parent.iterdir()}
    with Store(path, read_only=True) as store:
        assert store.trials() == trials
        assert store.verify() == []
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in path.parent.iterdir()} == before


def test_reading_only_sees_what_others_write(path: Path) -> None:
    with Store(path, read_only=True) as reader:
        assert reader.trials() == []
        with Store(path) as store:
            store.add(trial(0))
            assert reader.trials() == [trial(0)]
            store.add(trial(1))
            assert reader.trials() == [trial(0), trial(1)]
        assert len(reader.trials()) == 2
        with Store(path) as store:
            store.add(trial(2))
        assert len(reader.trials()) == 3


# Full disks.


def full(store: Store) -> None:
    assert store._file is not None
    pages = store._file.execute("PRAGMA page_count").fetchone()[0]
    store._file.execute(f"PRAGMA max_page_count = {pages}")


def roomy(store: Store) -> None:
    assert store._file is not None
    store._file.execute("PRAGMA max_page_count = 1000000")


def test_full_disk_costs_no_result(path: Path) -> None:
    with Store(path) as store:
        store.add(trial(0))
        full(store)
        with pytest.warns(UserWarning, match="is full; results are kept in memory") as said:
            added = [store.add(trial(i)) for i in range(1, 200)]
        assert all(added)
        assert len(said) == 1
        store.crown(winner())
        assert [store.begin(H100, WORKLOAD, "k", "s", "x=1") for _ in range(3)] == [1, 2, 3]
        assert not store.add(trial(150))
        assert store.in_memory
        assert store.trials() == [trial(i) for i in range(200)]
        assert store.winners() == [winner()]
        with Store(path) as beside:
            assert 1 <= len(beside.trials()) < 200
            beside.add(trial(500))
        roomy(store)
        assert store.add(trial(200))
        assert not store.in_memory
        assert len(store.trials()) == 202
    with Store(path) as store:
        assert store.trials() == [*(trial(i) for i in range(201)), trial(500)]
        assert store.winners() == [winner()]
        assert store.begun(H100, WORKLOAD, "k", "s", "x=1") == 3
        assert store.verify() == []


def test_closing_writes_what_waits(path: Path) -> None:
    with silent(), Store(path) as store:
        full(store)
        for i in range(100):
            store.add(trial(i))
        assert store.in_memory
        roomy(store)
    with Store(path) as store:
        assert len(store.trials()) == 100


def test_closing_says_what_is_lost(path: Path) -> None:
    with silent():
        store = Store(path)
        full(store)
        for i in range(100):
            store.add(trial(i))
    with pytest.warns(UserWarning, match="the last [0-9]+ results are lost"):
        store.close()


@pytest.mark.parametrize(
    "message", ["database or disk is full", "disk I/O error", "attempt to write a readonly database"]
)
def test_any_refusal_to_write_costs_no_result(path: Path, monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    real = database.at_once

    def refuse(connection: sqlite3.Connection, operations: Any) -> Any:
        if connection is store._file:
            raise sqlite3.OperationalError(message)
        return real(connection, operations)

    with silent(), Store(path) as store:
        monkeypatch.setattr(database, "at_once", refuse)
        assert store.add(trial(0))
        assert store.add(trial(1))
        assert store.trials() == [trial(0), trial(1)]
        monkeypatch.setattr(database, "at_once", real)
        assert store.add(trial(2))
    with Store(path) as store:
        assert len(store.trials()) == 3


def test_full_disk_at_opening(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(connection: sqlite3.Connection) -> None:
        if connection.execute("PRAGMA database_list").fetchone()["file"]:
            raise sqlite3.OperationalError("database or disk is full")
        create(connection)

    create = database._create
    monkeypatch.setattr(database, "_create", refuse)
    with warned("disk is full; .* lost when the process ends", path) as store:
        assert store.add(trial())
        assert store.trials() == [trial()]


# `outblas cache`.


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with results and two compiled kernels, and a folder of tables."""
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(transfer, "TABLES", tmp_path / "tables")
    with Store() as store:
        for each in (trial(0), failed(1), trial(2, us=90.0), trial(3, workload=OTHER, gpu=H200, kernel="simt.naive")):
            store.add(each)
        store.crown(winner(config="tile_m=128,slots=2"))
    for i in range(2):
        facts: dict[str, object] = {"i": i}
        cache.fetch(facts, build=lambda: "x", save=lambda x, path: path.write_text(x) and None, load=Path.read_text)
    return tmp_path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(command.app, [str(argument) for argument in arguments])


def test_ls(home: Path) -> None:
    result = invoke("ls")
    assert result.exit_code == 0, result.output
    for text in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "4096 bfloat16 nt", "16x4096x4096 float16 to float32 nn"):
        assert text in result.stdout
    assert "Compiled kernels: 2, 0.0 MiB" in result.stdout
    report = json.loads(invoke("ls", "--json").stdout)
    assert report["store"] == str(home / "cache" / "tuning.sqlite")
    assert report["compiled"] == {"objects": 2, "bytes": 2}
    first, second = report["rows"]
    assert (first["kernel"], first["trials"], first["ok"], first["failed"]) == ("hopper.hilbert", 3, 2, 1)
    assert first["best_us"] == 90.0
    assert first["winner"]["ratio"] == 1.047
    assert first["workload"] == dataclasses.asdict(WORKLOAD)
    assert second["winner"] is None


def test_ls_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    result = invoke("ls")
    assert result.exit_code == 0
    assert "no results" in result.stdout
    assert not (tmp_path / "cache").exists()


def test_show(home: Path) -> None:
    result = invoke("show", "4096")
    assert result.exit_code == 0, result.output
    assert "not done in 30 s" in result.stdout
    assert "3 of 3 trials" in result.stdout
    assert "1 of 1 trials" in invoke("show", "simt.naive").stdout
    assert "0 of 0 trials" in invoke("show", "simt.naive", "512").stdout
    assert "0 of 0 trials" in invoke("show", "4096", "--dtype", "float16").stdout
    assert "1 of 1 trials" in invoke("show", "16x4096x4096", "--layout", "nn").stdout
    records = json.loads(invoke("show", "hopper.hilbert", "--json", "--limit", 2).stdout)
    assert [record["us"] for record in records] == [90.0, 100.0]
    assert records[0]["gpu"]["name"] == H100.name


def test_export_and_import(home: Path) -> None:
    file = home / "found.json"
    result = invoke("export", file)
    assert result.exit_code == 0, result.output
    assert "4 trials, 1 winners" in result.stdout
    elsewhere = home / "other" / "tuning.sqlite"
    assert "4 new trials, 1 new winners" in invoke("import", file, "--store", elsewhere).stdout
    assert "0 new trials, 0 new winners" in invoke("import", file, "--store", elsewhere).stdout
    with Store() as here, Store(elsewhere) as there:
        assert there.trials() == here.trials()
        assert there.winners() == here.winners()
    assert "1 trials, 0 winners" in invoke("export", file, "--kernels", "simt.naive").stdout
    assert "3 trials, 1 winners" in invoke("export", file, "--shapes", "4096").stdout
    file.write_text(file.read_text().replace("4096", "4097"))
    result = invoke("import", file)
    assert result.exit_code == 2
    assert "sha256 is" in result.stderr


def test_export_ship(home: Path) -> None:
    result = invoke("export", "--ship")
    assert result.exit_code == 0, result.output
    (path,) = (home / "tables").iterdir()
    assert path.name == "NVIDIA_H100_80GB_HBM3.json"
    (entry,) = transfer.read_table(path).entries
    assert entry.workload == WORKLOAD
    assert entry.config in ("slots=2", "tile_m=128,slots=2")  # the whole where the kernel cannot be loaded
    assert invoke("export", home / "folder", "--ship").exit_code == 0
    assert (home / "folder" / path.name).exists()


def test_verify(home: Path) -> None:
    invoke("export", "--ship")
    result = invoke("verify")
    assert (result.exit_code, result.stdout) == (0, "no problems\n")
    sql(home / "cache" / "tuning.sqlite", "UPDATE trials SET us = -1 WHERE id = 1")
    next((home / "cache" / "objects").glob("*.o")).write_text("y")
    (home / "tables" / "bad.json").write_text("{}")
    result = invoke("verify")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert [piece in line for piece, line in zip(("trials[1].us", "checksum", "bad.json"), lines, strict=True)] == [
        True
    ] * 3
    file = home / "found.json"
    invoke("export", file)
    assert invoke("verify", file).exit_code == 0
    file.write_text(file.read_text()[:-10])
    result = invoke("verify", file)
    assert result.exit_code == 1
    assert "no JSON" in result.stdout


def test_verify_of_a_damaged_store(home: Path) -> None:
    path = home / "cache" / "tuning.sqlite"
    path.write_text("garbage" * 1000)
    result = invoke("verify")
    assert result.exit_code == 1
    assert "cannot be read" in result.stdout
    assert path.read_text().startswith("garbage")
    assert "cannot be read" in invoke("ls").stderr


def test_prune_command(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "fingerprints", lambda kernels: dict.fromkeys(kernels, "abc") | {"simt.naive": "new"})
    assert "0 trials and winners removed" in invoke("prune", "--stale", "--kernel", "hopper.hilbert").stdout
    result = invoke("prune", "--stale")
    assert result.exit_code == 0, result.output
    assert result.stdout == "1 trials and winners removed\n"
    result = invoke("prune", "--compiled", "--older-than", "1h")
    assert result.stdout == "4 trials and winners removed\n0 compiled kernels removed, 0.0 MiB\n"
    assert invoke("prune", "--compiled").stdout == "2 compiled kernels removed, 0.0 MiB\n"
    assert not list((home / "cache" / "objects").glob("*.o"))


def test_fingerprints(capsys: pytest.CaptureFixture[str]) -> None:
    found = command.fingerprints(["hopper.hilbert", "portable", "nothing.here"])
    assert sorted(found) == ["hopper.hilbert", "portable"]
    assert all(found.values())
    assert "nothing.here is not here to compare with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "nothing"), "kernel is 'nothing'"),
        (("show", "4x4"), "MxNxK is '4x4'"),
        (("show", "4096", "--dtype", "int8"), "--dtype is 'int8'"),
        (("show", "4096", "--layout", "xy"), "--layout is 'xy'"),
        (("show", "\udcff"), "kernel is"),
        (("ls", "--store", "/nowhere/x.sqlite"), "--store is '/nowhere/x.sqlite'"),
        (("export",), "expected a FILE to write, or --ship"),
        (("export", "/nowhere/x.json"), "FILE is '/nowhere/x.json'"),
        (("export", "--shapes", "x", "f.json"), "--shapes is 'x'"),
        (("export", "--kernels", "nothing", "f.json"), "kernel is 'nothing'"),
        (("import", "/nowhere/x.json"), "is no file"),
        (("prune",), "expected at least one of"),
        (("prune", "--kernel", "x", "--store", "/nowhere/x.sqlite"), "--store is '/nowhere/x.sqlite'"),
        (("prune", "--older-than", "soon"), "--older-than is 'soon'"),
        (("prune", "--older-than", "99999w"), "expected a number from 0"),
    ],
)
def test_usage_errors(home: Path, arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split()).replace("│ ", "")


def test_a_store_of_a_newer_version_is_a_usage_error(home: Path) -> None:
    sql(home / "cache" / "tuning.sqlite", "PRAGMA user_version = 9")
    for arguments in (("ls",), ("show", "4096"), ("verify",), ("prune", "--kernel", "x")):
        result = invoke(*arguments)
        assert result.exit_code == 2, result.output
        assert "version 9" in result.stderr


def test_import_into_what_cannot_be_written_is_an_error(home: Path) -> None:
    invoke("export", home / "found.json")
    (home / "file").write_text("")
    result = invoke("import", home / "found.json", "--store", home / "file" / "x.sqlite")
    assert result.exit_code == 2
    assert "lost when the process ends" in " ".join(result.stderr.replace("│", "").split())

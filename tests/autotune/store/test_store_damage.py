"""The store of trials: nothing lost to damage, folders that cannot be written or full disks."""

import contextlib
import os
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.stored import H100, WORKLOAD, fill, set_aside, silent, sql, trial, warned, winner

from outblas.autotune.store import sqlite
from outblas.autotune.store.records import Trial
from outblas.autotune.store.store import Store, StoreError


def snapshot(path: Path) -> dict[Path, tuple[int, bytes | None]]:
    """When what lies in a store's folder was changed, and what it holds."""
    return {
        p: (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else None)
        for p in path.parent.rglob("*")
    }


def kept(path: Path, **options: bool) -> list[Trial]:
    """The trials of a store that nothing is wrong with."""
    with Store(path, **options) as store:
        assert store.warning is None
        assert store.verify() == []
        return store.trials()


# Damage.

CUTS = [1, 10, 99, 100, 512, 4096, 5000, 8192, 20000, -1, -4096]  # 100: the header
TRIALS = [trial(i) for i in range(100)]


@pytest.fixture(
    params=[
        "text",
        "zeros",
        "garbage after the header",
        "garbage in the middle",
        "no tables",
        *CUTS,
    ]
)
def damaged(path: Path, request: pytest.FixtureRequest) -> bytes:
    """What stands in place of a store of 100 trials."""
    fill(path, 100)
    if request.param == "no tables":
        sql(path, "DROP TABLE trials")
    data = path.read_bytes()
    damages = {
        "text": b"this is no database\n" * 1000,
        "zeros": bytes(len(data)),
        "garbage after the header": data[:100] + os.urandom(len(data) - 100),
        "garbage in the middle": data[:8192] + os.urandom(4096 * 3) + data[8192 + 4096 * 3 :],
        "no tables": data,
        **{size: data[:size] for size in CUTS},
    }
    path.write_bytes(damages[request.param])
    return damages[request.param]


def test_a_damaged_file_reads_as_empty_and_is_set_aside(path: Path, damaged: bytes) -> None:
    """Here or when it is first read from or written to."""
    before = snapshot(path)
    with silent(), Store(path, read_only=True) as store:
        assert store.trials() == store.winners() == []
        assert "cannot be read" in str(store.warning)
        assert store.verify() == [store.warning]
    assert snapshot(path) == before
    with silent(), Store(path) as store:
        left = store.trials()
        (aside,) = set_aside(path)
        assert re.search(
            rf"is damaged .* it is now {aside.name}, and a fresh store was begun",
            str(store.warning),
        )
        assert f"with the {len(left)} trials and {len(store.winners())} winners" in str(
            store.warning
        )
        assert not store.in_memory
        assert set(left) <= set(TRIALS)
        assert store.add(trial(1000))
        assert store.verify() == [store.warning]
    assert (
        aside.read_bytes()[100:] == damaged[100:]
    )  # an open file counts its changes in the header
    assert kept(path) == [*left, trial(1000)]


@pytest.mark.parametrize("way", ["read", "write"])
def test_damage_that_comes_later(path: Path, way: str) -> None:
    fill(path, 1000)
    with Store(path) as store, silent():
        assert store._file
        store._file.execute("PRAGMA cache_size = 0")
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(os.urandom(path.stat().st_size - 4096))
        store._file.execute("PRAGMA shrink_memory")
        if way == "read":
            assert store.trials() == []
        assert store.add(trial(1))
        assert "is damaged" in str(store.warning)
        assert store.trials() == [trial(1)]
    assert len(set_aside(path)) == 1
    assert kept(path) == [trial(1)]


def test_two_that_find_damage_set_it_aside_once(path: Path) -> None:
    with Store(path) as first, Store(path) as second, silent():
        first.add(trial(0))
        with contextlib.closing(sqlite3.connect(path)) as rude:
            rude.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(os.urandom(path.stat().st_size - 4096))
        for i, store in enumerate((first, second), 1):
            store._open(sqlite3.DatabaseError("malformed"))
            assert store.add(trial(i))
        assert first.trials() == second.trials() == [trial(1), trial(2)]
    assert len(set_aside(path)) == 1
    assert kept(path) == [trial(1), trial(2)]


def test_what_only_seems_damaged_is_read_again(path: Path) -> None:
    trials = fill(path)
    with Store(path) as store:
        store._open(sqlite3.DatabaseError("malformed"))
        assert store.warning is None
        assert store.trials() == trials
    assert not set_aside(path)


@pytest.mark.parametrize(
    "lose",
    [
        Path.unlink,
        lambda path: path.rename(path.with_name("elsewhere")),
        lambda path: shutil.rmtree(path.parent),
    ],
    ids=["deleted", "moved", "folder deleted"],
)
def test_a_file_that_goes_away_takes_no_new_result(
    path: Path, lose: Callable[[Path], object]
) -> None:
    with Store(path) as store:
        store.add(trial(0))
        lose(path)
        assert store.add(trial(1))
        assert store.trials() == [trial(1)]
    assert kept(path) == [trial(1)]


def test_a_deleted_file_leaves_no_log_that_two_share(path: Path) -> None:
    """SQLite takes a log beside a fresh file for its own, while whoever has the deleted file writes
    to it.
    """
    with Store(path) as first, Store(path) as second:
        assert first.add(trial(0))
        path.unlink()
        assert first.add(trial(1))
        assert second.add(trial(2))
        assert first.trials() == second.trials() == [trial(1), trial(2)]
    assert kept(path) == [trial(1), trial(2)]


@pytest.mark.parametrize(
    "problem", ["is of version 3, expected 2", "is a database of another program"]
)
def test_what_a_newer_version_or_another_program_has_is_not_touched(
    path: Path, problem: str
) -> None:
    if "version" in problem:
        fill(path)
        sql(path, "PRAGMA user_version = 3")
    else:
        path.parent.mkdir()
        sql(path, "CREATE TABLE cookies (x)")
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(StoreError, match=problem):
            Store(path, read_only=read_only)
    assert path.read_bytes() == before
    assert not set_aside(path)


PLANTED = {
    "trials": {
        "status = 'great'": "status is 'great'",
        "us = -1": "us is -1.0, expected a number above 0",
        "us = 'fast'": "us is 'fast'",
        "us = 9e999": "us is inf",
        "us = NULL": "us is None",
        "status = 'hang'": "us is 100.0, expected null where status is 'hang'",
        "ratio = 0": "ratio is 0.0",
        "compile_s = -1": "compile_s is -1.0",
        "reason = x'ff00'": "reason is b",
        "reason = CAST(x'ff' AS TEXT)": "reason is '",
        "\"when\" = 'yesterday'": "when is 'yesterday'",
        "\"when\" = '2026-02-30T00:00:00+00:00'": "when is '2026-02-30T",
        "M = 0": "workload.M is 0",
        "K = 'many'": "workload.K is 'many'",
        "dtype = 'int8'": "workload.dtype is 'int8'",
        "layout = 'xx'": "workload.layout is 'xx'",
        "out_dtype = 'float16'": "workload.out_dtype is 'float16'",
        "kernel = 'No'": "kernel is 'No'",
        "config = 'a; b'": "config is 'a; b'",
        "gpu = 'none'": "gpu is 'none'",
    },
    "gpus": {"sms = 131": "is the key of another GPU", "arch = 'ninety'": "arch is 'ninety'"},
    "winners": {
        "rounds = 0": "rounds is 0",
        "separated = 2": "separated is 2",
        "confidence = 1.5": "confidence is 1.5",
        "finalists = 'x'": "finalists is 'x'",
        "finalists = '[1]'": "finalists[0] is 1",
        "finalists = '[[[['": "finalists is '[[[['",
    },
    "leases": {"beat = -1": "beat is -1", "machine_losses = 'x'": "machine_losses is 'x'"},
}


@pytest.mark.parametrize(
    ("table", "change", "problem"),
    [(table, *each) for table, planted in PLANTED.items() for each in planted.items()],
)
def test_verify_finds_planted_rows_and_reading_leaves_them_out(
    path: Path, table: str, change: str, problem: str
) -> None:
    leased = (H100, WORKLOAD, "hopper.hilbert", "abc", "x=1")
    fill(path, 1)
    with Store(path) as store:
        store.claim(*leased)
        store._leases.held.clear()  # as if it were killed
    sql(path, f"UPDATE {table} SET {change}")
    with Store(path) as store:
        assert any(problem in line for line in store.verify()), store.verify()
        assert len(store.trials()) == (table not in ("trials", "gpus"))
        assert len(store.winners()) == (table not in ("winners", "gpus"))
        assert store.claim(*leased).known is None
        assert len(store.tuned(H100)) <= 1
        shown, total = store.browse()
        assert (len(shown), total) == (len(store.trials()), 1)
        assert all(row.trials <= 1 for row in store.summaries())
        assert store.stream(lambda trials, winners: (len(list(trials)), len(list(winners)))) == (
            len(store.trials()),
            len(store.winners()),
        )
    if table != "leases" and "kernel" not in change:
        fill(path, 1)  # heals the row, or stands beside it
        with Store(path) as store:
            assert (store.trials(), store.winners()) == ([trial()], [winner()])


# Where nothing can be written.


@contextlib.contextmanager
def unwritable(path: Path) -> Iterator[None]:
    """Root may write in spite of modes, but not to what has the attribute i; not every file system
    knows it.
    """
    mode, root = path.stat().st_mode, os.getuid() == 0
    if not root:
        path.chmod(mode & 0o555)
    elif (
        not shutil.which("chattr")
        or subprocess.run(["chattr", "+i", path], capture_output=True).returncode
    ):
        pytest.skip("root may write everywhere here")
    try:
        yield
    finally:
        if root:
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
        assert kept(path, read_only=True) == trials
    assert kept(path) == trials


def test_a_log_in_a_folder_that_cannot_be_written(path: Path) -> None:
    """A copy of a store in use, without the shared memory of those who use it: what is in the file
    proper is read.
    """
    fill(path)
    with Store(path) as store:
        store.add(trial(7))
        folder = path.parent.parent / "copy"
        shutil.copytree(path.parent, folder)
    (folder / "tuning.sqlite-shm").unlink()
    with unwritable(folder):
        assert len(kept(folder / path.name, read_only=True)) >= 3


def test_a_file_opened_for_reading_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = fill(path)
    real = sqlite._connection
    monkeypatch.setattr(sqlite, "_connection", lambda uri: real(uri.replace("mode=rwc", "mode=ro")))
    with warned("readonly", path) as store:
        assert store.in_memory
        assert store.trials() == trials
        assert store.add(trial(7))


def test_a_place_that_cannot_be(path: Path) -> None:
    path.parent.write_text("")
    with warned("lost when the process ends", path) as store:
        assert store.add(trial())
        assert store.trials() == [trial()]
    with silent(), Store(path, read_only=True) as store:
        assert store.trials() == []


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("why", ["it is a folder", "can be written by others"])
def test_a_place_that_is_not_used(path: Path, why: str, read_only: bool) -> None:
    if why == "it is a folder":
        path.mkdir(parents=True)
    else:
        fill(path)
        path.parent.chmod(0o777)
    before = snapshot(path)
    with warned(why, path, read_only=read_only) as store:
        assert store.trials() == []
        assert read_only or store.add(trial())
    assert snapshot(path) == before


def test_reading_only_leaves_no_trace(path: Path) -> None:
    with Store(path, read_only=True) as store:
        assert store.warning is None
        assert store.trials() == store.winners() == store.verify() == []
        for write in (
            lambda: store.add(trial()),
            lambda: store.record_best(winner()),
            lambda: store.prune(kernel="x"),
        ):
            with pytest.raises(StoreError, match="for reading only"):
                write()
    assert not path.parent.exists()
    trials = fill(path)
    before = snapshot(path)
    assert kept(path, read_only=True) == trials
    assert snapshot(path) == before


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


def leave_room(store: Store, pages: int = 0) -> None:
    assert store._file
    used = store._file.execute("PRAGMA page_count").fetchone()[0]
    store._file.execute(f"PRAGMA max_page_count = {used + pages}")


def test_full_disk_costs_no_result(path: Path) -> None:
    with Store(path) as store:
        store.add(trial(0))
        leave_room(store)
        with pytest.warns(UserWarning, match="is full; results are kept in memory") as said:
            assert all(store.add(trial(i)) for i in range(1, 200))
        assert len(said) == 1
        store.record_best(winner())
        assert store.claim(H100, WORKLOAD, "k", "s", "x=1").granted
        assert not store.add(trial(150))
        assert store.in_memory
        assert store.trials() == [trial(i) for i in range(200)]
        assert store.winners() == [winner()]
        with Store(path) as beside:
            assert 1 <= len(beside.trials()) < 200
            beside.add(trial(500))
        leave_room(store, 1_000_000)
        assert store.add(trial(200))
        assert not store.in_memory
        assert len(store.trials()) == 202
    with Store(path) as store:
        assert store.trials() == [*(trial(i) for i in range(201)), trial(500)]
        assert store.winners() == [winner()]
        assert store.claim(H100, WORKLOAD, "k", "s", "x=1").granted
        assert store.verify() == []


@pytest.mark.parametrize("room", [0, 1_000_000])
def test_closing_writes_what_waits_or_says_what_is_lost(path: Path, room: int) -> None:
    with silent():
        store = Store(path)
        leave_room(store)
        for i in range(100):
            store.add(trial(i))
        assert store.in_memory
        leave_room(store, room)
    with silent() if room else pytest.warns(UserWarning, match="the last [0-9]+ results are lost"):
        store.close()
    assert room == 0 or len(kept(path)) == 100


@contextlib.contextmanager
def refusing(message: str) -> Iterator[None]:
    """Nothing can be written to a file."""
    at_once = sqlite.at_once

    def refuse(connection: sqlite3.Connection, operations: Any) -> Any:
        if connection.execute("PRAGMA database_list").fetchone()["file"]:
            raise sqlite3.OperationalError(message)
        return at_once(connection, operations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite, "at_once", refuse)
        yield


@pytest.mark.parametrize(
    "message",
    ["database or disk is full", "disk I/O error", "attempt to write a readonly database"],
)
def test_any_refusal_to_write_costs_no_result(path: Path, message: str) -> None:
    with silent(), Store(path) as store:
        with refusing(message):
            assert store.add(trial(0))
            assert store.add(trial(1))
            assert store.trials() == [trial(0), trial(1)]
        assert store.add(trial(2))
    assert len(kept(path)) == 3


def test_full_disk_at_opening(path: Path) -> None:
    with (
        refusing("disk is full"),
        warned("disk is full; .* lost when the process ends", path) as store,
    ):
        assert store.add(trial())
        assert store.trials() == [trial()]

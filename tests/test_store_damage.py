"""The store of trials: nothing lost to damage, folders that cannot be written or full disks."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stored import H100, WORKLOAD, fill, set_aside, silent, sql, trial, warned, winner

from outblas.autotune import database
from outblas.autotune.store import Store, StoreError

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

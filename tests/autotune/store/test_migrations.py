"""Stores of older and newer versions: read as they are, migrated once, and left alone."""

import contextlib
import dataclasses
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.old_versions import VERSIONS, write_version
from support.stored import BARE, H100, WORKLOAD, fill, set_aside, sql, trial, warned, winner

from outblas.autotune.store import migrations, queries, sqlite
from outblas.autotune.store.records import BestConfig, Trial
from outblas.autotune.store.store import Store, StoreError

TRIALS = [trial(i) for i in range(100)]
COPY = ".before-migration"  # the end of the name of the copy that a migration makes first


@pytest.fixture(scope="module", params=VERSIONS, ids="version {}".format)
def older(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[int, bytes]:
    """An older version, and the file of a store of it that has `TRIALS` and a winner."""
    path = tmp_path_factory.mktemp("older") / "tuning.sqlite"
    write_version(request.param, path, TRIALS, [winner()])
    return request.param, path.read_bytes()


@pytest.fixture
def old(path: Path, older: tuple[int, bytes]) -> Path:
    """The path of a store of an older version that has `TRIALS` and a winner."""
    path.parent.mkdir()
    path.write_bytes(older[1])
    return path


def content(path: Path) -> tuple[list[Trial], list[BestConfig]]:
    with Store(path, read_only=True) as store:
        return store.trials(), store.winners()


def version(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return migrations.version_of(connection)


# Reading older versions.


def test_a_store_of_an_older_version_is_read(old: Path) -> None:
    with Store(old, read_only=True) as store:
        assert (store.trials(), store.winners()) == (TRIALS, [winner()])
        assert store.trials(workload=WORKLOAD) == TRIALS
        assert store.verify() == []
        assert store.warning is None


def test_a_store_of_an_older_version_is_listed(old: Path) -> None:
    with Store(old, read_only=True) as store:
        assert [(row.trials, row.ok) for row in store.summaries()] == [(100, 100)]
        assert [each.config for each in store.tuned(H100)] == [winner().config]


def test_reading_a_store_of_an_older_version_leaves_it_as_it_is(
    old: Path, older: tuple[int, bytes]
) -> None:
    content(old)

    assert old.read_bytes() == older[1]
    assert os.listdir(old.parent) == [old.name]


# Migrating older versions.


def test_a_store_of_an_older_version_is_migrated_when_it_is_opened_to_write(old: Path) -> None:
    with Store(old) as store:
        assert store.warning is None
        assert (store.trials(), store.winners()) == (TRIALS, [winner()])
        assert store.verify() == []

    assert version(old) == migrations.VERSION


def test_a_migrated_store_keeps_what_is_added(old: Path) -> None:
    with Store(old) as store:
        assert store.add(trial(100))

    assert content(old) == ([*TRIALS, trial(100)], [winner()])


def test_a_migrated_store_keeps_results_with_cold_weights_apart(old: Path) -> None:
    cold = dataclasses.replace(WORKLOAD, weights="cold")

    with Store(old) as store:
        assert store.add(trial(0, workload=cold))

        assert store.trials(workload=cold) == [trial(0, workload=cold)]
        assert store.trials(workload=WORKLOAD) == TRIALS


def test_a_migration_keeps_columns_that_somebody_added(old: Path) -> None:
    sql(old, "ALTER TABLE trials ADD COLUMN note TEXT", "UPDATE trials SET note = 'mine'")

    Store(old).close()

    with contextlib.closing(sqlite3.connect(old)) as connection:
        notes = connection.execute("SELECT DISTINCT note FROM trials").fetchall()
    assert notes == [("mine",)]
    assert version(old) == migrations.VERSION


def test_an_older_version_that_is_still_running_goes_on_storing(old: Path) -> None:
    """It names the columns that it knows, and its rows are of plain workloads."""
    Store(old).close()
    new = trial(100)
    unknown = ("id", "weights", "epilogue", "grouping")
    names = [f'"{name}"' for name in queries.columns("trials") if name not in unknown]
    values = [{'"config"': f"'{new.config}'", '"digest"': "NULL"}.get(name, name) for name in names]

    sql(
        old,
        f"""INSERT INTO trials ({", ".join(names)})
        SELECT {", ".join(values)} FROM trials LIMIT 1""",
    )

    trials, _ = content(old)
    assert [t.workload for t in trials if t.config == new.config] == [WORKLOAD]


def test_a_migration_leaves_no_other_file(old: Path) -> None:
    Store(old).close()

    assert not set_aside(old)
    assert {each.name for each in old.parent.iterdir()} <= {old.name, f"{old.name}.lock"}


def schema(path: Path) -> dict[str, Any]:
    """The columns of each table, and the columns and kind of each of its indexes."""
    found: dict[str, Any] = {}
    with contextlib.closing(sqlite3.connect(path)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        for (table,) in tables.fetchall():
            found[table] = connection.execute(f"PRAGMA table_xinfo({table})").fetchall()
            for _, index, *kind in connection.execute(f"PRAGMA index_list({table})").fetchall():
                columns = connection.execute(f"PRAGMA index_xinfo({index})").fetchall()
                found[f"{table}: {index}"] = kind, columns
    return found


def test_migrations_lead_to_the_tables_of_a_new_store(old: Path, tmp_path: Path) -> None:
    fresh = tmp_path / "fresh.sqlite"

    for each in (old, fresh):
        Store(each).close()

    assert schema(old) == schema(fresh)


def test_several_processes_migrate_a_store_once(old: Path) -> None:
    opening = f"""{BARE}
from pathlib import Path
from outblas.autotune.store.store import Store
print("ready", flush=True)
sys.stdin.readline()
with Store(Path(sys.argv[1])) as store:
    print(len(store.trials()), store.warning)
"""
    command = [sys.executable, "-c", opening, str(old)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(4)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 4

    for process in processes:
        print("go", file=process.stdin, flush=True)

    assert [process.communicate(timeout=60)[0] for process in processes] == ["100 None\n"] * 4


# Migrations that are not completed.


LAST = migrations.VERSION - 1  # from which the last step leads


def fail_after_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the disk be full when the last step has done its work."""
    step = migrations.STEPS[LAST]

    def failing(connection: sqlite3.Connection) -> None:
        step(connection)
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(migrations, "STEPS", {**migrations.STEPS, LAST: failing})


def test_where_a_migration_fails_the_store_lives_in_memory(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_after_the_last_step(monkeypatch)

    with warned("is full; .* lost when the process ends", old) as store:
        assert store.trials() == TRIALS
        assert not store.persistent


def test_a_migration_that_fails_changes_nothing_and_leaves_a_copy(
    old: Path, older: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_after_the_last_step(monkeypatch)

    warned("is full", old).close()

    assert version(old) == older[0]
    assert content(old) == (TRIALS, [winner()])
    assert content(old.with_name(old.name + COPY)) == (TRIALS, [winner()])


def test_a_migration_that_failed_is_done_when_there_is_room(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_after_the_last_step(patch)
        warned("is full", old).close()

    with Store(old) as store:
        assert store.warning is None
        assert store.trials() == TRIALS

    assert not old.with_name(old.name + COPY).exists()


def test_a_migration_without_room_for_a_copy_is_not_begun(
    old: Path, older: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def backup(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(sqlite._Connection, "backup", backup)

    with warned("is full", old) as store:
        assert store.trials() == TRIALS

    assert version(old) == older[0]
    assert not old.with_name(old.name + COPY).exists()


def test_a_migration_that_is_killed_is_done_by_the_next(
    old: Path, older: tuple[int, bytes]
) -> None:
    killed = f"""{BARE}
import os
from pathlib import Path
from outblas.autotune.store import migrations, queries, sqlite
from outblas.autotune.store.store import Store
step = migrations.STEPS[{LAST}]
def killed(connection):
    step(connection)
    os.kill(os.getpid(), 9)
migrations.STEPS = {{**migrations.STEPS, {LAST}: killed}}
Store(Path(sys.argv[1]))
"""
    run = subprocess.run([sys.executable, "-c", killed, str(old)], timeout=60)
    assert (run.returncode, version(old)) == (-9, older[0])

    with Store(old) as store:
        assert store.warning is None
        assert store.trials() == TRIALS

    assert version(old) == migrations.VERSION
    assert content(old) == (TRIALS, [winner()])


# Numbers of the version.


@pytest.mark.parametrize("read_only", [False, True], ids=["to write", "to read"])
def test_a_store_of_a_newer_version_is_an_error_and_not_touched(
    path: Path, read_only: bool
) -> None:
    fill(path)
    sql(path, f"PRAGMA user_version = {migrations.VERSION + 1}")
    before = path.read_bytes()

    with pytest.raises(StoreError, match="a newer outblas wrote it"):
        Store(path, read_only=read_only)

    assert path.read_bytes() == before
    assert not set_aside(path)


@pytest.mark.parametrize("number", VERSIONS)
def test_a_wrong_number_of_the_version_costs_nothing(path: Path, number: int) -> None:
    fill(path, 5)
    sql(path, f"PRAGMA user_version = {number}")

    with Store(path) as store:
        assert store.warning is None
        assert store.persistent
        assert store.trials() == TRIALS[:5]

    assert version(path) == migrations.VERSION

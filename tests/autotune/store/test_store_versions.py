"""The store of trials over time: older versions, other hands, damage, a million rows."""

import contextlib
import os
import random
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import stored
from support.stored import (
    BARE,
    H100,
    WORKLOAD,
    damage,
    fill,
    set_aside,
    silent,
    sql,
    trial,
    warned,
    winner,
)

from outblas.autotune.store import migrations, queries, salvage, sqlite
from outblas.autotune.store.records import BestConfig, Trial
from outblas.autotune.store.store import Store, StoreError

SHARED = """id INTEGER PRIMARY KEY, gpu TEXT NOT NULL,
    M INTEGER NOT NULL, N INTEGER NOT NULL, K INTEGER NOT NULL,
    dtype TEXT NOT NULL, out_dtype TEXT NOT NULL, layout TEXT NOT NULL,
    kernel TEXT NOT NULL, source TEXT NOT NULL, config TEXT NOT NULL, "when" TEXT NOT NULL"""
PLACE = "kernel, M, N, K, dtype, out_dtype, layout, gpu, source"
VERSION_1 = [
    """CREATE TABLE gpus (
    "key" TEXT PRIMARY KEY, name TEXT, arch INTEGER, sms INTEGER, power_limit_w,
    driver TEXT, cuda TEXT, torch TEXT, triton TEXT, dsl TEXT)""",
    f"""CREATE TABLE trials ({SHARED},
    status TEXT NOT NULL, reason TEXT NOT NULL,
    us REAL, ratio REAL, ratio_low REAL, ratio_high REAL,
    clock_mhz REAL, predicted_us REAL, compile_s REAL, UNIQUE ({PLACE}, config))""",
    f"""CREATE TABLE winners ({SHARED},
    us REAL, cublas_us REAL, ratio REAL, ratio_low REAL, ratio_high REAL, rounds INTEGER,
    runner_up TEXT, lead REAL, lead_low REAL, lead_high REAL, confidence REAL, separated INTEGER,
    screened INTEGER, valid INTEGER,
    finalists TEXT NOT NULL, UNIQUE ({PLACE}))""",
    f"CREATE TABLE begun ({SHARED}, times INTEGER NOT NULL, UNIQUE ({PLACE}, config))",
    "PRAGMA application_id = 1869968482",
    "PRAGMA user_version = 1",
    "PRAGMA journal_mode = WAL",
]
TRIALS = [trial(i) for i in range(100)]


def old(path, count=100) -> None:
    """A store as version 1 of the tables has it."""
    path.parent.mkdir(exist_ok=True)
    sql(path, *VERSION_1)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        records: list[Trial | BestConfig] = [*TRIALS[:count], winner()]
        for record in records:
            table, row = "winners" if record == winner() else "trials", queries._row(record)
            del row["digest"]  # which version 2 has
            queries._put(connection_with_rows(connection), table, row, record.gpu)
        connection.execute("COMMIT")


def connection_with_rows(connection):
    connection.row_factory = sqlite3.Row
    return connection


def content(path):
    with silent(), Store(path, read_only=True) as store:
        return store.trials(), store.winners()


def version(path):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return migrations.version_of(connection)


# Versions.


def test_a_store_of_version_1_is_read_as_it_is(path: Path) -> None:
    old(path)
    before = path.read_bytes()
    with Store(path, read_only=True) as store:
        assert (store.trials(), store.winners()) == (TRIALS, [winner()])
        assert store.trials(workload=WORKLOAD) == TRIALS
        assert [(row.trials, row.ok) for row in store.summaries()] == [(100, 100)]
        assert [each.config for each in store.tuned(H100)] == [winner().config]
        assert store.verify() == []
        assert store.warning is None
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_store_of_version_1_is_migrated_when_it_is_written(path: Path) -> None:
    old(path)
    with Store(path) as store:
        assert store.warning is None
        assert (store.trials(), store.winners()) == (TRIALS, [winner()])
        assert store.add(trial(100))
        assert store.verify() == []
        assert queries.columns_there(store._file, "leases") == queries.columns("leases")
    assert version(path) == migrations.VERSION
    assert not set_aside(path)
    assert {p.name for p in path.parent.iterdir()} <= {path.name, f"{path.name}.lock"}
    assert content(path) == ([*TRIALS, trial(100)], [winner()])


def test_new_tables_are_what_migrations_lead_to(path: Path, tmp_path: Path) -> None:
    old(path)
    fresh = tmp_path / "fresh.sqlite"
    for each in (path, fresh):
        Store(each).close()

    def facts(file):
        with contextlib.closing(sqlite3.connect(file)) as connection:
            names = [
                row[0]
                for row in connection.execute(
                    "SELECT name FROM sqlite_master WHERE sql IS NOT NULL"
                )
            ]
            columns = {
                name: connection.execute(f"PRAGMA table_xinfo({name})").fetchall() for name in names
            }
            indexes = {
                name: connection.execute(f"PRAGMA index_xinfo({name})").fetchall() for name in names
            }
            unique = {name: queries._unique(connection, name) for name in names}
            return columns, indexes, unique

    assert facts(path) == facts(fresh)


def test_a_migration_that_fails_changes_nothing_and_leaves_a_copy(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old(path)

    def failing(connection):
        migrations._from_1(connection)
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(migrations, "STEPS", {1: failing})
        with warned("is full; .* lost when the process ends", path) as store:
            assert store.trials() == TRIALS
            assert not store.persistent
    assert version(path) == 1
    kept = path.with_name(f"{path.name}.before-migration")
    assert content(kept) == content(path) == (TRIALS, [winner()])
    with Store(path) as store:
        assert store.warning is None
        assert store.trials() == TRIALS
    assert not kept.exists()


def test_a_migration_without_room_for_a_copy_is_not_begun(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old(path)

    class Full(sqlite3.Connection):
        def backup(self, *arguments, **options):
            raise sqlite3.OperationalError("database or disk is full")

    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda *a, **options: connect(*a, **options, factory=Full)
    )
    with warned("is full", path) as store:
        assert store.trials() == TRIALS
    assert version(path) == 1
    assert not path.with_name(f"{path.name}.before-migration").exists()


KILLED = f"""{BARE}
import os
from pathlib import Path
from outblas.autotune.store import migrations
from outblas.autotune.store.store import Store
def killed(connection):
    migrations._from_1(connection)
    os.kill(os.getpid(), 9)
migrations.STEPS = {{1: killed}}
Store(Path(sys.argv[1]))
"""


def test_a_migration_that_is_killed_is_done_by_the_next(path: Path) -> None:
    old(path)
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], timeout=60).returncode == -9
    assert version(path) == 1
    with Store(path) as store:
        assert store.warning is None
        assert store.trials() == TRIALS
    assert version(path) == migrations.VERSION
    assert content(path) == (TRIALS, [winner()])


OPENING = f"""{BARE}
from pathlib import Path
from outblas.autotune.store.store import Store
print("ready", flush=True)
sys.stdin.readline()
with Store(Path(sys.argv[1])) as store:
    print(len(store.trials()), store.warning)
"""


def test_several_processes_migrate_once(path: Path) -> None:
    old(path)
    command = [sys.executable, "-c", OPENING, str(path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(4)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        print("go", file=process.stdin, flush=True)
    assert [process.communicate(timeout=60)[0] for process in processes] == ["100 None\n"] * 4


def test_a_newer_version_is_not_touched(path: Path) -> None:
    fill(path)
    sql(path, f"PRAGMA user_version = {migrations.VERSION + 1}")
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(StoreError, match="it takes a newer outblas"):
            Store(path, read_only=read_only)
    assert path.read_bytes() == before
    assert not set_aside(path)


# Other hands.


HARMLESS = {
    "an added column": [
        "ALTER TABLE trials ADD COLUMN note TEXT",
        "ALTER TABLE gpus ADD COLUMN note TEXT DEFAULT 'x'",
    ],
    "an added table": ["CREATE TABLE notes (id, text)"],
    "an added index": ["CREATE INDEX mine ON trials (us)"],
    "a lost index": ["DROP INDEX trials_by_workload"],
    "other white space": [
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_master SET sql = replace(sql, ',', ' ,  ') WHERE type = 'table'",
        "PRAGMA writable_schema = OFF",
    ],
    "another case": [
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_master SET sql = replace(sql, 'TEXT NOT NULL', 'text not null') WHERE type "
        "= 'table'",
        "PRAGMA writable_schema = OFF",
    ],
    "statistics": ["ANALYZE"],
}


@pytest.mark.parametrize("change", HARMLESS)
@pytest.mark.parametrize("version", [1, 2])
def test_what_others_add_costs_nothing(path: Path, change, version: int) -> None:
    if version == 1:
        old(path)
    else:
        with Store(path) as store:
            store.merge(TRIALS, [winner()])
    statements = [each for each in HARMLESS[change] if version == 2 or not each.startswith("DROP")]
    sql(path, *statements)
    assert content(path) == (TRIALS, [winner()])
    with Store(path) as store:
        assert store.warning is None
        assert store.trials() == TRIALS
        assert store.add(trial(100))
        assert store.add(trial(0, us=1.0), replace=True)
        store.record_best(winner(ratio=1.2))
        assert len(store.trials()) == 101
        assert store.verify() == []
    assert not set_aside(path)


HARMFUL = {
    "a lost column": ["ALTER TABLE trials DROP COLUMN compile_s"],
    "a renamed column": ["ALTER TABLE trials RENAME COLUMN compile_s TO compile_seconds"],
    "a lost table": ["DROP TABLE leases"],
    "two rows of one identity": [
        "CREATE TABLE copy AS SELECT * FROM trials",
        "DROP TABLE trials",
        "ALTER TABLE copy RENAME TO trials",
    ],
}


@pytest.mark.parametrize("change", HARMFUL)
def test_what_others_take_away_is_made_good(path: Path, change) -> None:
    with Store(path) as store:
        store.merge(TRIALS, [winner()])
    sql(path, *HARMFUL[change])
    with warned("a fresh store was begun with the .* 1 winners that can be read", path) as store:
        lost = "column" in change
        found = [trial(i, compile_s=None) for i in range(100)] if lost else TRIALS
        assert store.trials() == ([] if lost else found)
        assert store.winners() == [winner()]
        assert store.add(trial(100))
    assert len(set_aside(path)) == 1


# Damage.


def damaged_copies(path, count, seed, trials=400):
    """Seeds and what was done to copies of one store."""
    with Store(path) as store:
        store.merge([trial(i) for i in range(trials)], [winner()])
    sound = path.read_bytes()
    for i in range(count):
        for each in path.parent.iterdir():
            each.unlink()
        path.write_bytes(sound)
        yield seed + i, damage(path, random.Random(seed + i))


def test_what_can_be_read_in_damaged_stores_is_carried(path: Path) -> None:
    """A sample of what `make chaos` has more of."""
    known, kept = {trial(i) for i in range(400)}, []
    for seed, what in damaged_copies(path, 20, seed=1):
        with silent(), Store(path) as store:
            before = store.trials()
            assert store.add(trial(1000)), (seed, what)
            found = store.trials()  # more of them, if it was the GPU that could not be read
            assert {*before, trial(1000)} <= set(found), (seed, what)
            assert store.persistent, (seed, what)
            store.winners()
        invented = {record for record in found if record not in known} - {trial(1000)}
        assert not invented or "byte" in what, (seed, what, invented)
        kept.append(len(known & set(found)) / len(known))
        for read_only in (True, False):
            with Store(path, read_only=read_only) as store:
                assert store.trials() == found, (seed, what)
                assert store.warning is None, (seed, what)
    assert sum(kept) / len(kept) > 0.5


def test_rows_around_a_damaged_page_are_read(path: Path) -> None:
    with Store(path) as store:
        store.merge([trial(i) for i in range(2000)], [])
        root = store._file.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'trials'"
        ).fetchone()[0]
    pages = leaves(path.read_bytes(), root)
    assert len(pages) > 50
    with path.open("r+b") as file:
        for page in pages[10], pages[30]:
            file.seek((page - 1) * PAGE)
            file.write(b"\xa5" * PAGE)
    with silent(), Store(path) as store:
        found = store.trials()
        assert 2000 - 2 * 40 < len(found) < 2000
        assert f"with the {len(found)} trials" in str(store.warning)
        assert store.verify() == [store.warning]


PAGE = 4096


def leaves(data, page):
    """The numbers of the pages below this one that hold a table's rows, in their order."""
    content = data[(page - 1) * PAGE : page * PAGE]
    if content[0] == 13:
        return [page]
    cells = int.from_bytes(content[3:5], "big")
    places = [int.from_bytes(content[12 + 2 * i : 14 + 2 * i], "big") for i in range(cells)]
    children = [int.from_bytes(content[place : place + 4], "big") for place in places]
    last = int.from_bytes(content[8:12], "big")
    return [leaf for child in [*children, last] for leaf in leaves(data, child)]


def test_rows_that_come_before_their_gpu_is_known_are_carried(path: Path) -> None:
    """A GPU's row that cannot be read costs no trial: the next result of it brings it back."""
    fill(path, 50)
    sql(path, "DELETE FROM gpus", "DROP TABLE leases")
    with silent(), Store(path) as store:
        assert "with the 50 trials and 1 winners" in str(store.warning)
        assert store.trials() == []
        assert store.add(trial(50))
        assert len(store.trials()) == 51


def test_a_salvage_that_was_ended_is_done_by_the_next(path: Path) -> None:
    """As after a process that was killed between its steps."""
    fill(path, 50)
    path.rename(path.with_name(f"{path.name}.salvaging"))
    with warned(
        "a process that set it aside ended .* with the 50 trials and 1 winners", path
    ) as store:
        assert len(store.trials()) == 50
    assert len(set_aside(path)) == 1
    with Store(path) as store:
        assert store.warning is None
        assert len(store.trials()) == 50


def test_a_salvage_without_room_is_done_when_there_is_some(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path, 50)
    sql(path, "DROP TABLE leases")

    def refuse(source, target):
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(salvage, "carry", refuse)
        with warned("is full.*, which is tried again when the store is next opened", path) as store:
            assert store.persistent
            assert store.add(trial(100))
    with warned("with the 50 trials and 1 winners", path) as store:
        assert len(store.trials()) == 51


def test_what_is_newer_than_the_damaged_file_stays(path: Path) -> None:
    fill(path, 3)
    path.rename(path.with_name(f"{path.name}.salvaging"))
    with silent(), Store(path.with_name("other")) as other:
        other.add(trial(0, us=7.0))
    path.with_name("other").rename(path)
    with silent(), Store(path) as store:
        assert {each.us for each in store.trials()} == {7.0, 101.0, 102.0}


# Size.


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory):
    """A store of 20 workloads with 300 trials and a winner each."""
    path = tmp_path_factory.mktemp("large") / "tuning.sqlite"
    with Store(path) as store:
        for i in range(20):
            place = {"workload": stored.Workload(16 * (i + 1), 4096, 4096)}
            store.merge(
                [trial(j, reason="x" * 1000, **place) for j in range(300)], [winner(**place)]
            )
    return path


class Counting(sqlite3.Connection):
    """Counts the steps of SQLite's machine, in thousands."""

    steps = 0

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.set_progress_handler(self.count, 1000)

    def count(self) -> None:
        Counting.steps += 1


def work_of(operation, monkeypatch: pytest.MonkeyPatch):
    connect = sqlite3.connect
    with monkeypatch.context() as patch:
        patch.setattr(
            sqlite3, "connect", lambda *a, **options: connect(*a, **options, factory=Counting)
        )
        Counting.steps = 0
        operation()
        return Counting.steps


def test_opening_does_not_look_at_rows(large, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(read_only):
        return lambda: Store(large, read_only=read_only).close()

    def looked_up():
        with Store(large, read_only=True) as store:
            assert len(store.tuned(H100)) == 20

    def checked():
        with Store(large, read_only=True) as store:
            assert store.verify() == []

    assert work_of(checked, monkeypatch) > 100
    for operation in (opened(True), opened(False), looked_up):
        assert work_of(operation, monkeypatch) <= 5


def test_lookups_use_an_index(large, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(large) as store:
        place = (trial().gpu, stored.Workload(32, 4096, 4096), *trial(7).identity[2:])
        assert (
            work_of(lambda: store.trials(workload=place[1]), monkeypatch) == 0
        )  # this connection is not counted
        store._file.set_progress_handler(Counting.count.__get__(store), 1000)
        for operation, most in (
            (lambda: store.find(*place), 1),
            (lambda: store.add(trial(1000, workload=place[1])), 1),
            (lambda: store.trials(workload=place[1]), 40),
            (lambda: store.winners(workload=place[1]), 2),
            (store.kernels, 1),
        ):
            Counting.steps = 0
            operation()
            assert Counting.steps <= most
        plan = [
            row["detail"] for row in store._file.execute(f"EXPLAIN QUERY PLAN {stored_counts()}")
        ]
        assert plan == ["SCAN trials USING COVERING INDEX trials_by_workload"]


def stored_counts():
    from outblas.autotune.store import listing

    return listing._COUNTS


def test_a_reader_copies_nothing(large) -> None:
    """Its memory does not grow with the file."""
    code = f"""{BARE}
import resource
from pathlib import Path
from outblas.autotune.store.store import Store
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
Store(Path(sys.argv[1]) / "none", read_only=True).close()
before = peak()
with Store(Path(sys.argv[1]), read_only=True) as store:
    assert len(store.summaries()) == 20 and store.browse(limit=5)[1] >= 6000
    assert len(store.kernels()) == 1
print(peak() - before)
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(large)], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert large.stat().st_size > 8 << 20
    assert int(run.stdout) < 4 << 10  # KiB; SQLite's own cache has 2 MiB


def test_a_lock_survives_a_reader_of_the_same_process(path: Path) -> None:
    """Closing any descriptor of a file drops all locks that the process has on it: none is opened
    beside a writer's.
    """
    with (
        Store(path) as writer,
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as probe,
    ):
        probe.execute("PRAGMA busy_timeout = 10")
        for _ in range(3):
            writer._file.execute("BEGIN IMMEDIATE")
            with Store(path, read_only=True) as reader:
                assert reader.trials() == []
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                probe.execute("BEGIN IMMEDIATE")
            writer._file.execute("ROLLBACK")


def test_the_log_is_there_as_soon_as_a_store_is_open(path: Path) -> None:
    """By it others in the process see that the file is in use."""
    with Store(path):
        assert path.with_name(f"{path.name}-wal").exists()
        assert sqlite.state(path)[-1]


# Rows that are not what was stored.


ALTERED = {
    "a figure": "UPDATE trials SET us = us * 2 WHERE id = 3",
    "a config": "UPDATE trials SET config = replace(config, 'sms=2', 'sms=29') WHERE id = 3",
    "a status": "UPDATE trials SET status = 'wrong', us = NULL, ratio = NULL, ratio_low = NULL, "
    "ratio_high = NULL WHERE id = 3",
}


@pytest.mark.parametrize("what", ALTERED)
def test_an_altered_row_is_no_record(path: Path, what) -> None:
    """Though all its fields are valid: it counts as not measured, and is said by a full check."""
    fill(path, 5)
    sql(path, ALTERED[what])
    left = [trial(i) for i in range(5) if i != 2]
    with Store(path) as store:
        assert store.trials() == left
        assert [
            problem for problem in store.verify() if "trials[3] is not what was stored" in problem
        ]
        assert store.add(trial(2))
        assert store.find(
            *(getattr(trial(2), name) for name in ("gpu", "workload", "kernel", "source", "config"))
        )


def test_an_altered_winner_is_not_looked_up(path: Path) -> None:
    fill(path, 1)
    with Store(path) as store:
        store.record_best(winner())
        assert [each.config for each in store.tuned(H100)] == [winner().config]
    sql(path, "UPDATE winners SET us = us / 2")
    with Store(path, read_only=True) as store:
        assert store.tuned(H100) == []
        assert store.winners() == []


def test_altered_rows_are_not_salvaged(path: Path) -> None:
    fill(path, 5)
    sql(path, ALTERED["a figure"])
    with (
        contextlib.closing(sqlite3.connect(path)) as source,
        contextlib.closing(sqlite.empty()) as target,
    ):
        source.row_factory = sqlite3.Row
        assert salvage.carry(source, target).trials == 4


@pytest.mark.parametrize("offset", [0, 16, 17, 18, 19, 21, 47])
def test_a_header_that_sqlite_refuses_costs_no_row(path: Path, offset: int) -> None:
    fill(path, 50)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes((byte ^ 0x55,)))
    with warned("is damaged", path) as store:
        assert store.persistent
        assert store.trials() == [trial(i) for i in range(50)]
        assert store.add(trial(50))


def test_a_wrong_number_of_the_version_costs_nothing(path: Path) -> None:
    fill(path, 5)
    sql(path, "PRAGMA user_version = 1")
    with Store(path) as store:
        assert store.warning is None
        assert store.persistent
        assert store.trials() == [trial(i) for i in range(5)]
    assert version(path) == migrations.VERSION

"""A store's file that is damaged, goes away, is another program's, or has rows that are no
records.
"""

import contextlib
import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.disks import overwrite, seeming_damaged, snapshot
from support.stored import H100, WORKLOAD, fill, kept, set_aside, silent, sql, trial, winner
from support.users import as_user

from outblas.autotune.store.migrations import VERSION
from outblas.autotune.store.records import Trial
from outblas.autotune.store.store import Store, StoreError

TRIALS = [trial(i) for i in range(100)]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a store that has `TRIALS` and a winner."""
    path = tmp_path_factory.mktemp("sound") / "tuning.sqlite"
    fill(path, len(TRIALS))
    return path.read_bytes()


@pytest.fixture(autouse=True)
def _of_the_cache(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere a file that lacks the application id is not ours to set aside."""
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(path.parent))


# Damage that is there when the store is opened.


def without_tables(data: bytes, folder: Path) -> bytes:
    path = folder / "without.sqlite"
    path.write_bytes(data)
    sql(path, "DROP TABLE trials")
    return path.read_bytes()


def cut(size: int) -> Callable[[bytes, Path], bytes]:
    """Keeps so many bytes, or all but so many where the number is negative."""
    return lambda data, _: data[:size]


CUTS = 1, 10, 99, 100, 512, 4096, 5000, 8192, 20000  # the header has 100 bytes, a page 4096
DAMAGES: dict[str, Callable[[bytes, Path], bytes]] = {
    "text": lambda data, _: b"this is no database\n" * 1000,
    "zeros": lambda data, _: bytes(len(data)),
    "garbage after the header": lambda data, _: data[:100] + os.urandom(len(data) - 100),
    "garbage in the middle": lambda data, _: data[:8192] + os.urandom(12288) + data[20480:],
    "no tables": without_tables,
    **{
        f"cut to {size} bytes": cut(size) for size in (1, 10, 99, 100, 512, 4096, 5000, 8192, 20000)
    },
    "cut by a byte": cut(-1),
    "cut by a page": cut(-4096),
}


@pytest.fixture(params=list(DAMAGES.values()), ids=list(DAMAGES))
def damaged(path: Path, sound: bytes, tmp_path: Path, request: pytest.FixtureRequest) -> bytes:
    """What stands in place of a store of 100 trials."""
    found = request.param(sound, tmp_path)
    path.parent.mkdir()
    path.write_bytes(found)
    return found


@pytest.mark.usefixtures("damaged")
def test_a_damaged_file_reads_as_empty(path: Path) -> None:
    with silent(), Store(path, read_only=True) as store:
        found = store.trials(), store.winners()

        assert found == ([], [])
        assert "cannot be read" in str(store.warning)
        assert store.verify() == [store.warning]


@pytest.mark.usefixtures("damaged")
def test_reading_leaves_a_damaged_file_as_it_is(path: Path) -> None:
    before = snapshot(path)

    with silent(), Store(path, read_only=True) as store:
        store.trials()

    assert snapshot(path) == before


def test_a_damaged_file_is_set_aside_as_it_was(path: Path, damaged: bytes) -> None:
    with silent(), Store(path) as store:
        store.trials()  # some damage is found only when it is read

    (aside,) = set_aside(path)
    # SQLite counts the changes of an open file in its header.
    assert aside.read_bytes()[100:] == damaged[100:]


@pytest.mark.usefixtures("damaged")
def test_what_can_be_read_of_a_damaged_file_is_carried_over_with_a_warning(path: Path) -> None:
    with silent(), Store(path) as store:
        left, winners = store.trials(), store.winners()

        assert set(left) <= set(TRIALS)
        (aside,) = set_aside(path)
        assert re.search(
            rf"is damaged .* it was renamed to {aside.name}, and a new store was started "
            rf"with the {len(left)} trials and {len(winners)} winners",
            str(store.warning),
        )
        assert store.verify() == [store.warning]


@pytest.mark.usefixtures("damaged")
def test_the_fresh_store_keeps_what_is_added(path: Path) -> None:
    with silent(), Store(path) as store:
        left = store.trials()
        added = store.add(trial(1000))

        assert added
        assert not store.in_memory
    assert kept(path) == [*left, trial(1000)]


# Damage that comes while the store is open.


def test_damage_that_comes_later_is_found_by_reading(path: Path) -> None:
    fill(path, 1000)
    with Store(path) as store, silent():
        overwrite(path)

        assert store.trials() == []
        assert "is damaged" in str(store.warning)
    assert len(set_aside(path)) == 1


def test_damage_that_comes_later_is_found_by_writing(path: Path) -> None:
    fill(path, 1000)
    with Store(path) as store, silent():
        overwrite(path)

        assert store.add(trial(1))
        assert "is damaged" in str(store.warning)
        assert store.trials() == [trial(1)]
    assert len(set_aside(path)) == 1
    assert kept(path) == [trial(1)]


def test_a_store_goes_on_after_damage_that_it_read(path: Path) -> None:
    fill(path, 1000)
    with Store(path) as store, silent():
        overwrite(path)
        store.trials()

        assert store.add(trial(1))
    assert kept(path) == [trial(1)]


def add_and_damage(path: Path, store: Store) -> None:
    """Adds a trial to an open store, and overwrites its file once that is in it."""
    store.add(trial(0))
    with contextlib.closing(sqlite3.connect(path)) as other_program:
        other_program.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    overwrite(path)


def test_two_that_find_damage_set_the_file_aside_once(path: Path) -> None:
    with Store(path) as first, Store(path) as second, silent():
        add_and_damage(path, first)

        for number, store in ((1, first), (2, second)):
            with seeming_damaged():
                assert store.add(trial(number))

        assert first.trials() == second.trials() == [trial(1), trial(2)]
    assert len(set_aside(path)) == 1
    assert kept(path) == [trial(1), trial(2)]


def test_a_reader_leaves_the_fresh_file_that_another_has_begun_meanwhile(path: Path) -> None:
    with Store(path) as first, Store(path) as second, silent():
        add_and_damage(path, first)
        reads = 0

        def read(trials: Iterator[Trial], _: object) -> list[Trial]:
            nonlocal reads
            reads += 1
            if reads == 1:
                with seeming_damaged():
                    first.add(trial(1))  # which sets the file aside
                raise sqlite3.DatabaseError("database disk image is malformed")
            return list(trials)

        assert second.stream(read) == [trial(1)]
    assert len(set_aside(path)) == 1


def test_what_only_seems_damaged_is_opened_again(path: Path) -> None:
    trials = fill(path)
    with Store(path) as store:
        with seeming_damaged():
            assert store.add(trial(7))

        assert store.warning is None
        assert store.trials() == [*trials, trial(7)]
    assert not set_aside(path)


# A file that goes away.


@pytest.mark.parametrize(
    "lose",
    [
        pytest.param(Path.unlink, id="deleted"),
        pytest.param(lambda path: path.rename(path.with_name("elsewhere")), id="moved"),
        pytest.param(lambda path: shutil.rmtree(path.parent), id="its folder deleted"),
    ],
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


# A file that is not ours to touch.


def of_a_newer_version(path: Path) -> None:
    fill(path)
    sql(path, f"PRAGMA user_version = {VERSION + 1}")


def of_another_program(path: Path) -> None:
    path.parent.mkdir()
    sql(path, "CREATE TABLE cookies (x)")


@pytest.mark.parametrize("read_only", [False, True], ids=["to write", "to read"])
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        pytest.param(
            of_a_newer_version,
            f"is of version {VERSION + 1}, expected {VERSION}",
            id="a newer version's",
        ),
        pytest.param(of_another_program, "a database of another program", id="another program's"),
    ],
)
def test_what_is_not_ours_is_an_error_and_not_touched(
    path: Path, make: Callable[[Path], None], problem: str, read_only: bool
) -> None:
    make(path)
    before = path.read_bytes()

    with pytest.raises(StoreError, match=problem):
        Store(path, read_only=read_only)

    assert path.read_bytes() == before
    assert not set_aside(path)


# Rows that are no valid records.

LEASED = H100, WORKLOAD, "hopper.hilbert", "abc", "x=1"
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


class Row(NamedTuple):
    """A change of the one row of a table, and what `verify` says of the row then."""

    table: str
    change: str
    problem: str

    @property
    def trials(self) -> int:
        """How many valid trials are left of one."""
        return int(self.table not in ("trials", "gpus"))

    @property
    def winners(self) -> int:
        return int(self.table not in ("winners", "gpus"))


ROWS = [Row(table, *each) for table, planted in PLANTED.items() for each in planted.items()]


@pytest.fixture(scope="module")
def with_lease(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a store with a trial, a winner, and the lease of a process that has died."""
    path = tmp_path_factory.mktemp("leased") / "tuning.sqlite"
    fill(path, 1)

    def claim() -> bool:
        store = Store(path)
        return store.claim(*LEASED).granted

    assert as_user(os.geteuid(), claim)
    with Store(path) as store:  # which moves into the file what is in the log
        assert store.verify() == []
    return path.read_bytes()


def in_words(row: Row) -> str:
    return f"{row.table}: {row.change}"


@pytest.fixture(params=ROWS, ids=in_words)
def planted(path: Path, with_lease: bytes, request: pytest.FixtureRequest) -> Row:
    """A store with one row of each table, of which one is no valid record."""
    row: Row = request.param
    path.parent.mkdir()
    path.write_bytes(with_lease)
    sql(path, f"UPDATE {row.table} SET {row.change}")
    return row


def test_verify_names_a_row_that_is_no_record(path: Path, planted: Row) -> None:
    with Store(path) as store:
        problems = store.verify()

    assert any(planted.problem in problem for problem in problems), problems


def test_reading_leaves_out_a_row_that_is_no_record(path: Path, planted: Row) -> None:
    with Store(path) as store:
        assert len(store.trials()) == planted.trials
        assert len(store.winners()) == planted.winners
        assert len(store.tuned(H100)) <= 1
        assert store.claim(*LEASED).known is None


def test_listings_leave_out_a_row_that_is_no_record(path: Path, planted: Row) -> None:
    with Store(path) as store:
        shown, total = store.browse()
        summaries = store.summaries()
        streamed = store.stream(lambda trials, winners: (len(list(trials)), len(list(winners))))

    assert (len(shown), total) == (planted.trials, 1)
    assert all(summary.trials <= 1 for summary in summaries)
    assert streamed == (planted.trials, planted.winners)


@pytest.mark.parametrize(
    "planted",
    # No result has the key of these.
    [row for row in ROWS if row.table != "leases" and "kernel" not in row.change],
    ids=in_words,
    indirect=True,
)
def test_a_result_heals_the_row_that_is_no_record(path: Path, planted: Row) -> None:
    """Or it stands beside a row that has another key now."""
    fill(path, 1)

    with Store(path) as store:
        assert (store.trials(), store.winners()) == ([trial()], [winner()]), planted

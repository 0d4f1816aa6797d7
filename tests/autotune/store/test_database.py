"""The file of a store: what is refused, damaged files, full disks, killed processes, claims."""

import contextlib
import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.stored import H100, WORKLOAD, damage, fill, kept, set_aside, sql, trial

from outblas.autotune.store import database
from outblas.autotune.store.store import Store, StoreError

CONFIG = (H100, WORKLOAD, "hopper.hilbert", "abc", "x=1")


@pytest.fixture
def path(path: Path) -> Path:
    """The file of a store, in a folder that is there."""
    path.parent.mkdir()
    return path


def state(folder: Path) -> dict[str, object]:
    """Everything in a folder, with its contents where it is a file."""
    return {
        each.name: each.read_bytes() if stat.S_ISREG(each.lstat().st_mode) else each.lstat().st_mode
        for each in folder.iterdir()
    }


# What is not ours.


def a_text(path: Path) -> None:
    path.write_text("tile_m,us\n128,17.0\n")


def another_database(path: Path) -> None:
    sql(path, "CREATE TABLE trials (id)", "INSERT INTO trials VALUES (1)")


def another_version(path: Path) -> None:
    fill(path)
    sql(path, "PRAGMA user_version = 5")


def a_loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (a_text, "which is no database, expected a file of tuning results that outblas wrote"),
        (another_database, "a database of another program"),
        (another_version, "of version 5, where this outblas has 7"),
        (Path.mkdir, "a folder"),
        (lambda path: path.symlink_to("/proc/version"), "which is no database"),
        (os.mkfifo, "a FIFO"),
        (a_loop, "Too many levels of symbolic links"),
    ],
)
@pytest.mark.parametrize("read_only", [False, True])
def test_what_is_no_store_is_refused_and_left_as_it_is(
    path: Path, make: object, message: str, read_only: bool
) -> None:
    make(path)  # type: ignore[operator]
    before = state(path.parent)

    with pytest.raises(StoreError, match=message):
        Store(path, read_only=read_only)

    assert state(path.parent) == before


def test_a_file_where_a_folder_should_be_is_refused(path: Path) -> None:
    path.write_text("")
    with pytest.raises(StoreError, match=r"cannot be opened|cannot be read"):
        Store(path / "tuning.sqlite")


def test_a_folder_that_everybody_can_write_is_refused(path: Path) -> None:
    path.parent.chmod(0o777)
    with pytest.raises(StoreError, match="can be written by others"):
        Store(path)
    assert not path.exists()


def test_a_file_of_another_user_in_a_public_folder_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path)
    path.parent.chmod(0o1777)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(StoreError, match="belongs to another user"):
        Store(path)


def test_a_network_file_system_is_warned_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "network_filesystem", lambda folder: "nfs4")
    with pytest.warns(UserWarning, match=r"\(nfs4\): processes of one machine can share"):
        Store(path).close()


# Reading alone.


def test_reading_leaves_no_trace(path: Path) -> None:
    fill(path)
    before = state(path.parent)

    assert len(kept(path, read_only=True)) == 3
    with Store(path.with_name("none"), read_only=True) as store:
        assert store.trials() == []

    assert state(path.parent) == before


def test_reading_sees_what_others_have_just_written(path: Path) -> None:
    with Store(path) as writer, Store(path, read_only=True) as reader:
        for i in range(3):
            writer.add(trial(i))
            assert len(reader.trials()) == i + 1
    with pytest.raises(StoreError, match="is closed"):
        reader.trials()


def test_a_store_for_reading_is_not_written(path: Path) -> None:
    fill(path)
    with Store(path, read_only=True) as store:
        for write in (lambda: store.add(trial(9)), lambda: store.claim(CONFIG)):
            with pytest.raises(StoreError, match="was opened for reading only"):
                write()


def test_a_process_with_a_store_of_its_own_keeps_its_locks(path: Path) -> None:
    """Closing a file that is read beside it would drop them, and another process could delete the
    log.
    """
    with Store(path) as store:
        store.add(trial(0))
        with Store(path, read_only=True) as reader:
            assert len(reader.trials()) == 1
        sql_in_another_process(path, "SELECT count(*) FROM trials")
        store.add(trial(1))
        assert path.with_name(path.name + "-wal").exists()
    assert len(kept(path)) == 2


def sql_in_another_process(path: Path, statement: str) -> None:
    program = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute(sys.argv[2])"
    subprocess.run([sys.executable, "-c", program, str(path), statement], check=True)


# Damage.


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.filterwarnings("ignore:.* is damaged")
def test_a_damaged_store_is_put_aside_and_a_new_one_begun(path: Path, seed: int) -> None:
    trials = fill(path, 60)
    what = damage(path, random.Random(seed))
    damaged = path.read_bytes()
    try:
        with Store(path) as store:
            before = store.trials()
            with contextlib.suppress(StoreError):
                store.verify()
            assert store.add(trial(500)), what
            left = store.trials()
    except StoreError as error:  # its header no longer says whose it is
        assert "outblas wrote" in str(error)
        assert path.read_bytes() == damaged
        return

    assert left in ([*before, trial(500)], [trial(500)]), what
    assert set_aside(path) or len(left) == len(trials) + 1, what


def break_pages(path: Path) -> None:
    """Overwrites all pages but the first, which says whose file it is."""
    data = bytearray(path.read_bytes())
    data[4096:] = random.Random(1).randbytes(len(data) - 4096)
    path.write_bytes(data)


def test_the_name_of_a_damaged_store_is_said_and_it_stays_as_it_is(path: Path) -> None:
    fill(path)
    break_pages(path)
    damaged = path.read_bytes()

    with Store(path, read_only=True) as reader, pytest.raises(StoreError, match="malformed"):
        reader.trials()
    with pytest.warns(UserWarning, match=r"is damaged \(.*renamed to tuning.sqlite\.damaged-"):
        assert kept(path) == []

    (aside,) = set_aside(path)
    assert aside.read_bytes() == damaged


def test_a_store_of_the_cache_directory_may_be_damaged_beyond_recognition(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(path.parent))
    path.write_bytes(bytes(8192))

    with pytest.warns(UserWarning, match="is damaged"), Store() as store:
        assert store.add(trial())

    assert [each.read_bytes() for each in set_aside(path)] == [bytes(8192)]


def test_damage_that_is_found_while_a_store_is_open_costs_no_later_result(path: Path) -> None:
    fill(path)
    with Store(path) as first, Store(path) as second:
        for store in (first, second):
            store.verify()
        sql(path, "UPDATE trials SET record = '{}'")
        with pytest.warns(UserWarning, match="is damaged"):
            assert first.trials() == []
        assert first.add(trial(7))
        assert second.add(trial(8)), "it has the file that was put aside open"
        assert first.trials() == second.trials() == [trial(7), trial(8)]
    assert len(set_aside(path)) == 1
    assert kept(path) == [trial(7), trial(8)]


@pytest.mark.parametrize("fate", ["moved", "deleted"])
def test_results_reach_the_file_that_has_the_name(path: Path, fate: str) -> None:
    with Store(path) as store:
        store.add(trial(0))
        path.rename(path.with_name("moved"))
        if fate == "deleted":
            path.with_name("moved").unlink()
        assert store.add(trial(1))
        assert store.trials() == [trial(1)]
    assert kept(path) == [trial(1)]


def test_a_file_that_somebody_locks_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    fill(path)
    holder = sqlite3.connect(path, isolation_level=None)
    with contextlib.closing(holder), Store(path) as store:
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="database is locked"):
            store.add(trial(5))
        holder.execute("ROLLBACK")
        assert store.add(trial(5))


# Many at once.


def test_threads_share_a_store(path: Path) -> None:
    with Store(path) as store, ThreadPoolExecutor(8) as pool:
        added = list(pool.map(lambda i: store.add(trial(i % 100)), range(200)))
    assert sum(added) == 100
    assert len(kept(path)) == 100


# Claims.


def test_a_claim_ends_with_its_trial_its_release_or_its_store(path: Path, store: Store) -> None:
    config = trial().identity
    with Store(path) as other:
        assert other.claim(config)
        assert store.claim(CONFIG), "it is another config"
        assert not store.claim(config)
        assert not other.claim(config), "another thread has it"
        store.release(config)  # which is not this one's to give back
        assert not store.claim(config)
        other.release(config)
        assert store.claim(config)
        assert store.add(trial())
        assert other.claim(config)
    assert store.claim(config)


def test_a_claim_is_free_once_its_process_is_gone(store: Store) -> None:
    reader, writer = os.pipe()
    holder = os.fork()
    if not holder:
        with Store(store.path) as theirs:
            os.write(writer, b"1" if theirs.claim(CONFIG) else b"0")
            time.sleep(60)
            os._exit(1)
    try:
        assert os.read(reader, 1) == b"1"
        assert not store.claim(CONFIG)
    finally:
        os.kill(holder, signal.SIGKILL)
    os.waitid(os.P_PID, holder, os.WEXITED | os.WNOWAIT)  # nobody has reaped it yet
    assert store.claim(CONFIG)
    os.waitpid(holder, 0)
    for descriptor in (reader, writer):
        os.close(descriptor)


def test_of_those_who_race_for_a_claim_one_has_it(path: Path) -> None:
    """All stay open until all have tried: none of them is given back."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        stores = [stack.enter_context(Store(path)) for _ in range(4)]
        configs = [(*CONFIG[:-1], f"x={i}") for i in range(300)]
        granted = list(pool.map(lambda store: [store.claim(each) for each in configs], stores))
    assert [sum(of_config) for of_config in zip(*granted, strict=True)] == [1] * 300


def test_a_group_that_shares_a_store_shares_its_claims(path: Path, store: Store) -> None:
    path.chmod(0o664)
    assert store.claim(CONFIG)
    assert path.with_name(f"{path.name}-claims").stat().st_mode & 0o777 == 0o664


def test_claims_that_cannot_be_written_are_an_error(path: Path, store: Store) -> None:
    path.with_name(f"{path.name}-claims").mkdir()
    with pytest.raises(StoreError, match="-claims cannot be locked: Is a directory"):
        store.claim(CONFIG)

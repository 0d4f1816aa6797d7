"""What a store says is on disk, and how it finds out before anything is measured."""

import contextlib
import sqlite3
from pathlib import Path

import pytest
from support.disks import leave_room, overwrite
from support.stored import fill, kept, set_aside, silent, sql, trial, winner

from outblas.autotune.store import places
from outblas.autotune.store.store import Store, StoreError
from outblas.core import filesystems


def test_a_store_in_order_is_persistent(path: Path) -> None:
    with Store(path) as store:
        store.check_persistent()

        assert store.persistent
        assert store.add(trial())
        assert store.unsaved == 0


def test_a_store_in_order_has_nothing_to_export(path: Path) -> None:
    with Store(path) as store:
        store.add(trial())

        with pytest.raises(ValueError, match="every result is in the file"):
            store.emergency_export()


def test_a_check_leaves_nothing_in_the_file(path: Path) -> None:
    Store(path).close()
    before = tables_of(path)

    with Store(path) as store:
        store.check_persistent()

        assert tables_of(path) == before
        assert store.verify() == []


def tables_of(path: Path) -> set[str]:
    """The names of the tables in a store's file."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return {name for (name,) in rows}


def test_a_store_that_is_closed_is_not_persistent(path: Path) -> None:
    store = Store(path)
    store.close()

    assert not store.persistent
    with pytest.raises(StoreError, match="is closed"):
        store.check_persistent()


def test_a_check_keeps_what_others_do(path: Path) -> None:
    with Store(path) as one, Store(path) as other, Store(path, read_only=True) as reader:
        for i in range(5):
            assert one.add(trial(i))

            other.check_persistent()

            assert len(reader.trials()) == len(other.trials()) == i + 1


@pytest.mark.parametrize("pages", [0, 8])
def test_a_disk_with_little_room_is_said_before_anything_is_measured(
    path: Path, pages: int
) -> None:
    with Store(path) as store:
        leave_room(store, pages)

        with pytest.raises(StoreError, match=r"is full; results could not be kept"):
            store.check_persistent()


def test_a_disk_that_has_room_again_is_persistent(path: Path) -> None:
    with Store(path) as store:
        leave_room(store)
        with pytest.raises(StoreError):
            store.check_persistent()

        leave_room(store, 1_000_000)
        store.check_persistent()

        assert store.persistent


def test_what_is_only_read_is_not_persistent(path: Path) -> None:
    fill(path)

    with Store(path, read_only=True) as store:
        assert not store.persistent
        with pytest.raises(StoreError, match="for reading only"):
            store.check_persistent()


@pytest.fixture
def no_file(path: Path) -> Path:
    """A place at which no file can be."""
    path.parent.write_text("")
    return path


def test_what_cannot_be_a_file_is_not_persistent(no_file: Path) -> None:
    with silent(), Store(no_file) as store:
        assert not store.persistent
        with pytest.raises(StoreError, match=r"lost when the process ends"):
            store.check_persistent()


def test_results_that_no_file_has_are_said_to_be_lost(no_file: Path) -> None:
    with silent():
        store = Store(no_file)

    assert store.add(trial())
    assert store.unsaved == 1
    with pytest.warns(UserWarning, match="the last 1 results are lost"):
        store.close()


def test_a_check_finds_damage_and_goes_on_with_a_fresh_file(path: Path) -> None:
    fill(path, 500)
    with silent(), Store(path) as store:
        overwrite(path)

        store.check_persistent()

        assert store.persistent
        assert store.add(trial(1000))
    assert set_aside(path)
    assert trial(1000) in kept(path, read_only=True)


def test_unsaved_results_are_counted_by_identity(path: Path) -> None:
    with silent(), Store(path) as store:
        leave_room(store)
        while store.persistent:
            store.add(trial(900 + len(store.trials())))
        before = store.unsaved

        assert store.add(trial(500))
        assert not store.add(trial(500))
        assert store.add(trial(500, us=7.0), replace=True)
        store.record_best(winner())
        store.record_best(winner(ratio=1.1))

        assert store.unsaved == before + 2


def test_unsaved_results_are_written_when_there_is_room_again(path: Path) -> None:
    with silent(), Store(path) as store:
        leave_room(store)
        while store.persistent:
            store.add(trial(900 + len(store.trials())))
        store.add(trial(500))
        store.add(trial(500, us=7.0), replace=True)

        leave_room(store, 1_000_000)
        assert store.add(trial(501))

        assert store.unsaved == 0
        assert store.persistent
    assert {trial(500, us=7.0), trial(501)} <= set(kept(path, read_only=True))


def test_a_link_to_a_store_has_its_log_beside_the_file(path: Path, tmp_path: Path) -> None:
    fill(path, 1)
    link = tmp_path / "link.sqlite"
    link.symlink_to(path)

    with Store(link) as store, Store(path, read_only=True) as reader:
        assert store.path == path
        assert store.add(trial(1))
        assert reader.trials() == [trial(0), trial(1)]


@pytest.fixture
def on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the test is on a network file system, so to speak."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"22 1 0:40 / {tmp_path} rw - nfs server:/ rw\n")
    monkeypatch.setattr(filesystems, "_MOUNTS", mounts)
    places._warn_of_network.cache_clear()


@pytest.mark.usefixtures("on_nfs")
def test_a_store_on_a_network_file_system_is_warned_about_once(path: Path) -> None:
    with pytest.warns(UserWarning, match=r"is on a network file system \(nfs\)") as said:
        stores = [Store(path) for _ in range(3)]

    assert len(said) == 1
    for store in stores:
        store.close()


@pytest.mark.usefixtures("on_nfs")
def test_a_store_on_a_network_file_system_is_persistent(path: Path) -> None:
    with silent(), Store(path) as store:
        assert store.add(trial())
        assert store.warning is None
        assert store.persistent


def test_a_check_that_was_killed_between_its_steps_does_no_harm(path: Path) -> None:
    fill(path)
    sql(path, "CREATE TABLE probe (content)", "INSERT INTO probe VALUES (zeroblob(1000))")

    with Store(path) as store:
        store.check_persistent()

        assert len(store.trials()) == 3
        assert store.verify() == []

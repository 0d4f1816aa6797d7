"""The store of trials says what is on disk: folders of groups, full disks, emergency exports."""

import errno
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.disks import leave_room, refusing
from support.stored import BARE, fill, set_aside, silent, sql, trial, winner

from outblas.autotune.store import places, transfer
from outblas.autotune.store.store import Store, StoreError
from outblas.core import filesystems


def there(path):
    with Store(path, read_only=True) as store:
        assert store.warning is None
        return store.trials()


# What reaches the file.


def test_a_store_in_order_is_persistent(path: Path) -> None:
    with Store(path) as store:
        store.check_persistent()
        assert store.persistent
        assert store.add(trial())
        assert store.unsaved == 0
        with pytest.raises(ValueError, match="every result is in the file"):
            store.emergency_export()
        tables = {
            row[0]
            for row in store._file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }
        assert "probe" not in tables
        assert store.verify() == []
    with pytest.raises(StoreError, match="is closed"):
        store.check_persistent()
    assert not store.persistent


def test_checking_keeps_what_others_do(path: Path) -> None:
    with Store(path) as one, Store(path) as other, Store(path, read_only=True) as reader:
        for i in range(20):
            assert one.add(trial(i))
            other.check_persistent()
            assert len(reader.trials()) == len(other.trials()) == i + 1


def test_a_full_disk_is_said_before_anything_is_measured(path: Path) -> None:
    with Store(path) as store:
        leave_room(store)
        with pytest.raises(StoreError, match=r"is full; results could not be kept"):
            store.check_persistent()
        leave_room(store, 1_000_000)
        store.check_persistent()
        assert store.persistent


def test_a_disk_with_little_room_is_full(path: Path) -> None:
    with Store(path) as store:
        leave_room(store, 8)
        with pytest.raises(StoreError, match="is full"):
            store.check_persistent()


def test_what_is_only_read_is_not_persistent(path: Path) -> None:
    fill(path)
    with Store(path, read_only=True) as store:
        assert not store.persistent
        with pytest.raises(StoreError, match="for reading only"):
            store.check_persistent()


@pytest.mark.parametrize("what", ["a folder", "below a file"])
def test_what_cannot_be_a_file_is_not_persistent(path: Path, what: str) -> None:
    if what == "a folder":
        path.mkdir(parents=True)
    else:
        path.parent.write_text("")
    with silent():
        store = Store(path)
        assert not store.persistent
        with pytest.raises(StoreError, match=r"lost when the process ends"):
            store.check_persistent()
        assert store.add(trial())
        assert store.unsaved == 1
    with pytest.warns(UserWarning, match="the last 1 results are lost"):
        store.close()


def test_checking_finds_damage_and_goes_on_with_a_fresh_file(path: Path) -> None:
    fill(path, 500)
    with silent(), Store(path) as store:
        store._file.execute("PRAGMA cache_size = 0")
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(os.urandom(path.stat().st_size - 4096))
        store.check_persistent()
        assert store.persistent
        assert store.add(trial(1000))
    assert set_aside(path)
    assert trial(1000) in there(path)


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
        leave_room(store, 1_000_000)
        assert store.add(trial(501))
        assert store.unsaved == 0
        assert store.persistent
    assert trial(500, us=7.0) in there(path)


# Emergency exports.


@pytest.fixture
def full(path):
    """A store of three trials and a winner, of which the disk has one trial; its file's name is its
    folder's.
    """
    with silent():
        store = Store(path)
        store.add(trial(0))
        with refusing("database or disk is full"):
            for each in (trial(1), trial(2)):
                store.add(each)
            store.record_best(winner())
            yield store
            store.close()


def test_an_emergency_export_has_what_the_file_lacks(full, path: Path, tmp_path: Path) -> None:
    assert full.unsaved == 3
    first, second = full.emergency_export(tmp_path), full.emergency_export(tmp_path)
    assert first != second
    assert first.parent == tmp_path
    assert transfer.read(first) == transfer.read(second) == ([trial(1), trial(2)], [winner()])
    assert full.unsaved == 3
    assert not full.persistent


def test_what_was_exported_is_not_said_to_be_lost(full, tmp_path: Path) -> None:
    full.emergency_export(tmp_path)
    full.add(trial(3))
    with pytest.warns(UserWarning, match="the last 1 results are lost"):
        full.close()


def test_an_emergency_export_goes_to_the_first_folder_that_can_be_written(
    full, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {name: tmp_path / name for name in ("current", "home", "temporary")}
    for folder in folders.values():
        folder.mkdir()
    monkeypatch.chdir(folders["current"])
    monkeypatch.setenv("HOME", str(folders["home"]))
    monkeypatch.setattr(places.tempfile, "tempdir", str(folders["temporary"]))
    broken = set()
    write = transfer.exports.write

    def refuse(path, *arguments, **options):
        if path.parent.name in broken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *arguments, **options)

    monkeypatch.setattr(transfer.exports, "write", refuse)
    for name in folders:
        path = full.emergency_export()
        assert path.parent == folders[name]
        broken.add(name)
        path.unlink()
    with pytest.raises(
        StoreError,
        match=r"3 results can be written nowhere .*current: No space left.*home: No space",
    ):
        full.emergency_export()
    assert not any(list(folder.iterdir()) for folder in folders.values())


def test_results_on_a_disk_that_is_really_full(path: Path, tmp_path: Path) -> None:
    """A file system of a megabyte, where root may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], capture_output=True
    ).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        with silent():
            store = Store(folder / "s.sqlite")
            (folder / "filler").write_bytes(bytes(100 << 10))
            with pytest.raises(StoreError, match="results could not be kept"):
                store.check_persistent()
            added = [trial(i) for i in range(600)]
            assert all(store.add(each) for each in added)
            assert not store.persistent
            assert 0 < store.unsaved < 600
            found, _ = transfer.read(store.emergency_export(tmp_path))
            store.close()
        assert {*found, *there(folder / "s.sqlite")} == set(added)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


# Folders of groups and of other users, as root and as an ordinary user.

USER, GROUP = 54321, 54322
# All is imported first: another user may not be able to read the place where Python is installed.
AS_USER = f"""{BARE}
import os, warnings
from pathlib import Path
import filelock
from outblas.autotune.store import listing, places, salvage
from outblas.autotune.store.store import Store, StoreError
from outblas.autotune.store.transfer import read
warnings.simplefilter("ignore")
umask, uid, path = int(sys.argv[1], 8), int(sys.argv[2]), sys.argv[3]
(trial,), _ = read(Path(sys.argv[4]))
if uid:
    os.setgroups([])
    os.setgid({GROUP})
    os.setuid(uid)
os.umask(umask)
with Store(Path(path)) as store:
    try:
        store.check_persistent()
    except StoreError as error:
        print(error)
        sys.exit(3)
    print(store.persistent, store.add(trial), store.warning)
"""


def as_user(path, *, uid=0, umask=0o002, number=0):
    """Whether a process of this user, who adds a trial to a store, can keep it, and what
    it says.
    """
    file = Path(os.environ["OUTBLAS_CACHE_DIR"]) / f"{number}.json"
    transfer.export([trial(number)], [], file)
    command = [sys.executable, "-c", AS_USER, oct(umask), str(uid), str(path), str(file)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode in (0, 3), run.stderr
    return run.returncode == 0, run.stdout


@pytest.fixture
def open_folder():
    """A folder that every user can reach, as those of pytest are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(params=["as this user", "as an ordinary user"])
def user(request: pytest.FixtureRequest, open_folder):
    """The id of a user to be, and a folder of his."""
    folder = open_folder / "his"
    folder.mkdir()
    if request.param == "as this user":
        return 0, folder
    if os.getuid() != 0:
        pytest.skip("only root can be another")
    os.chown(folder, USER, GROUP)
    return USER, folder


@pytest.mark.parametrize("mode", [0o700, 0o775, 0o2775])
def test_a_store_in_a_folder_that_a_group_can_write_keeps_results(user, mode: int) -> None:
    uid, folder = user
    folder.chmod(mode)
    for number, path in enumerate(
        [folder / "s.sqlite", folder / "made" / "by it" / "s.sqlite"] * 2
    ):
        assert as_user(path, uid=uid, number=number) == (True, "True True None\n")
    with Store(folder / "s.sqlite", read_only=True) as store:
        assert store.trials() == [trial(0), trial(2)]


def test_a_folder_that_anybody_can_write_is_refused(user) -> None:
    uid, folder = user
    folder.chmod(0o777)
    kept, said = as_user(folder / "s.sqlite", uid=uid)
    assert not kept
    assert re.search(r"his can be written by others; .* lost when the process ends", said)
    assert not list(folder.iterdir())


def test_a_sticky_folder_of_all_takes_a_store_of_ones_own_only(user) -> None:
    uid, folder = user
    folder.chmod(0o1777)
    path = folder / "s.sqlite"
    assert as_user(path, uid=uid) == (True, "True True None\n")
    if os.getuid() == 0:
        for each in folder.glob("s.sqlite*"):
            os.chown(each, USER + 1, GROUP)
        kept, said = as_user(path, uid=uid, number=1)
        assert not kept
        assert "belongs to another user, in a folder that can be written by others" in said


def test_members_of_a_group_share_a_store(open_folder) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can be others")
    folder = open_folder / "shared"
    folder.mkdir()
    os.chown(folder, 0, GROUP)
    folder.chmod(0o2775)
    path = folder / "s.sqlite"
    assert as_user(path, uid=USER)[0]
    for each in folder.glob("s.sqlite*"):
        each.chmod(0o664)
    assert as_user(path, uid=USER + 1, number=1) == (True, "True True None\n")
    assert len(there(path)) == 2


def test_a_folder_that_cannot_be_looked_into(open_folder) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can be another")
    folder = open_folder / "roots"
    folder.mkdir(mode=0o700)
    kept, said = as_user(folder / "s.sqlite", uid=USER)
    assert not kept
    assert "Permission denied" in said


def test_a_read_only_file_is_said_before_anything_is_measured(user) -> None:
    uid, folder = user
    if uid == 0 and os.getuid() == 0:
        pytest.skip("root writes in spite of modes")
    path = folder / "s.sqlite"
    assert as_user(path, uid=uid)[0]
    path.chmod(0o444)
    kept, said = as_user(path, uid=uid, number=1)
    assert not kept
    assert "readonly" in said


def test_a_link_to_a_store_has_its_log_beside_the_file(path: Path, tmp_path: Path) -> None:
    fill(path, 1)
    link = tmp_path / "link.sqlite"
    link.symlink_to(path)
    with Store(link) as store, Store(path, read_only=True) as reader:
        assert store.path == path
        assert store.add(trial(1))
        assert reader.trials() == [trial(0), trial(1)]


# Network file systems.


def test_a_store_on_a_network_file_system_is_warned_about_once(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"22 1 0:40 / {tmp_path} rw - nfs server:/ rw\n")
    monkeypatch.setattr(filesystems, "_MOUNTS", mounts)
    places._warn_of_network.cache_clear()
    with pytest.warns(UserWarning, match=r"is on a network file system \(nfs\)") as said:
        stores = [Store(path) for _ in range(3)]
    assert len(said) == 1
    for store in stores:
        assert store.add(trial(), replace=True)
        assert store.warning is None
        assert store.persistent
        store.close()
    places._warn_of_network.cache_clear()


def test_json_of_an_emergency_export_can_be_read_by_others(full, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in full.emergency_export(tmp_path).read_text().splitlines()]
    assert [next(iter(line)) for line in lines] == [
        "format",
        "gpu",
        "trial",
        "trial",
        "winner",
        "end",
    ]


def test_an_added_table_does_not_harm(path: Path) -> None:
    """As of a check that was killed between its two steps."""
    fill(path)
    sql(path, "CREATE TABLE probe (content)", "INSERT INTO probe VALUES (zeroblob(1000))")
    with Store(path) as store:
        store.check_persistent()
        assert len(store.trials()) == 3
        assert store.verify() == []

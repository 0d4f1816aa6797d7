"""Results that a store's file could not take, in a file elsewhere."""

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.disks import refusing
from support.stored import kept, silent, trial, winner

from outblas.autotune.store import places, transfer
from outblas.autotune.store.store import Store, StoreError


@pytest.fixture
def full(path: Path) -> Iterator[Store]:
    """A store of three trials and a winner, of which the disk has one trial."""
    with silent():
        store = Store(path)
        store.add(trial(0))
        with refusing("database or disk is full"):
            for each in (trial(1), trial(2)):
                store.add(each)
            store.record_best(winner())
            yield store
            store.close()


def test_an_export_has_what_the_file_lacks(full: Store, tmp_path: Path) -> None:
    found = full.emergency_export(tmp_path)

    assert found.parent == tmp_path
    assert transfer.read(found) == ([trial(1), trial(2)], [winner()])


def test_an_export_overwrites_none_before(full: Store, tmp_path: Path) -> None:
    first, second = full.emergency_export(tmp_path), full.emergency_export(tmp_path)

    assert first != second
    assert transfer.read(first) == transfer.read(second)


def test_an_export_saves_nothing_in_the_store(full: Store, tmp_path: Path) -> None:
    full.emergency_export(tmp_path)

    assert full.unsaved == 3
    assert not full.persistent


def test_what_was_exported_is_not_said_to_be_lost(full: Store, tmp_path: Path) -> None:
    full.emergency_export(tmp_path)
    full.add(trial(3))

    with pytest.warns(UserWarning, match="the last 1 results are lost"):
        full.close()


def test_an_export_is_lines_of_json(full: Store, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in full.emergency_export(tmp_path).read_text().splitlines()]

    kinds = [next(iter(line)) for line in lines]
    assert kinds == ["format", "gpu", "trial", "trial", "winner", "end"]


class Folders:
    """The current folder, the user's home and the folder for temporary files, and which of them
    are `broken`: nothing can be written there.
    """

    def __init__(self, root: Path) -> None:
        self.paths = {name: root / name for name in ("current", "home", "temporary")}
        self.broken: set[str] = set()
        for folder in self.paths.values():
            folder.mkdir()


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    """Folders for exports, none of them broken."""
    found = Folders(tmp_path)
    monkeypatch.chdir(found.paths["current"])
    monkeypatch.setenv("HOME", str(found.paths["home"]))
    monkeypatch.setattr(places.tempfile, "tempdir", str(found.paths["temporary"]))
    write = transfer.exports.write

    def write_unless_broken(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.parent.name in found.broken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *arguments, **options)

    monkeypatch.setattr(transfer.exports, "write", write_unless_broken)
    return found


@pytest.mark.parametrize(
    ("broken", "folder"),
    [
        pytest.param((), "current", id="the current folder"),
        pytest.param(("current",), "home", id="then the home"),
        pytest.param(("current", "home"), "temporary", id="then that of temporary files"),
    ],
)
def test_an_export_goes_to_the_first_folder_that_can_be_written(
    full: Store, folders: Folders, broken: tuple[str, ...], folder: str
) -> None:
    folders.broken |= set(broken)

    found = full.emergency_export()

    assert found.parent == folders.paths[folder]


def test_where_nothing_can_be_written_every_folder_is_named(full: Store, folders: Folders) -> None:
    folders.broken |= set(folders.paths)

    message = r"3 results could not be written anywhere .*current: No space left.*home: No space"
    with pytest.raises(StoreError, match=message):
        full.emergency_export()

    assert not any(list(folder.iterdir()) for folder in folders.paths.values())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB, where root may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount: list[str | Path] = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_nothing_is_lost_on_a_disk_that_is_really_full(small_disk: Path, tmp_path: Path) -> None:
    path, added = small_disk / "s.sqlite", [trial(i) for i in range(250)]
    with silent(), Store(path) as store:
        (small_disk / "filler").write_bytes(bytes(200 << 10))
        with pytest.raises(StoreError, match="results could not be kept"):
            store.check_persistent()

        assert all(store.add(each) for each in added)

        assert not store.persistent
        assert 0 < store.unsaved < len(added)
        found, _ = transfer.read(store.emergency_export(tmp_path))
    assert {*found, *kept(path, read_only=True)} == {*added}

"""Disks that are full, that refuse to write, and that damage what they keep, as a store meets
them.
"""

import contextlib
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outblas.autotune.store import sqlite
from outblas.autotune.store.store import Store

PAGE = 4096  # bytes of a store's file, of which the first page has the header and the tables' names


def leave_room(store: Store, pages: int = 0, *, compact: bool = False) -> None:
    """Has the disk full once a store's file has grown by so many pages; `compact`: those that it
    has not filled yet are given back first.

    SQLite's own limit on a connection raises the error of a full disk.
    """
    connection = store._file
    assert connection, "the store has no file"
    with store._mutex:
        if compact:
            connection.execute("VACUUM")
        used = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {used + pages}")


@contextlib.contextmanager
def refusing(message: str) -> Iterator[None]:
    """Whatever is written to a file meanwhile fails with this message of SQLite."""
    at_once = sqlite.at_once

    def refuse(connection: sqlite3.Connection, operations: Any) -> Any:
        if connection.execute("PRAGMA database_list").fetchone()["file"]:
            raise sqlite3.OperationalError(message)
        return at_once(connection, operations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite, "at_once", refuse)
        yield


@contextlib.contextmanager
def seeming_damaged() -> Iterator[None]:
    """The first write to a file meanwhile finds it malformed, which it is not or no longer."""
    at_once, told = sqlite.at_once, False

    def find_it_malformed(connection: sqlite3.Connection, operations: Any) -> Any:
        nonlocal told
        if not told and connection.execute("PRAGMA database_list").fetchone()["file"]:
            told = True
            raise sqlite3.DatabaseError("database disk image is malformed")
        return at_once(connection, operations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite, "at_once", find_it_malformed)
        yield
    assert told, "nothing was written"


@contextlib.contextmanager
def mounted_read_only() -> Iterator[None]:
    """SQLite can open files only for reading meanwhile."""
    connect = sqlite3.connect

    def for_reading(database: Any, *arguments: Any, **options: Any) -> sqlite3.Connection:
        return connect(str(database).replace("mode=rwc", "mode=ro"), *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", for_reading)
        yield


@contextlib.contextmanager
def unwritable(path: Path) -> Iterator[None]:
    """A file or folder that this user cannot change.

    Root may write in spite of modes, but not to what has the attribute i; not every file system
    knows it, and the test is skipped where it does not.
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


def overwrite(path: Path) -> None:
    """Puts garbage in place of all pages of a file but the first."""
    with path.open("r+b") as file:
        file.seek(PAGE)
        file.write(os.urandom(path.stat().st_size - PAGE))


def snapshot(path: Path) -> dict[Path, tuple[int, bytes | None]]:
    """When what lies in a store's folder was changed, and what it holds."""
    return {
        found: (found.stat().st_mtime_ns, found.read_bytes() if found.is_file() else None)
        for found in path.parent.rglob("*")
    }

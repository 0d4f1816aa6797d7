"""SQLite files: opened for writing or without a trace, found sound or damaged, set aside, copied to memory."""

import contextlib
import datetime
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import forks
from .rows import SCHEMA, Operation

State = tuple[int, ...] | None

VERSION = 1
APPLICATION = 0x6F757462  # "outb", in the header of the file
BUSY_SECONDS = 30.0  # to wait for what other processes write
ATTEMPTS = 3  # at a file that others write to meanwhile

# SQLite's locks are the process's: closing a descriptor that SQLite does not count, as that of an immutable file, drops
# those of every connection to the file. `reader` closes such descriptors, so that no file is opened beside it.
opening = forks.Lock()


class StoreError(RuntimeError):
    """A store that cannot be used as asked: of a newer version, another program's, for reading only, closed."""


def writer(path: Path) -> sqlite3.Connection:
    """The file, made where there is none. Raises StoreError for what is not ours, sqlite3.Error and OSError.

    Only under `opening`, and one process at a time.
    """
    with contextlib.suppress(OSError, sqlite3.Error):
        reader(path).close()  # refuses a newer version's file before anything touches it
    connection = _connection(f"{path.as_uri()}?mode=rwc")
    try:
        there = _examine(connection, path)
        try:
            at_once(connection, [_create])  # a disk that cannot be written says so now
        except sqlite3.OperationalError as error:
            if not there or "locked" not in str(error):
                raise
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection


def reader(path: Path) -> sqlite3.Connection:
    """The file for reading, with no trace left beside it: a copy in memory while no one has it open; empty if there is
    none. Raises as `writer`.

    Only under `opening`.
    """
    for _ in range(ATTEMPTS):
        before = state(path)
        if before is None:
            return empty()
        if beside(path, "-wal").exists():
            with contextlib.suppress(sqlite3.OperationalError):  # in a folder that cannot be written
                return _sound(_connection(f"{path.as_uri()}?mode=ro"), path)
        try:
            found = _snapshot(path)
        except sqlite3.DatabaseError:
            if state(path) == before:
                raise
            continue
        if state(path) == before:
            return found
        found.close()
    raise sqlite3.OperationalError("it is written to all the time")


def empty() -> sqlite3.Connection:
    """A store in memory."""
    memory = _connection(":memory:")
    _create(memory)
    return memory


def copy(source: sqlite3.Connection) -> sqlite3.Connection:
    """What can be read, in memory."""
    memory = empty()
    for table in SCHEMA:
        with contextlib.suppress(sqlite3.Error):
            rows = source.execute(f"SELECT * FROM {table}")
            places = ", ".join("?" * len(rows.description))
            for row in rows:
                with contextlib.suppress(UnicodeError):
                    memory.execute(f"INSERT INTO {table} VALUES ({places})", row)
    return memory


def set_aside(path: Path) -> Path:
    """Renames the file and what SQLite has beside it; returns the name. Raises OSError. As `writer`, one at a time."""
    target = _unused(path)
    while target.exists():
        target = _unused(path)
    for suffix in ("-wal", "-shm", ""):  # the file last: until it is gone, it is found damaged again
        with contextlib.suppress(FileNotFoundError):
            beside(path, suffix).rename(beside(target, suffix))
    return target


def _unused(path: Path) -> Path:
    return beside(path, datetime.datetime.now(datetime.UTC).strftime(".corrupt-%Y%m%dT%H%M%S.%fZ"))


def is_damage(error: sqlite3.Error) -> bool:
    """Malformed, or no database; SQLite's module has subclasses for all else."""
    return type(error) is sqlite3.DatabaseError


def state(path: Path) -> State:
    """Changes when the file is replaced (the first two numbers) or written to, is opened by the first or closed by the
    last. None: there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, beside(path, "-wal").exists()


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def at_once(connection: sqlite3.Connection, operations: Sequence[Operation[Any]]) -> Any:
    """Runs all in one transaction; returns what the last returned."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        results = [operation(connection) for operation in operations]
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        raise
    return results[-1]


def _connection(uri: str) -> sqlite3.Connection:
    of_file = uri.startswith("file:")
    connection = sqlite3.connect(uri, uri=of_file, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    connection.text_factory = _decoded
    return connection


def _decoded(data: bytes) -> str:
    """What is no UTF-8 spoils its row, and not the query."""
    return data.decode("utf-8", "surrogateescape")


def _snapshot(path: Path) -> sqlite3.Connection:
    """A copy in memory. Raises whatever it likes if the file is written to meanwhile."""
    memory = _connection(":memory:")
    try:
        with contextlib.closing(_connection(f"{path.as_uri()}?mode=ro&immutable=1")) as source:
            source.backup(memory)
    except BaseException:
        memory.close()
        raise
    return _sound(memory, path)


def _sound(connection: sqlite3.Connection, path: Path) -> sqlite3.Connection:
    """The connection; an empty store if it has no tables yet. Closes it where it raises."""
    there = False
    try:
        there = _examine(connection, path)
    finally:
        if not there:
            connection.close()
    return connection if there else empty()


def _examine(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether there are tables. Raises StoreError for what is not ours, DatabaseError for what is damaged."""
    version, application, page = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "application_id", "page_size")
    )
    schema = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall())
    if version > VERSION and application in (0, APPLICATION):
        raise StoreError(f"{path} is of version {version}, expected {VERSION}: it takes a newer outblas")
    if application != APPLICATION and (schema or version or application):
        raise StoreError(f"{path} is a database of another program")
    log = beside(path, "-wal")
    if path.stat().st_size % page and not (log.exists() and log.stat().st_size):
        raise sqlite3.DatabaseError("its last page is cut off")
    if not schema and not version:
        return False
    found = [row[0] for row in connection.execute("PRAGMA quick_check(1)")]
    if found != ["ok"]:
        raise sqlite3.DatabaseError(" ".join(str(found[0]).split()))
    if any(schema.get(table) != statement for table, statement in SCHEMA.items()):
        raise sqlite3.DatabaseError("it lacks tables or columns")
    return True


def _create(connection: sqlite3.Connection) -> None:
    """Makes the tables unless they are there, and writes in any case."""
    if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        for statement in SCHEMA.values():
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute(f"PRAGMA user_version = {VERSION}")

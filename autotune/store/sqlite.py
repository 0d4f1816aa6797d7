"""SQLite files: opening them for writing, reading them without a trace, checking, migrating,
setting aside and copying them.

Opening a file looks at its header and at the names of its tables and columns, so it takes the same
time for a million rows as for none. Damage elsewhere is found when it is read, or by `integrity`.
"""

import contextlib
import datetime
import errno
import os
import shutil
import sqlite3
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from ...core import cache, forks, ownership
from ...core.ownership import shown
from . import queries, salvage
from .migrations import VERSION, migrate, show_as_newest, version_of
from .queries import INDEXES, SCHEMA, Operation

T = TypeVar("T")
State = tuple[int, ...] | None

NAME = "tuning.sqlite"  # of the store in the cache directory
MAGIC = b"SQLite format 3\0"
APPLICATION = 0x6F757462  # "outb", in the header of the file
_APPLICATION_PLACE = slice(68, 72)  # of the header
EXPECTED = "expected a file of tuning results that outblas wrote, or a name that nothing has"
BUSY_SECONDS = 30.0  # to wait for writes of other processes
COPY = ".before-migration"  # suffix of the copy of a file during its migration
# Limit for repairing a truncated file, whose header may give a damaged length.
MOST_GROWTH = 1000
ATTEMPTS = 3  # to read a file while others write to it
HEADER = 100  # bytes of a file's header
USUAL_PAGE = 4096  # bytes

# A process holds SQLite's locks as a whole: closing a descriptor that SQLite does not count, such
# as that of an immutable file, drops the locks of every connection to the file. `read` closes such
# descriptors, so no file may be opened at the same time.
opening = forks.Lock()


class StoreError(RuntimeError):
    """An error for a store that cannot be used as asked.

    Its file is of a newer version, or is none that outblas wrote; it is closed, it was opened for
    reading only, or it cannot be written.

    Example:
        >>> from pathlib import Path
        >>> from outblas.autotune import Store, StoreError
        >>> store = Store(Path("tuning.sqlite"))
        >>> store.close()
        >>> try:
        ...     store.winners()
        ... except StoreError as error:
        ...     print(error)
        /.../tuning.sqlite is closed
    """


class _Connection(sqlite3.Connection):
    """A connection. `inode`: the device and the inode of a file that it has open for writing."""

    inode: State = None

    def close(self) -> None:
        super().close()
        self.inode = None


_writers: weakref.WeakSet[_Connection] = weakref.WeakSet()


def check(path: Path) -> None:
    """Raises StoreError for what is at `path` and is no store; leaves it as it is.

    A store is a regular file that has the application id of outblas in SQLite's header. In the
    cache directory, a file of the default name is one that was damaged beyond recognition. An empty
    file is one where a process of outblas was stopped while it created it.
    """
    with opening:
        try:
            status = os.stat(path)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _refusal(path, "a loop of links") from None
            return  # nothing is there, or nobody can say what
        if not stat.S_ISREG(status.st_mode):
            raise _refusal(path, ownership.kind_of(status.st_mode))
        if (status.st_dev, status.st_ino) in {each.inode for each in _writers}:
            return  # it was checked, and closing it would drop the locks of that connection
        try:
            header = ownership.read_regular(path, HEADER, cut=True)
        except PermissionError:
            return  # SQLite cannot open it either
        except (OSError, ValueError) as error:
            raise _refusal(path, f"which cannot be read: {error}") from None
        if header.startswith(MAGIC):
            if header[_APPLICATION_PLACE] != APPLICATION.to_bytes(4, "big"):
                raise _refusal(path, "a database of another program")
        elif not (_is_default(path) or (not header and beside(path, ".lock").exists())):
            raise _refusal(path, "which is no database" if header else "an empty file")


def _refusal(path: Path, what: str) -> StoreError:
    return StoreError(f"store is '{shown(path)}', {what}, {EXPECTED}")


def _is_default(path: Path) -> bool:
    try:
        folder = cache.directory()
    except ValueError:
        return False
    return path.name == NAME and os.path.realpath(path.parent) == os.path.realpath(folder)


def writer(path: Path) -> sqlite3.Connection:
    """Returns a connection to the file, which is created if it is missing, and migrated if it is of
    an older version.

    Raises the errors of `check`, sqlite3.Error and OSError. Call it only
    under `opening`, and in one process at a time.
    """
    with contextlib.suppress(sqlite3.Error):
        # Refuses a newer version's file before anything modifies it.
        read(path, lambda connection: None)
    connection = _connection(f"{path.as_uri()}?mode=rwc")
    try:
        version = _examine(connection, path)
        try:
            if 0 < version < VERSION:
                _migrate(connection, path)
            at_once(connection, [_create])  # fails now if the disk cannot be written
        except sqlite3.OperationalError as error:
            if "readonly" in str(error) and _is_of_a_later_format(path):
                raise sqlite3.DatabaseError("its header marks it as read-only") from error
            if version != VERSION or "locked" not in str(error):
                raise
        beside(path, COPY).unlink(missing_ok=True)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        # SQLite creates its log at the first access, and `read` uses the log to tell whether the
        # file is open.
        version_of(connection)
    except BaseException:
        connection.close()
        raise
    if file := state(path):
        connection.inode = file[:2]
        _writers.add(connection)
    return connection


def _is_of_a_later_format(path: Path) -> bool:
    """Returns whether the header names a format that SQLite can read but not write, which outblas's
    files never have. Call it only for a file that nobody can write, because closing the file drops
    the locks of this process.
    """
    try:
        with path.open("rb") as file:
            return file.read(HEADER)[18:19] not in (b"", b"\1", b"\2")
    except OSError:
        return False


def read(path: Path, operation: Operation[T]) -> T:
    """Returns what the operation finds in the file, or in an empty store if there is none. Leaves
    no trace beside the file.

    While nobody has the file open, it is read in place without a lock; if somebody wrote to it
    meanwhile, the operation runs again. Raises the errors of `writer`.
    """
    with opening:
        for _ in range(ATTEMPTS):
            check(path)
            before = state(path)
            if before is None:
                return _in_nothing(operation)
            connection = _shared(path) if beside(path, "-wal").exists() else None
            if connection is not None:
                with contextlib.closing(connection):
                    return operation(connection)
            try:
                with contextlib.closing(
                    _connection(f"{path.as_uri()}?mode=ro&immutable=1")
                ) as connection:
                    found = (
                        operation(connection)
                        if _ready_to_read(connection, path)
                        else _in_nothing(operation)
                    )
            except sqlite3.DatabaseError:
                if state(path) == before:
                    raise
                continue
            if state(path) == before:
                return found
        raise sqlite3.OperationalError("other processes write to it all the time")


def _in_nothing(operation: Operation[T]) -> T:
    with contextlib.closing(empty()) as nothing:
        return operation(nothing)


def _shared(path: Path) -> sqlite3.Connection | None:
    """Returns a connection for reading concurrently with writers; None if there are no tables yet,
    or in a folder that cannot be written.
    """
    connection = _connection(f"{path.as_uri()}?mode=ro")
    there = 0
    try:
        there = _ready_to_read(connection, path)
    except sqlite3.OperationalError:
        pass
    finally:
        if not there:
            connection.close()
    return connection if there else None


def _ready_to_read(connection: sqlite3.Connection, path: Path) -> int:
    """Does what `_examine` does, and makes tables of an older version look like those of the
    newest.
    """
    version = _examine(connection, path)
    if 0 < version < VERSION:
        show_as_newest(connection)
    return version


def empty() -> sqlite3.Connection:
    """Returns an empty store in memory."""
    memory = _connection(":memory:")
    _create(memory)
    return memory


def copy(source: sqlite3.Connection) -> sqlite3.Connection:
    """Returns a copy in memory of what can be read."""
    memory = empty()
    at_once(memory, [lambda target: salvage.carry(source, target)])
    return memory


def integrity(connection: sqlite3.Connection) -> list[str]:
    """Returns what a full check finds wrong with the file; empty for a sound one. Reads the whole
    file.
    """
    lines = [str(row[0]) for row in connection.execute("PRAGMA integrity_check")]
    return [line for line in lines if line != "ok"]


def is_sound(path: Path) -> bool:
    """Returns whether a full check finds nothing wrong with the file."""
    try:
        return read(path, integrity) == []
    except sqlite3.Error:
        return False


def move(path: Path, target: Path) -> None:
    """Renames a file and SQLite's files beside it, as far as they exist. Raises OSError. The
    conditions of `writer` apply.
    """
    # the file itself last: until it is gone, it is found to be damaged again
    for log in ("-wal", "-shm", ""):
        with contextlib.suppress(FileNotFoundError):
            beside(path, log).rename(beside(target, log))


def unused_name(path: Path) -> Path:
    """Returns a new name for a damaged file: its name with the date."""
    while True:
        target = beside(
            path, datetime.datetime.now(datetime.UTC).strftime(".corrupt-%Y%m%dT%H%M%S.%fZ")
        )
        if not target.exists():
            return target


def is_damage(error: sqlite3.Error) -> bool:
    """Returns whether an error means damage: a malformed file, no database, or a format that SQLite
    never wrote. sqlite3 has subclasses for all other errors.
    """
    return type(error) is sqlite3.DatabaseError or "unsupported file format" in str(error)


def state(path: Path) -> State:
    """Returns a value that changes when the file is replaced (its first two numbers) or written to,
    opened for the first time or closed for the last. None: there is no file.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (
        found.st_dev,
        found.st_ino,
        found.st_size,
        found.st_mtime_ns,
        beside(path, "-wal").exists(),
    )


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def at_once(connection: sqlite3.Connection, operations: Sequence[Operation[Any]]) -> Any:
    """Runs all operations in one transaction; returns what the last one returned."""
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


def for_salvage(path: Path) -> sqlite3.Connection:
    """Opens a file that was set aside, with its log if there is one, without changing it. Raises
    OSError and sqlite3.Error.
    """
    if beside(path, "-wal").exists():
        connection = _connection(f"{path.as_uri()}?mode=ro")
        with contextlib.suppress(sqlite3.Error):
            version_of(connection)  # fails where the log cannot be read
            return connection
        connection.close()
    whole = _repaired(path)
    connection = _connection(f"{(whole or path).as_uri()}?mode=ro&immutable=1")
    if whole:
        with contextlib.suppress(sqlite3.Error):
            version_of(connection)  # opens the file, which needs no name afterwards
        with contextlib.suppress(OSError):
            whole.unlink()
    return connection


def _repaired(path: Path) -> Path | None:
    """Returns a copy of a file with a readable header and whole pages; None for a file that has
    both already.
    """
    with path.open("rb") as file:
        header = file.read(HEADER)
    if len(header) < HEADER:
        return None
    repaired = _with_constants(header)
    size, wanted = path.stat().st_size, _size_in_whole_pages(repaired, path.stat().st_size)
    if repaired == header and wanted == size:
        return None
    target = beside(path, ".whole")
    try:
        shutil.copyfile(path, target)
        page = _page_size(repaired)
        os.truncate(target, size - size % page)
        os.truncate(target, wanted)
        with target.open("r+b") as file:
            file.write(repaired)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return target


def _with_constants(header: bytes) -> bytes:
    """Returns a header in which every field that is the same in all stores has its value according
    to SQLite's file format. If one of them is wrong, SQLite reads nothing of the file.
    """
    found = bytearray(header)
    found[:16] = MAGIC
    if (size := _page_size(header)) < 512 or size & (size - 1):
        found[16:18] = USUAL_PAGE.to_bytes(2, "big")
    # There is no log, or it would have been read.
    if not (header[18] in (1, 2) and header[19] in (1, 2)):
        found[18:20] = b"\1\1"
    found[20:24] = bytes((0, 64, 32, 32))
    found[44:48] = (4).to_bytes(4, "big")  # the format of the schema
    found[56:60] = (1).to_bytes(4, "big")  # UTF-8
    return bytes(found)


def _page_size(header: bytes) -> int:
    size = int.from_bytes(header[16:18], "big")
    return 1 << 16 if size == 1 else size


def _size_in_whole_pages(header: bytes, size: int) -> int:
    """Returns the length of a file after padding with zeros to whole pages and to the length in its
    header. SQLite reads nothing of a file that is shorter than its header says; it would read the
    missing part of a page as zeros, and so return wrong values.
    """
    page = _page_size(header)
    expected = page * int.from_bytes(header[28:32], "big")
    if size % page == 0 and not size < expected <= MOST_GROWTH * size:
        return size
    return max(expected if expected <= MOST_GROWTH * size else 0, size + page - size % page)


def _connection(uri: str) -> _Connection:
    connection: _Connection = sqlite3.connect(
        uri,
        uri=uri.startswith("file:"),
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
        factory=_Connection,
    )
    connection.row_factory = sqlite3.Row
    connection.text_factory = _decoded
    return connection


def _decoded(data: bytes) -> str:
    """Decodes text so that invalid UTF-8 spoils only its row, not the query."""
    return data.decode("utf-8", "surrogateescape")


def _examine(connection: sqlite3.Connection, path: Path) -> int:
    """Returns the version of the tables, 0 if there are none yet, from the header, the names of
    tables and columns and the size of the file. Raises StoreError for files of a newer version,
    DatabaseError for damaged ones.
    """
    version = version_of(connection)
    page = connection.execute("PRAGMA page_size").fetchone()[0]
    tables = {
        row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    }
    if version > VERSION:
        raise StoreError(
            f"{path} is of version {version}, expected {VERSION}: a newer outblas wrote it"
        )
    found, log = state(path), beside(path, "-wal")
    if found and found[2] % page and not (log.exists() and log.stat().st_size):
        raise sqlite3.DatabaseError("its last page is cut off")
    if not tables and not version:
        return 0
    if missing := queries.lacking(connection, new=version == VERSION):
        raise sqlite3.DatabaseError(missing)
    return max(version, 1)


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Migrates the tables to the newest version, with a copy of the file beside it until that is
    done.
    """
    kept = beside(path, COPY)
    kept.unlink(missing_ok=True)
    try:
        with contextlib.closing(sqlite3.connect(kept)) as target:
            with contextlib.suppress(OSError):
                shutil.copymode(path, kept)
            connection.backup(target)
    except BaseException:
        kept.unlink(missing_ok=True)
        raise
    at_once(connection, [migrate])


def _create(connection: sqlite3.Connection) -> None:
    """Creates the tables and indexes unless they exist; writes to the file in any case."""
    there = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    for name, statement in {**SCHEMA, **INDEXES}.items():
        if name not in there:
            connection.execute(statement)
    if not there:
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute(f"PRAGMA user_version = {VERSION}")

"""One SQLite file for the processes of one machine: opening it, refusing what is not outblas's, and
transactions.

The file has a write-ahead log and is synchronous, so that a transaction is on disk once it has
ended, and one that a killed process or a full disk ended is not there at all. Beside the file there
are only SQLite's own `-wal` and `-shm`, which need the memory of one machine: processes of several
machines must not open one file.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import sqlite3
import stat
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self, TypeVar

from outblas.base import cache, forks, ownership
from outblas.base.filesystems import network_filesystem
from outblas.base.ownership import shown

try:
    import fcntl as fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")
Operation = Callable[[sqlite3.Connection], T]
Inode = tuple[int, int] | None

NAME = "tuning.sqlite"  # of the file in the cache directory
APPLICATION = 0x6F757462  # "outb", in the header of the file
VERSION = 7  # of the tables, in the header too
BUSY_SECONDS = 30.0  # to wait for writes of other processes
ATTEMPTS = 3  # to use a file that is damaged or replaced meanwhile
_MAGIC, _HEADER = b"SQLite format 3\0", 100  # bytes
_VERSION_PLACE, _APPLICATION_PLACE = slice(60, 64), slice(68, 72)  # in the header

# A process holds SQLite's locks on a file as a whole: closing a descriptor that SQLite does not
# count drops the locks of all its connections. Nobody opens a file while such a one is open.
_opening = forks.Lock()


class StoreError(RuntimeError):
    """An error for a store that cannot be used as asked.

    Its file is none that outblas wrote or is of another version, it is closed, it was opened for
    reading only, or it cannot be read or written.

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


def default_path() -> Path:
    """Returns the path of the store in the cache directory. Raises ValueError for a cache directory
    that cannot be used.
    """
    return cache.directory() / NAME


class Database:
    """A SQLite file with the tables of `schema`, which any number of threads may use.

    A damaged file is renamed, with a warning that names it, and a new one is begun. With
    `read_only` nothing is written, and a missing file is an empty one.
    """

    def __init__(self, path: Path | None, schema: Sequence[str], *, read_only: bool) -> None:
        path = default_path() if path is None else Path(path)
        self.path = Path(os.path.realpath(path))  # SQLite puts its log beside the file itself
        self.read_only = read_only
        self._schema = schema
        self._mutex = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._inode: Inode = None
        self._closed = False
        if read_only:
            check(self.path)
        else:
            self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. A closed store can neither be read nor written."""
        with self._mutex:
            self._closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def read(self, operation: Operation[T]) -> T:
        """Read the file as it is at one moment.

        Args:
            operation: Takes a connection, and returns what it reads.

        Returns:
            What the operation returned.

        Raises:
            StoreError: The store is closed or cannot be read.
        """
        return self._read_beside(operation) if self.read_only else self._run("BEGIN", operation)

    def write(self, operation: Operation[T]) -> T:
        """Write in one transaction, which is on disk when this returns.

        Args:
            operation: Takes a connection, and writes with it; it may run again.

        Returns:
            What the operation returned.

        Raises:
            StoreError: The store is closed, read-only or cannot be written. The file is as it was
                before.
        """
        self._check_writable()
        return self._run("BEGIN IMMEDIATE", operation)

    def _check_writable(self) -> None:
        """Raises StoreError for a store that is closed, or was opened for reading only."""
        self._check_open()
        if self.read_only:
            raise StoreError(f"{shown(self.path)} was opened for reading only")

    def _run(self, begin: str, operation: Operation[T]) -> T:
        with self._mutex:
            for _ in range(ATTEMPTS):
                self._check_open()
                if self._connection is None or self._is_replaced():
                    self._open()
                assert self._connection is not None
                try:
                    result = _transaction(self._connection, begin, operation)
                except sqlite3.DatabaseError as error:
                    if not _is_damage(error):
                        raise self._failure(error) from error
                    self._open(error)
                    continue
                if not self._is_replaced():
                    return result
        raise StoreError(f"{shown(self.path)} is replaced or damaged again and again")

    def _read_beside(self, operation: Operation[T]) -> T:
        """Reads the file without a trace: without locks, and again if somebody wrote meanwhile."""
        with self._mutex, _opening:
            self._check_open()
            for _ in range(ATTEMPTS):
                check(self.path)
                before = _state(self.path)
                if before is None:
                    return self._read_nothing(operation)
                in_use = before[-1]
                mode = "mode=ro" if in_use else "mode=ro&immutable=1"
                try:
                    with contextlib.closing(_connect(self.path, mode)) as connection:
                        if not _tables(connection):
                            return self._read_nothing(operation)
                        result = _transaction(connection, "BEGIN", operation)
                except sqlite3.DatabaseError as error:
                    if in_use or _state(self.path) == before:
                        raise self._failure(error) from error
                    continue
                if in_use or _state(self.path) == before:
                    return result
        raise StoreError(f"{shown(self.path)}: other processes write to it all the time")

    def _read_nothing(self, operation: Operation[T]) -> T:
        with contextlib.closing(_connect(None)) as empty:
            _create(empty, self._schema)
            return operation(empty)

    def _failure(self, error: sqlite3.Error) -> StoreError:
        return StoreError(
            f"{shown(self.path)}: {error}; nothing of this was written, and what the store had "
            "before is still there"
        )

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"{shown(self.path)} is closed")

    def _is_replaced(self) -> bool:
        """Returns whether the path no longer names the file that is open."""
        return _inode(self.path) != self._inode

    def _open(self, damage: sqlite3.Error | None = None) -> None:
        """Opens the file, or begins a new one in place of a damaged one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        folder = self.path.parent
        try:
            _check_folder(self.path)
            with _opening, _only_process(folder):
                check(self.path)
                if damage is not None and not self._is_replaced():
                    self._set_aside(damage)
                try:
                    self._connection = self._writer()
                except sqlite3.DatabaseError as error:
                    if not _is_damage(error):
                        raise
                    self._set_aside(error)
                    self._connection = self._writer()
                self._inode = _inode(self.path)
        except (OSError, sqlite3.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            raise StoreError(
                f"{shown(self.path)} cannot be opened for writing: {reason or error}"
            ) from error
        _open_files.add(self)
        _warn_of_network(folder)

    def _writer(self) -> sqlite3.Connection:
        connection = _connect(self.path, "mode=rwc")
        try:
            _transaction(connection, "BEGIN IMMEDIATE", lambda c: _create(c, self._schema))
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            _tables(connection)  # the log exists from the first access on
        except BaseException:
            connection.close()
            raise
        return connection

    def _set_aside(self, error: sqlite3.Error) -> None:
        """Renames the damaged file and its log. Runs in one process at a time."""
        date = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        target = _beside(self.path, f".damaged-{date}")
        for suffix in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                _beside(self.path, suffix).rename(_beside(target, suffix))
        warnings.warn(
            f"{shown(self.path)} is damaged ({error}): it was renamed to {shown(target.name)}, and "
            "a new store was begun",
            stacklevel=5,
        )


# The databases that are open for writing in this process.
_open_files: weakref.WeakSet[Database] = weakref.WeakSet()


def check(path: Path) -> None:
    """Raises StoreError for what is at `path` and is not a store of this version; leaves it as it
    is.

    A store is a regular file with the application id of outblas in SQLite's header, or an empty
    one. In the cache directory, a file of the default name is one that was damaged.
    """
    with _opening:
        try:
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                raise _refusal(path, ownership.kind_of(status.st_mode))
            inode = status.st_dev, status.st_ino
            if any(other._inode == inode and other._connection for other in _open_files):
                return  # it was checked, and closing it here would drop the locks on it
            header = ownership.read_regular(path, _HEADER, cut=True)
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, ValueError) as error:
            raise _refusal(path, f"which cannot be read: {error}") from None
    if header.startswith(_MAGIC):
        if header[_APPLICATION_PLACE] != APPLICATION.to_bytes(4, "big"):
            raise _refusal(path, "a database of another program")
        version = int.from_bytes(header[_VERSION_PLACE], "big")
        if version != VERSION:
            raise _refusal(path, f"of version {version}, where this outblas has {VERSION}")
    elif header and not _is_default(path):
        raise _refusal(path, "which is no database")


def _refusal(path: Path, what: str) -> StoreError:
    return StoreError(
        f"store is '{shown(path)}', {what}, expected a file of tuning results that outblas wrote, "
        "or a name that nothing has"
    )


def _is_default(path: Path) -> bool:
    try:
        return path == Path(os.path.realpath(default_path()))
    except ValueError:
        return False


def _check_folder(path: Path) -> None:
    """Makes the folders of a store, with mode 0700. Raises StoreError where any user could replace
    the file; members of a group may share one, because it has no native code.
    """
    folder = path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not hasattr(os, "getuid"):
        return
    for part in (folder, *folder.parents):
        mode = part.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise StoreError(f"{shown(path)}: {shown(part)} can be written by others")
    in_public = folder.stat().st_mode & stat.S_IWOTH
    if in_public and path.exists() and path.lstat().st_uid != os.getuid():
        raise StoreError(
            f"{shown(path)} belongs to another user, in a folder that can be written by others"
        )


@functools.cache
def _warn_of_network(folder: Path) -> None:
    if kind := network_filesystem(folder):
        warnings.warn(
            f"{shown(folder)} is on a network file system ({kind}): processes of one machine can "
            "share a store there, processes of several machines cannot",
            stacklevel=6,
        )


@contextlib.contextmanager
def _only_process(folder: Path) -> Iterator[None]:
    """Keeps other processes from opening or renaming a store in this folder. The lock ends with its
    process, and makes no file.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without such locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _connect(path: Path | None, mode: str = "") -> sqlite3.Connection:
    """Connects to a file, or to an empty database in memory."""
    connection = sqlite3.connect(
        ":memory:" if path is None else f"{path.as_uri()}?{mode}",
        uri=path is not None,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.row_factory = sqlite3.Row
    return connection


def _create(connection: sqlite3.Connection, schema: Sequence[str]) -> None:
    if not _tables(connection):
        for statement in schema:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {VERSION}")


def _tables(connection: sqlite3.Connection) -> int:
    count: int = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    return count


def _transaction(connection: sqlite3.Connection, begin: str, operation: Operation[T]) -> T:
    connection.execute(begin)
    try:
        result = operation(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        raise
    return result


def _is_damage(error: sqlite3.Error) -> bool:
    """Returns whether the file is malformed or not SQLite's, or has a text that is not UTF-8. For
    other errors SQLite raises subclasses of DatabaseError.
    """
    return type(error) is sqlite3.DatabaseError or "decode to UTF-8" in str(error)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _inode(path: Path) -> Inode:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _state(path: Path) -> tuple[int, int, int, int, bool] | None:
    """Returns a value that changes when a file is replaced, written to, opened first or closed
    last; its last part says whether a process has the file open, or was killed with it.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    log = _beside(path, "-wal").exists()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, log

"""A SQLite file that keeps what is written to it despite damage, a full disk, or replacement by
another file.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from ...core import cache
from . import places, queries, salvage, sqlite
from .queries import Operation
from .records import BestConfig, Trial
from .sqlite import StoreError

T = TypeVar("T")
Record = Trial | BestConfig

# Seconds to wait for writes of other processes, once they have taken longer than
# `sqlite.BUSY_SECONDS`.
IMPATIENT_SECONDS = 1.0
ATTEMPTS = 3  # to read or write a file that is damaged or replaced meanwhile
BATCH = 64  # waiting operations that are written together
# Suffix of a damaged file's name until its readable rows have been copied to the fresh file.
SALVAGING = ".salvaging"


@dataclass(frozen=True)
class _Waiting:
    """An operation that the file lacks, and the identities of the results that it stores."""

    operation: Operation[Any]
    keys: frozenset[object]


class DurableFile:
    """The file of a store, and a copy in memory that replaces it while it cannot be written.

    `_read` and `_write` run operations on a connection. Written data is in the file when the call
    returns. While the disk refuses it, the data is kept in memory, and written with the next write
    that succeeds. A damaged file is set aside, and its readable rows are copied to a fresh one.
    Where no file can exist, all data lives in memory. With `read_only` nothing is written, and what
    cannot be read counts as empty.

    The object is in one of four states:

        _file   _memory
        yes     none      writes go to the file
        yes     yes       the file lags behind: operations wait, and are tried with each write
        none    yes       no file is possible; or the store is read-only and the file unreadable
        none    none      closed; or the store is read-only and reads the file each time

    Any number of threads may use it. Raises StoreError for a file of a newer version and for one
    that is no store; both are left unchanged.
    """

    def __init__(self, path: Path | None = None, *, read_only: bool = False) -> None:
        self.path = (cache.directory() / sqlite.NAME if path is None else Path(path)).absolute()
        if os.path.islink(self.path):  # SQLite puts its log beside the file itself
            self.path = Path(os.path.realpath(self.path))
        self.read_only = read_only
        self.warning: str | None = None
        self._mutex = threading.RLock()
        self._file: sqlite3.Connection | None = None
        self._memory: sqlite3.Connection | None = None
        self._waiting: list[_Waiting] = []  # operations that the file lacks
        self._unsaved: dict[object, Record] = {}  # the results among them, by identity
        self._exported: set[object] = set()  # the unsaved results that an emergency export contains
        self._opened: sqlite.State = None  # the file's state when it was opened
        # The state of a file that a full check found sound despite an error.
        self._checked: sqlite.State = None
        self._damage: sqlite3.Error | None = None  # why a file was set aside
        self._closed = False
        if read_only:
            self._read_beside(lambda connection: None, first=True)
        else:
            self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def in_memory(self) -> bool:
        """Whether the store currently works on a copy in memory."""
        return self._memory is not None

    @property
    def persistent(self) -> bool:
        """Whether a result that is added now is written to the file."""
        return self._file is not None and self._memory is None and not self._closed

    @property
    def unsaved(self) -> int:
        """The number of results that were added and are not in the file."""
        return len(self._unsaved)

    def check_persistent(self) -> None:
        """Check that the file can be written, by writing some pages and removing them.

        Raises:
            StoreError: It cannot: the disk is full, the file cannot be written, the store lives in
                memory, is closed, or was opened for reading only. The message has the reason.
        """
        with self._mutex:
            self._check_open()
            self._check_writable()
            try:
                written = self._try_to_write(queries.write_probe, queries.remove_probe)
            except sqlite3.DatabaseError as error:
                raise StoreError(f"{self.path}: {error}; results could not be kept") from None
            if written is None:
                raise StoreError(
                    self.warning or f"{self.path}: the file is replaced or damaged again and again"
                )

    def emergency_export(self, folder: Path | None = None) -> Path:
        """Write the results that are not in the file to a new export.

        Args:
            folder: Where to write it; None for the first that can be written of the current
                folder, the home folder and the one for temporary files.

        Returns:
            The path of the export, which `outblas cache import` reads.

        Raises:
            ValueError: Every result is in the file.
            StoreError: No file can be written, or the store is closed.
        """
        with self._mutex:
            self._check_open()
            if not self._unsaved:
                raise ValueError(
                    f"{self.path}: every result is in the file, expected some that are not"
                )
            path = places.emergency_export(list(self._unsaved.values()), folder)
            self._exported = set(self._unsaved)
            return path

    def close(self) -> None:
        """Write what is not in the file yet, if that is possible now, and close the store.

        It warns of results that are lost. A closed store cannot be read.
        """
        with self._mutex:
            if self._waiting and not self._closed:
                self._write(lambda connection: None)
            if lost := len(self._unsaved.keys() - self._exported):
                self._warn(f"{self.path} cannot be written, and the last {lost} results are lost")
            if not self._closed:
                self._before_closing()
            self._closed = True
            for connection in (self._file, self._memory):
                if connection is not None:
                    connection.close()
            self._file = self._memory = None
            self._waiting.clear()
            self._unsaved.clear()

    def _before_closing(self) -> None:
        """Runs last with the open file; overridden by subclasses."""

    def verify(self) -> list[str]:
        """Check all of the file.

        Returns:
            What is wrong with the file, and each row that is damaged; an empty list if nothing is.
        """
        with self._mutex:
            lines = self._read(sqlite.integrity)
            problems = self._read(queries.problems)
            said = [self.warning] if self.warning else []
            return said + [f"integrity: {line}" for line in lines] + problems

    # Reading.

    def _read(self, operation: Operation[T]) -> T:
        with self._mutex:
            self._check_open()
            if self.read_only:
                return self._read_beside(operation)
            for _ in range(ATTEMPTS):
                if self._file is not None and self._moved():
                    self._open()
                try:
                    return operation(self._current())
                except sqlite3.DatabaseError as error:
                    if self._memory is not None:
                        raise
                    self._recover(error)
            return operation(sqlite.empty())

    def _read_beside(self, operation: Operation[T], *, first: bool = False) -> T:
        """Reads the file in its current state without changing it. What cannot be read counts as
        empty until the file changes.
        """
        if self._memory is None or self._moved():
            self._memory = None
            self._opened = self._state_now()
            try:
                sqlite.check(self.path)
                if reason := places.unusable_reason(self.path, create=False):
                    raise sqlite3.OperationalError(reason)
                return sqlite.read(self.path, operation)
            except StoreError as error:
                if first:
                    raise
                self._cannot_read(error)
            except sqlite3.Error as error:
                self._cannot_read(error)
        assert self._memory is not None
        return operation(self._memory)

    def _cannot_read(self, error: Exception) -> None:
        self._memory = sqlite.empty()
        self._warn(f"{self.path} cannot be read: {error}")

    # Writing.

    def _write(self, operation: Operation[T], records: Iterable[Record] = ()) -> T:
        """Runs an operation, which stores these records if it returns a true value."""
        with self._mutex:
            self._check_open()
            self._check_writable()
            try:
                written = self._try_to_write(operation)
            except sqlite3.DatabaseError as error:
                self._fall_back(str(error))
            else:
                if written is not None:
                    return written[0]
                if self._file is not None:
                    self._fall_back("the file is replaced or damaged again and again")
            return self._keep(operation, records)

    def _keep(self, operation: Operation[T], records: Iterable[Record]) -> T:
        """Runs an operation in memory, and lets it wait for the file if there is one."""
        kept: T = sqlite.at_once(self._current(), [operation])
        added = {_key(record): record for record in records} if kept else {}
        if self._file is not None:
            self._waiting.append(_Waiting(operation, frozenset(added)))
        self._unsaved |= added
        self._exported -= added.keys()
        return kept

    def _try_to_write(self, operation: Operation[T], *following: Operation[Any]) -> tuple[T] | None:
        """Writes the waiting operations and this one in one transaction, then each of `following`
        in a separate one.

        A file that is damaged or replaced meanwhile is opened again, up to ATTEMPTS times. Returns
        what the operation returned, or None where there is no file to write to. Raises
        sqlite3.DatabaseError for any other failure, such as a full disk.
        """
        for _ in range(ATTEMPTS):
            if self._file is None:
                return None
            try:
                result = self._write_waiting(self._file, operation)
                for each in following:
                    sqlite.at_once(self._file, [each])
            except sqlite3.DatabaseError as error:
                if not self._moved() and not sqlite.is_damage(error):
                    raise
                self._open(None if self._moved() else error)
                continue
            if not self._moved():
                self._caught_up()
                return (result,)
            self._open()  # the file was replaced or deleted, together with the written data
        return None

    def _write_waiting(self, file: sqlite3.Connection, operation: Operation[T]) -> T:
        """Writes the waiting operations, and then this one. A full disk refuses the first batch
        already, however many operations wait.
        """
        while len(self._waiting) > BATCH:
            sqlite.at_once(file, [each.operation for each in self._waiting[:BATCH]])
            if self._moved():
                break  # everything is written again, to the new file
            del self._waiting[:BATCH]
            left = {key for each in self._waiting for key in each.keys}
            self._unsaved = {key: record for key, record in self._unsaved.items() if key in left}
        result: T = sqlite.at_once(file, [*(each.operation for each in self._waiting), operation])
        return result

    def _caught_up(self) -> None:
        """Drops the copy in memory, because the file now has all data."""
        self._waiting.clear()
        self._unsaved.clear()
        self._exported.clear()
        if self._memory is not None and self._file is not None:
            self._memory.close()
            self._memory = None
            self._file.execute(f"PRAGMA busy_timeout = {sqlite.BUSY_SECONDS * 1000:.0f}")

    def _fall_back(self, reason: str) -> None:
        """Continues in memory until a write to the file succeeds."""
        assert self._file is not None
        with contextlib.suppress(sqlite3.Error):
            self._file.execute(f"PRAGMA busy_timeout = {IMPATIENT_SECONDS * 1000:.0f}")
        if self._memory is None:
            self._memory = sqlite.copy(self._file)
            self._warn(
                f"{self.path}: {reason}; results are kept in memory, and written as soon as that "
                "can be done"
            )

    # The states of the file.

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self.path} is closed")

    def _check_writable(self) -> None:
        if self.read_only:
            raise StoreError(f"{self.path} was opened for reading only")

    def _current(self) -> sqlite3.Connection:
        """Returns the connection that has all data: memory, while the file lags behind."""
        found = self._memory or self._file
        assert found is not None
        return found

    def _state_now(self) -> sqlite.State:
        """Returns a value that identifies the file, and for a read-only store also its last
        write.
        """
        found = sqlite.state(self.path)
        return found if self.read_only or found is None else found[:2]

    def _moved(self) -> bool:
        """Returns whether the file that was opened has been replaced or deleted."""
        return self._state_now() != self._opened

    def _recover(self, error: sqlite3.DatabaseError) -> None:
        """Continues with another file, or in memory, after a read that failed."""
        if sqlite.is_damage(error):
            self._open(error)
        else:
            self._fall_back(str(error))

    def _open(self, damage: sqlite3.Error | None = None) -> None:
        """Opens the file, or a fresh one if it is damaged; continues in memory where no file is
        possible.
        """
        previous, self._file = self._file, None
        if previous is not None and damage is not None:
            previous.close()
            previous = None
        try:
            sqlite.check(self.path)
            if reason := places.unusable_reason(self.path):
                raise OSError(reason)
            with sqlite.opening:
                self._file = self._to_write(damage)
            places.warn_of_network(self.path)
        except StoreError as error:
            if previous is None and damage is None and self._memory is None:
                raise
            self._go_without(error, previous)
        except (OSError, sqlite3.Error) as error:
            self._go_without(error, previous)
        if previous is not None:
            previous.close()

    def _go_without(self, error: Exception, previous: sqlite3.Connection | None) -> None:
        """Continues permanently in memory, with the data that can be read. `previous` is a file
        that was moved away.
        """
        self._file = None
        if self._memory is None:
            with contextlib.suppress(OSError, sqlite3.Error, StoreError):
                if previous is not None:
                    self._memory = sqlite.copy(previous)
                elif not places.unusable_reason(self.path):
                    self._memory = sqlite.read(self.path, sqlite.copy)
        self._memory = self._memory or sqlite.empty()
        self._waiting.clear()
        self._warn(
            f"{self.path}: {error}; results are kept in memory, and lost when the process ends"
        )

    def _to_write(self, damage: sqlite3.Error | None) -> sqlite3.Connection:
        """Returns a connection for writing, to a fresh file if the present one is damaged. Only one
        process at a time runs this. Raises the errors of `sqlite.writer`.
        """
        with cache.locked(sqlite.beside(self.path, ".lock")):
            if damage is not None and not self._moved() and self._is_damaged():
                self._set_aside(damage)
            if sqlite.state(self.path) is None:
                # A log may exist without its file, and another connection may still write to it.
                sqlite.move(self.path, sqlite.unused_name(self.path))
            try:
                found = sqlite.writer(self.path)
            except sqlite3.DatabaseError as error:
                if not sqlite.is_damage(error):
                    raise
                self._set_aside(error)
                found = sqlite.writer(self.path)
            self._opened = self._state_now()
            self._salvage(found)
            return found

    # Damage.

    def _is_damaged(self) -> bool:
        """Checks a file that an error reported as damaged in full, once; it may have been replaced
        in place.
        """
        found = self._state_now()
        if found != self._checked and sqlite.is_sound(self.path):
            self._checked = found
            return False
        return True

    def _set_aside(self, error: sqlite3.Error) -> None:
        """Moves the file away, until `_salvage` has copied its readable rows to a fresh one."""
        target = sqlite.beside(self.path, SALVAGING)
        if target.exists():  # from an earlier salvage that lacked disk space
            sqlite.move(target, sqlite.unused_name(self.path))
        sqlite.move(self.path, target)
        self._damage = error

    def _salvage(self, file: sqlite3.Connection) -> None:
        """Copies the readable rows of a damaged file that was set aside, by this process or by one
        that ended before it could copy them.
        """
        source = sqlite.beside(self.path, SALVAGING)
        if not source.exists():
            return
        damage = self._damage or "the process that set it aside ended before it had read it"
        self._damage = None
        try:
            with contextlib.closing(sqlite.for_salvage(source)) as damaged:
                found = sqlite.at_once(file, [lambda target: salvage.carry(damaged, target)])
        except (OSError, sqlite3.Error) as error:
            self._warn(
                f"{self.path} is damaged ({damage}): it was renamed to {source.name}, and a new "
                "store was started; the results that can still be read could not be copied "
                f"({error}), which is tried again when the store is next opened"
            )
            return
        target = sqlite.unused_name(self.path)
        with contextlib.suppress(OSError):
            sqlite.move(source, target)
        self._warn(
            f"{self.path} is damaged ({damage}): it was renamed to {target.name}, and a new store "
            f"was started with the {found} that can still be read"
        )

    def _warn(self, message: str) -> None:
        if message not in (self.warning or ""):
            self.warning = f"{self.warning}; {message}" if self.warning else message
            warnings.warn(message, stacklevel=2)


def _key(record: Record) -> object:
    """Returns a key that is equal for records of which a store keeps only one."""
    if isinstance(record, Trial):
        return record.identity
    return record.gpu.key, record.workload, record.kernel, record.source

"""A SQLite file that keeps what is written to it, whatever befalls it: damage, a full disk, another
file in its place.
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

# Seconds to wait for others' writes, once they have taken longer than `sqlite.BUSY_SECONDS`.
IMPATIENT_SECONDS = 1.0
ATTEMPTS = 3  # at what is damaged or replaced while it is read or written
BATCH = 64  # operations that are written together, of those that wait
# The end of a damaged file's name, until what can be read in it is in the fresh one.
SALVAGING = ".salvaging"


@dataclass(frozen=True)
class _Waiting:
    """An operation that the file lacks, and the identities of the results that it stores."""

    operation: Operation[Any]
    keys: frozenset[object]


class DurableFile:
    """The file of a store, and a copy in memory that stands in for it.

    `_read` and `_write` carry out operations on a connection. What is written is in the file when
    the call returns. While the disk refuses it, it is kept in memory, and written with the next
    write that succeeds. A damaged file is set aside, and what can be read in it is carried to a
    fresh one. Where there can be no file, all lives in memory. With `read_only` nothing is written,
    and what cannot be read counts as empty.

    A connection is in one of four states:

        _file   _memory
        yes     none      what is written goes to the file
        yes     yes       the file lags behind: operations wait, and are tried with each write
        none    yes       there can be no file; or the store is read-only and the file unreadable
        none    none      closed; or the store is read-only and reads the file each time

    Any number of threads may use it. Raises StoreError for a file of a newer version, which stays
    as it is, and for a database of another program.
    """

    def __init__(self, path: Path | None = None, *, read_only: bool = False) -> None:
        self.path = (cache.directory() / "tuning.sqlite" if path is None else Path(path)).absolute()
        if os.path.islink(self.path):  # SQLite has its log beside the file itself
            self.path = self.path.resolve()
        self.read_only = read_only
        self.warning: str | None = None
        self._mutex = threading.RLock()
        self._file: sqlite3.Connection | None = None
        self._memory: sqlite3.Connection | None = None
        self._waiting: list[_Waiting] = []  # what the file lacks
        self._unsaved: dict[object, Record] = {}  # the results among it, by identity
        self._exported: set[object] = set()  # those of them that an emergency export has
        self._opened: sqlite.State = None  # the file's state when it was opened
        # The state of a file that a full check found sound in spite of an error.
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
        """Whether the store works on a copy in memory, for good or for now."""
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
        """What a subclass does last with the open file."""

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
        """Reads the file as it is now, and leaves it alone; what cannot be read counts as empty
        until it changes.
        """
        if self._memory is None or self._moved():
            self._memory = None
            self._opened = self._state_now()
            try:
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
        """Carries out an operation that stores these records if it returns what is true."""
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
        """Carries out an operation in memory, and lets it wait for the file if there is one."""
        kept: T = sqlite.at_once(self._current(), [operation])
        added = {_key(record): record for record in records} if kept else {}
        if self._file is not None:
            self._waiting.append(_Waiting(operation, frozenset(added)))
        self._unsaved |= added
        self._exported -= added.keys()
        return kept

    def _try_to_write(self, operation: Operation[T], *following: Operation[Any]) -> tuple[T] | None:
        """Writes what waits and this in one transaction, then each that follows in one of its own.

        A file that is damaged or replaced meanwhile is opened anew, up to ATTEMPTS times. Returns
        what the operation returned, None where there is no file to write to. Raises
        sqlite3.DatabaseError for anything else, a full disk for one.
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
            self._open()  # it was replaced or deleted, and what was written with it
        return None

    def _write_waiting(self, file: sqlite3.Connection, operation: Operation[T]) -> T:
        """Writes what waits, and then this. A disk that is full refuses the first batch, however
        much waits.
        """
        while len(self._waiting) > BATCH:
            sqlite.at_once(file, [each.operation for each in self._waiting[:BATCH]])
            if self._moved():
                break  # all is written once more, to the file that is there now
            del self._waiting[:BATCH]
            left = {key for each in self._waiting for key in each.keys}
            self._unsaved = {key: record for key, record in self._unsaved.items() if key in left}
        result: T = sqlite.at_once(file, [*(each.operation for each in self._waiting), operation])
        return result

    def _caught_up(self) -> None:
        """Drops what stood in for the file, which has everything now."""
        self._waiting.clear()
        self._unsaved.clear()
        self._exported.clear()
        if self._memory is not None and self._file is not None:
            self._memory.close()
            self._memory = None
            self._file.execute(f"PRAGMA busy_timeout = {sqlite.BUSY_SECONDS * 1000:.0f}")

    def _fall_back(self, reason: str) -> None:
        """Goes on in memory beside the file, until a write to it succeeds."""
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
        """The connection that has everything: memory, while the file lags behind."""
        found = self._memory or self._file
        assert found is not None
        return found

    def _state_now(self) -> sqlite.State:
        """Which file it is; of one that is only read, also whether it was written to."""
        found = sqlite.state(self.path)
        return found if self.read_only or found is None else found[:2]

    def _moved(self) -> bool:
        """Whether another file is there than the one that was opened, or none."""
        return self._state_now() != self._opened

    def _recover(self, error: sqlite3.DatabaseError) -> None:
        """Goes on with another file, or in memory, after a read that failed."""
        if sqlite.is_damage(error):
            self._open(error)
        else:
            self._fall_back(str(error))

    def _open(self, damage: sqlite3.Error | None = None) -> None:
        """Opens the file, or another if it is damaged; goes on without one where there can
        be none.
        """
        previous, self._file = self._file, None
        if previous is not None and damage is not None:
            previous.close()
            previous = None
        try:
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
        """Goes on in memory for good, with what can be read; `previous` is a file that was moved
        away.
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
        """A connection for writing, to a fresh file if the present one is damaged. One process at a
        time; raises as `sqlite.writer`.
        """
        with cache.locked(sqlite.beside(self.path, ".lock")):
            if damage is not None and not self._moved() and self._is_damaged():
                self._set_aside(damage)
            if sqlite.state(self.path) is None:
                # There may be a log without its file, which another connection still writes to.
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
        """Checks in full, once, what an error said to be damaged: it may have been replaced in
        place.
        """
        found = self._state_now()
        if found != self._checked and sqlite.is_sound(self.path):
            self._checked = found
            return False
        return True

    def _set_aside(self, error: sqlite3.Error) -> None:
        """Moves the file out of the way, until `_salvage` has carried what can be read in it to a
        fresh one.
        """
        target = sqlite.beside(self.path, SALVAGING)
        if target.exists():  # of another salvage, for which there was no room
            sqlite.move(target, sqlite.unused_name(self.path))
        sqlite.move(self.path, target)
        self._damage = error

    def _salvage(self, file: sqlite3.Connection) -> None:
        """Carries what can be read in a damaged file that was set aside, by this process or by one
        that ended before it had done so.
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
    """Equal for records of which a store has one."""
    if isinstance(record, Trial):
        return record.identity
    return record.gpu.key, record.workload, record.kernel, record.source

"""Trials and winners in SQLite: sweeps in several processes share a file, and lose no result to
what befalls it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...core import cache
from . import leases, listing, places, queries, salvage, sqlite
from .leases import Claim
from .listing import Selection, Summary
from .queries import Operation
from .records import Gpu, Trial, TunedConfig, Winner, Workload
from .sqlite import StoreError

__all__ = ["Store", "StoreError"]

T = TypeVar("T")

IMPATIENT_SECONDS = (
    1.0  # to wait for others' writes, once they have taken longer than `database.BUSY_SECONDS`
)
ATTEMPTS = 3  # at what is damaged or replaced while it is read or written
BATCH = 64  # operations that are written together, of those that wait
# the end of a damaged file's name, until what can be read in it is in the fresh one
SALVAGING = ".salvaging"

Record = Trial | Winner


class Store:
    """Trials and winners, in the file at `path` or in that of the cache directory.

    Any number of threads may use a store, and any number of processes its file. What is added is in
    the file when the call returns; while the disk refuses it is kept here, and written with the
    next write that succeeds: `unsaved` says how much that is, and `emergency_export` writes it
    elsewhere. A damaged file is set aside, and what can be read in it is carried to a fresh one;
    where there can be none, the store lives in memory. `warning` says what went wrong, as do
    Python's warnings. With `read_only` nothing is written, and what cannot be read counts as empty.

    Raises StoreError for a file of a newer version, which stays as it is, and for a database of
    another program.
    """

    def __init__(self, path: Path | None = None, *, read_only: bool = False) -> None:
        self.path = (cache.directory() / "tuning.sqlite" if path is None else Path(path)).absolute()
        if os.path.islink(self.path):  # SQLite has its log beside the file itself
            self.path = self.path.resolve()
        self.read_only = read_only
        self.warning: str | None = None
        self._mutex = threading.RLock()
        self._file: sqlite3.Connection | None = None
        self._memory: sqlite3.Connection | None = (
            None  # in use where there is no file, or while the file lags behind
        )
        self._waiting: list[_Waiting] = []  # what the file lacks
        self._unsaved: dict[object, Record] = {}  # the results among it, by identity
        self._exported: set[object] = set()  # those of them that an emergency export has
        self._opened: sqlite.State = None  # the file's state when it was opened
        self._checked: sqlite.State = (
            None  # that of a file which a full check found sound in spite of an error
        )
        self._damage: sqlite3.Error | None = None  # why a file was set aside
        self._closed = False
        self._leases = leases.Holder()
        self._heart: leases.Heart | None = None
        weakref.finalize(self, self._leases.retire)
        if read_only:
            self._read_beside(lambda connection: None, first=True)
        else:
            self._open()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def in_memory(self) -> bool:
        """Whether results are not in the file, for good or for now."""
        return self._memory is not None

    @property
    def persistent(self) -> bool:
        """Whether what is added now reaches the file."""
        return self._file is not None and self._memory is None and not self._closed

    @property
    def unsaved(self) -> int:
        """How many results were added that are not in the file."""
        return len(self._unsaved)

    def check_persistent(self) -> None:
        """Writes some pages to the file and removes them. Raises StoreError, with the reason, where
        that fails: for a full disk or a file that cannot be written, for what lives in memory, and
        for what was opened for reading.
        """
        with self._mutex:
            self._check_open()
            self._check_writable()
            for _ in range(ATTEMPTS):
                if self._file is None:
                    break
                try:
                    self._write_waiting(self._file, queries.write_probe)
                    sqlite.at_once(self._file, [queries.remove_probe])
                except sqlite3.DatabaseError as error:
                    if not self._moved() and not sqlite.is_damage(error):
                        raise StoreError(
                            f"{self.path}: {error}; results could not be kept"
                        ) from None
                    self._open(None if self._moved() else error)
                    continue
                if not self._moved():
                    self._caught_up()
                    return
                self._open()
            raise StoreError(
                self.warning or f"{self.path}: it is replaced or damaged again and again"
            )

    def emergency_export(self, folder: Path | None = None) -> Path:
        """Writes the results that are not in the file to a fresh export in the folder, or in the
        first that can be written of the current one, the home and the one for temporary files;
        returns its path.

        Raises ValueError where nothing is unsaved, StoreError where no file can be written.
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
        """Writes what waits, if that can be done now, warns of what is lost, and gives the leases
        back. Nothing can be read afterwards.
        """
        with self._mutex:
            if self._waiting and not self._closed:
                self._write(lambda connection: None)
            if lost := len(self._unsaved.keys() - self._exported):
                self._warn(
                    f"{self.path}: it cannot be written, and the last {lost} results are lost"
                )
            if not self._closed:
                self._release_all()
            self._closed = True
            for connection in (self._file, self._memory):
                if connection is not None:
                    connection.close()
            self._file = self._memory = None
            self._waiting.clear()
            self._unsaved.clear()

    def add(self, trial: Trial, *, replace: bool = False) -> bool:
        """Stores a trial and ends its lease; False if one of its identity is there, which stays
        unless `replace`.

        In any case an "ok" or "wrong" takes the place of what may have been circumstance:
        `records.CIRCUMSTANTIAL`. Raises ValueError for a trial that could not be read again.
        """
        added = self._write(queries.adding(trial, replace=replace), [trial])
        with self._mutex:
            self._leases.held.pop(
                leases.key_of(queries.identity(trial.gpu, *trial.identity[1:])), None
            )
        return added

    def crown(self, winner: Winner) -> None:
        """Stores a winner, in place of that of its GPU, workload, kernel and source.

        Raises ValueError for a winner that could not be read again.
        """
        self._write(queries.crowning(winner), [winner])

    def merge(self, trials: Iterable[Trial], winners: Iterable[Winner]) -> tuple[int, int]:
        """Stores trials as `add` does, and winners that are newer than those here; returns how many
        of each are new.

        A date in the future makes no winner the newer. Raises ValueError, with nothing stored, for
        one that could not be read again.
        """
        trials, winners = list(trials), list(winners)
        adding = [queries.adding(trial) for trial in trials]
        crowning = [queries.crowning(winner, only_newer=True) for winner in winners]

        def merging(connection: sqlite3.Connection) -> tuple[int, int]:
            new = sum([add(connection) for add in adding])
            return new, sum([crown(connection) for crown in crowning])

        return self._write(merging, [*trials, *winners])

    def find(
        self, gpu: Gpu, workload: Workload, kernel: str, source: str, config: str
    ) -> Trial | None:
        """The valid trial of this identity."""
        row = queries.identity(gpu, workload, kernel, source, config)
        found = self._read(lambda connection: queries.there(connection, "trials", row))
        return found if isinstance(found, Trial) else None

    def claim(
        self,
        gpu: Gpu,
        workload: Workload,
        kernel: str,
        source: str,
        config: str,
        *,
        again: bool = False,
    ) -> Claim:
        """Takes the lease of a config, to measure it: see `leases`. The trial if there is one,
        unless `again`.

        What is granted ends with `add`, `release` or `close`; meanwhile a thread tells other
        processes that this one lives.
        """
        identity = queries.identity(gpu, workload, kernel, source, config)
        with self._mutex:
            claim = self._passing(self._leases.claiming(identity, again=again))
            if claim.granted:
                self._leases.held[leases.key_of(identity)] = identity
                if self._heart is None:
                    self._heart = leases.Heart(_beat_of(weakref.ref(self)))
        return claim

    def release(self, gpu: Gpu, workload: Workload, kernel: str, source: str, config: str) -> None:
        """Gives the lease of a config back, as if nobody had begun to measure it."""
        identity = queries.identity(gpu, workload, kernel, source, config)
        with self._mutex:
            if self._leases.held.pop(leases.key_of(identity), None) is not None:
                self._passing(self._leases.releasing(identity))

    def _passing(self, operation: Operation[T]) -> T:
        """A write that is not made up for once the file can be written again: it is about this
        moment.
        """
        with self._mutex:
            result = self._write(operation)
            if self._waiting and self._waiting[-1].operation is operation:
                self._waiting.pop()
            return result

    def _beat(self) -> bool:
        """Tells the other processes that this one lives; False once it has nothing to tell."""
        with self._mutex:
            if self._closed or not self._leases.held:
                self._heart = None
                return False
            if self._file is not None and self._memory is None and not self._moved():
                with contextlib.suppress(sqlite3.Error):
                    sqlite.at_once(self._file, [self._leases.beating()])
            return True

    def _release_all(self) -> None:
        """What `close` does about leases."""
        if self._heart is not None:
            self._heart.stop()
        if self._leases.held and self._file is not None and not self._moved():
            with contextlib.suppress(sqlite3.Error):
                sqlite.at_once(self._file, [self._leases.releasing_all()])
        self._leases.retire()

    def trials(
        self, *, kernel: str | None = None, workload: Workload | None = None, gpu: str | None = None
    ) -> list[Trial]:
        """By date; `gpu` is a key. Rows that are no valid trials are left out."""
        found = self._records("trials", {"kernel": kernel, "gpu": gpu}, workload)
        return [record for record in found if isinstance(record, Trial)]

    def winners(
        self,
        *,
        kernel: str | None = None,
        workload: Workload | None = None,
        gpu_name: str | None = None,
    ) -> list[Winner]:
        """By date. Rows that are no valid winners are left out."""
        found = self._records("winners", {"kernel": kernel}, workload)
        return [
            record
            for record in found
            if isinstance(record, Winner) and (gpu_name is None or record.gpu.name == gpu_name)
        ]

    def tuned(self, gpu: Gpu) -> list[TunedConfig]:
        """What a lookup needs of the winners on GPUs of this model, by date. Reads nothing else."""
        return self._read(lambda connection: listing.tuned(connection, *gpu.model))

    def summaries(self) -> list[Summary]:
        """Counts and the best of the trials of each kernel at each workload, and its winner."""
        return self._read(listing.summaries)

    def browse(
        self, wanted: Selection = listing.ALL, limit: int | None = None
    ) -> tuple[list[Trial], int]:
        """The first `limit` trials, the fastest of each workload first, and how many there are."""
        return self._read(lambda connection: listing.browse(connection, wanted, limit))

    def kernels(self) -> list[str]:
        """The names of the kernels that there are results of."""
        return self._read(listing.kernels)

    def stream(
        self,
        consume: Callable[[Iterator[Trial], Iterator[Winner]], T],
        wanted: Selection | None = None,
    ) -> T:
        """What `consume` makes of all trials and winners of one moment, which come one at a time.

        It is called again, from the beginning, if another process writes to the file meanwhile.
        """

        def operation(connection: sqlite3.Connection) -> T:
            connection.execute("BEGIN")
            try:
                return consume(*listing.stream(connection, wanted or listing.ALL))
            finally:
                connection.execute("ROLLBACK")

        return self._read(operation)

    def prune(
        self,
        *,
        older_than_days: float | None = None,
        kernel: str | None = None,
        sources: Mapping[str, str] | None = None,
    ) -> int:
        """Removes the trials and winners to which all that is given applies; returns how many.

        `sources` are the current fingerprints of kernels: what these kernels have of another source
        goes. Leases of configs go as well. Raises ValueError where nothing is given.
        """
        remove = queries.removing(older_than_days, kernel, sources)
        with self._mutex:
            removed = self._write(remove)
            if self._file is not None and not self._waiting:
                with contextlib.suppress(
                    sqlite3.Error
                ):  # others are at work, or the disk is full: it stays as large
                    self._file.execute("VACUUM")
                    self._file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return removed

    def verify(self) -> list[str]:
        """What is wrong with the file, and each row that is no valid record. Reads all of it."""
        with self._mutex:
            lines = self._read(sqlite.integrity)
            problems = self._read(queries.problems)
            said = [self.warning] if self.warning else []
            return said + [f"integrity: {line}" for line in lines] + problems

    def _records(
        self, table: str, wanted: Mapping[str, object], workload: Workload | None
    ) -> Iterator[Trial | Winner]:
        if workload is not None:
            wanted = {**wanted, **vars(workload)}

        def rows(connection: sqlite3.Connection) -> tuple[list[sqlite3.Row], list[sqlite3.Row]]:
            found = queries.select(connection, table, wanted)
            if table == "trials":
                found = [row for row in found if not queries.is_superseded(connection, row)]
            return found, queries.select(connection, "gpus")

        found, gpu_rows = self._read(rows)
        gpus, _ = queries.gpus_of(gpu_rows)
        for row in found:
            with contextlib.suppress(ValueError):
                yield queries.parse(table, row, gpus)

    # The file, and what stands in for it.

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

    def _write(self, operation: Operation[T], records: Iterable[Record] = ()) -> T:
        """Carries out an operation that stores these records if it returns what is true."""
        with self._mutex:
            self._check_open()
            self._check_writable()
            for _ in range(ATTEMPTS):
                if self._file is None:
                    break
                try:
                    result: T = self._write_waiting(self._file, operation)
                except sqlite3.DatabaseError as error:
                    if not self._moved():
                        self._recover(error)
                        if self._memory is not None:
                            break
                else:
                    if not self._moved():
                        self._caught_up()
                        return result
                if (
                    self._file is not None and self._moved()
                ):  # or deleted, and what was written with it
                    self._open()
            if self._file is not None:
                self._fall_back("it is replaced or damaged again and again")
            kept: T = sqlite.at_once(self._current(), [operation])
            added = {_key(record): record for record in records} if kept else {}
            if self._file is not None:
                self._waiting.append(_Waiting(operation, frozenset(added)))
            self._unsaved |= added
            self._exported -= added.keys()
            return kept

    def _write_waiting(self, file: sqlite3.Connection, operation: Operation[T]) -> T:
        """Writes what waits, and then this. A disk that is full refuses the first batch, however
        much waits.
        """
        while len(self._waiting) > BATCH:
            sqlite.at_once(file, [each.operation for each in self._waiting[:BATCH]])
            if self._moved():
                break  # and all is written once more, to the file that is there now
            del self._waiting[:BATCH]
            left = {key for each in self._waiting for key in each.keys}
            self._unsaved = {key: record for key, record in self._unsaved.items() if key in left}
        result: T = sqlite.at_once(file, [*(each.operation for each in self._waiting), operation])
        return result

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self.path} is closed")

    def _check_writable(self) -> None:
        if self.read_only:
            raise StoreError(f"{self.path} was opened for reading only")

    def _current(self) -> sqlite3.Connection:
        found = self._memory or self._file
        assert found is not None
        return found

    def _state_now(self) -> sqlite.State:
        """Which file it is; of one that is only read, also whether it was written to."""
        found = sqlite.state(self.path)
        return found if self.read_only or found is None else found[:2]

    def _moved(self) -> bool:
        return self._state_now() != self._opened

    def _recover(self, error: sqlite3.DatabaseError) -> None:
        """After a read or a write that failed: another file, or memory."""
        if sqlite.is_damage(error):
            self._open(error)
        else:
            self._fall_back(str(error))

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

    def _caught_up(self) -> None:
        self._waiting.clear()
        self._unsaved.clear()
        self._exported.clear()
        if self._memory is not None and self._file is not None:
            self._memory.close()
            self._memory = None
            self._file.execute(f"PRAGMA busy_timeout = {sqlite.BUSY_SECONDS * 1000:.0f}")

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

    def _to_write(self, damage: sqlite3.Error | None) -> sqlite3.Connection:
        with cache.locked(sqlite.beside(self.path, ".lock")):
            if damage is not None and not self._moved() and self._is_damaged():
                self._set_aside(damage)
            if (
                sqlite.state(self.path) is None
            ):  # a log without its file, which another connection may still write to
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

    def _is_damaged(self) -> bool:
        """What an error said to be damaged is checked in full, once: it may have been replaced in
        place.
        """
        found = self._state_now()
        if found != self._checked and sqlite.is_sound(self.path):
            self._checked = found
            return False
        return True

    def _set_aside(self, error: sqlite3.Error) -> None:
        """The file goes out of the way, until `_salvage` has carried what can be read in it to a
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
        damage = self._damage or "a process that set it aside ended before it had read it"
        self._damage = None
        try:
            with contextlib.closing(sqlite.for_salvage(source)) as damaged:
                found = sqlite.at_once(file, [lambda target: salvage.carry(damaged, target)])
        except (OSError, sqlite3.Error) as error:
            self._warn(
                f"{self.path} is damaged ({damage}): it is now {source.name}, and a fresh store "
                "was begun; what can be"
                f" read in it could not be carried over ({error}), which is tried again when the "
                "store is next opened"
            )
            return
        target = sqlite.unused_name(self.path)
        with contextlib.suppress(OSError):
            sqlite.move(source, target)
        self._warn(
            f"{self.path} is damaged ({damage}): it is now {target.name}, and a fresh store was "
            f"begun with the {found}"
            " that can be read in it"
        )

    def _warn(self, message: str) -> None:
        if message not in (self.warning or ""):
            self.warning = f"{self.warning}; {message}" if self.warning else message
            warnings.warn(message, stacklevel=2)


@dataclass(frozen=True)
class _Waiting:
    """An operation that the file lacks, and the identities of the results that it stores."""

    operation: Operation[Any]
    keys: frozenset[object]


def _key(record: Record) -> object:
    """Equal for records of which a store has one."""
    if isinstance(record, Trial):
        return record.identity
    return record.gpu.key, record.workload, record.kernel, record.source


def _beat_of(store: weakref.ref[Store]) -> Callable[[], bool]:
    """The beat of a store that may be forgotten without having been closed."""

    def beat() -> bool:
        found = store()
        return found is not None and found._beat()

    return beat

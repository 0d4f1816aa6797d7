"""Trials and winners in SQLite, which sweeps in several processes of a machine share: a driver
claims a config before it measures it.

A claim is a lock of the kernel on a byte of the file `-claims` beside the store. It ends with the
trial, when the driver gives it back, and with the process, however that ends; in the last two cases
the config counts as not started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import sqlite3
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from outblas.autotune.store import fields
from outblas.autotune.store.database import Database, StoreError, fcntl
from outblas.autotune.store.records import (
    CIRCUMSTANTIAL,
    BestConfig,
    Identity,
    Trial,
    Workload,
    now,
)
from outblas.base.ownership import shown

__all__ = ["Store", "StoreError"]

T = TypeVar("T", Trial, BestConfig)
Row = Mapping[str, Any]

# The columns that tell rows apart. A row of `trials` and of `winners` has the record as JSON
# besides, and its date.
PLACE = ("gpu", "workload", "kernel", "source")
KEYS = {"trials": (*PLACE, "config"), "winners": PLACE}
SCHEMA = [
    f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, {', '.join(key)}, date, record, "
    f"UNIQUE ({', '.join(key)}))"
    for table, key in KEYS.items()
]
_LOCK = "hhqqi4x"  # struct flock of Linux: type, whence, start, length, process


class Store(Database):
    """A store of trials and winners, in a SQLite file that sweeps share.

    Any number of threads may use a store, and any number of processes of one machine its file. A
    result is on disk when the call that adds it returns; a call that fails, because the disk is
    full for example, raises StoreError and has changed nothing. A damaged file is renamed, with a
    warning that names it, and a new one is begun.

    A store is a context manager, which closes it.

    Args:
        path: The file; None for `tuning.sqlite` in the cache directory.
        read_only: True writes nothing; a file that is missing is then an empty store.

    Raises:
        StoreError: The file is none that outblas wrote, or is of another version: it is left as it
            is. Or it can neither be opened nor created.

    Example:
        >>> from pathlib import Path
        >>> from outblas.autotune import Gpu, Store, Trial, Workload
        >>> gpu, workload = Gpu("NVIDIA H100 80GB HBM3", 90, 132), Workload(512, 512, 512)
        >>> with Store(Path("tuning.sqlite")) as store:
        ...     added = store.add(
        ...         Trial(
        ...             gpu=gpu,
        ...             workload=workload,
        ...             kernel="portable",
        ...             source="0123456789abcdef",
        ...             config="block_m=64",
        ...             status="failed",
        ...             reason="an example",
        ...             when="2026-01-31T12:00:00+00:00",
        ...         )
        ...     )
        ...     print(added, [trial.config for trial in store.trials(kernel="portable")])
        True ['block_m=64']
    """

    def __init__(self, path: Path | None = None, *, read_only: bool = False) -> None:
        self._claims: int | None = None  # the descriptor of their file
        self._claimed = set[int]()  # the bytes that this object has locked
        super().__init__(path, SCHEMA, read_only=read_only)

    def close(self) -> None:
        """Give back the claims of this store object, and close the file."""
        with self._mutex:
            if self._claims is not None:
                os.close(self._claims)
                self._claims = None
            super().close()

    # Writing.

    def add(self, trial: Trial, *, replace: bool = False) -> bool:
        """Store a trial, and end the claim of its config.

        A trial that is "ok" or "wrong" always replaces one that failed for a reason that may lie
        outside the config: a crash, a hang, memory that ran out.

        Args:
            trial: The trial. One without a date gets that of now.
            replace: Whether it replaces a trial of the same identity.

        Returns:
            True if it was stored; False if there is a trial of its identity, which was kept.

        Raises:
            ValueError: A field has a value that could not be read again.
            StoreError: The store is closed, read-only or cannot be written.
        """
        row = _row(trial)
        added = self.write(lambda connection: _add(connection, row, replace=replace))
        self.release(trial.identity)
        return added

    def record_best(self, best: BestConfig) -> None:
        """Store a best config, in place of the one of its GPU, workload, kernel and source.

        Args:
            best: The best config. One without a date gets that of now.

        Raises:
            ValueError: A field has a value that could not be read again.
            StoreError: The store is closed, read-only or cannot be written.
        """
        row = _row(best)
        self.write(lambda connection: _insert(connection, "winners", row))

    def merge(self, trials: Iterable[Trial], winners: Iterable[BestConfig]) -> tuple[int, int]:
        """Store trials as `add` does, and the winners that are newer than those in the store, all
        or nothing.

        Args:
            trials: The trials.
            winners: The best configs.

        Returns:
            How many trials, and how many winners, are new.

        Raises:
            ValueError: A record could not be read again; nothing was stored.
            StoreError: The store is closed, read-only or cannot be written.
        """
        trial_rows, winner_rows = list(map(_row, trials)), list(map(_row, winners))

        def merge(connection: sqlite3.Connection) -> tuple[int, int]:
            added = sum([_add(connection, row) for row in trial_rows])
            newer = 0
            for row in winner_rows:
                stored = _select(connection, "winners", _key("winners", row))
                if not stored or stored[0]["date"] < row["date"]:
                    _insert(connection, "winners", row)
                    newer += 1
            return added, newer

        return self.write(merge)

    def prune(
        self,
        *,
        older_than_days: float | None = None,
        kernel: str | None = None,
        sources: Mapping[str, str] | None = None,
        dry_run: bool = False,
    ) -> int:
        """Remove trials and winners to which every given condition applies.

        Args:
            older_than_days: Removes records older than this many days.
            kernel: Removes records of this kernel.
            sources: The current fingerprint of each kernel: removes records of these kernels that
                have another one.
            dry_run: True removes nothing, and only counts.

        Returns:
            The number of records that were removed, or would be.

        Raises:
            ValueError: No condition is given, or `older_than_days` is out of range.
            StoreError: The store is closed, read-only or cannot be written.
        """
        condition, values = _to_prune(older_than_days, kernel, sources)

        def remove(connection: sqlite3.Connection) -> int:
            count = 0
            for table in KEYS:
                rows = f"FROM {table} WHERE {condition}"
                count += connection.execute(f"SELECT count(*) {rows}", values).fetchone()[0]
                if not dry_run:
                    connection.execute(f"DELETE {rows}", values)
            return count

        if dry_run:
            return self.read(remove)
        with self._mutex:
            removed = self.write(remove)
            # The file does not shrink while others work with it, or if the disk is full.
            with contextlib.suppress(sqlite3.Error):
                if self._connection is not None:
                    self._connection.execute("VACUUM")
                    self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return removed

    # Reading.

    def trials(
        self, *, kernel: str | None = None, workload: Workload | None = None, gpu: str | None = None
    ) -> list[Trial]:
        """List trials by date.

        Args:
            kernel: Only those of this kernel.
            workload: Only those of this workload.
            gpu: Only those of the GPU with this `Gpu.key`.

        Returns:
            The trials, the oldest first.
        """
        return self._records(Trial, "trials", _columns(kernel, workload, gpu))

    def trial(self, identity: Identity) -> Trial | None:
        """Find the trial of a config.

        Args:
            identity: The config, as in `Trial.identity`.

        Returns:
            The trial; None where there is none.
        """
        return next(iter(self._records(Trial, "trials", _identified(identity))), None)

    def winners(
        self,
        *,
        kernel: str | None = None,
        workload: Workload | None = None,
        gpu_name: str | None = None,
    ) -> list[BestConfig]:
        """List winners by date.

        Args:
            kernel: Only those of this kernel.
            workload: Only those of this workload.
            gpu_name: Only those on GPUs of this name.

        Returns:
            The best configs, the oldest first.
        """
        winners = self._records(BestConfig, "winners", _columns(kernel, workload))
        return [winner for winner in winners if gpu_name in (None, winner.gpu.name)]

    def _records(self, kind: type[T], table: str, values: Row) -> list[T]:
        return self.read(
            lambda connection: [_record(kind, row) for row in _select(connection, table, values)]
        )

    def verify(self) -> None:
        """Check all of the file.

        Raises:
            StoreError: A page or a row is damaged.
        """

        def verify(connection: sqlite3.Connection) -> None:
            for (line,) in connection.execute("PRAGMA integrity_check(1)"):
                if line != "ok":
                    raise sqlite3.DatabaseError(line.splitlines()[-1])
            for kind, table in ((Trial, "trials"), (BestConfig, "winners")):
                for row in _select(connection, table, {}):
                    record = _record(kind, row)  # type: ignore[type-var]
                    try:
                        fields.to_fields(record)
                    except ValueError as error:
                        raise sqlite3.DatabaseError(f"row {row['id']}: {error}") from None

        self.read(verify)

    # Claims.

    def claim(self, identity: Identity) -> bool:
        """Claim a config, so that nobody else who uses the store measures it; see the module.

        A claim ends with `add`, `release` or `close`, and with the process.

        Args:
            identity: The GPU, the workload, the kernel, its source and the config, as in
                `Trial.identity`.

        Returns:
            Whether the claim was granted. False where it is held, by this object too.

        Raises:
            StoreError: The store is closed or read-only, or its claims cannot be written.
        """
        byte = _byte(identity)
        with self._mutex:
            self._check_writable()
            granted = byte not in self._claimed and self._lock("F_WRLCK", byte)
            if granted:
                self._claimed.add(byte)
            return granted

    def release(self, identity: Identity) -> None:
        """Give the claim of a config back without a result.

        Args:
            identity: The config, as in `claim`.
        """
        byte = _byte(identity)
        with self._mutex:
            if byte in self._claimed:
                self._lock("F_UNLCK", byte)
                self._claimed.remove(byte)

    def _lock(self, kind: str, byte: int) -> bool:
        """Locks or unlocks a byte of the claims; returns whether that was possible, and True where
        a system has no such locks.
        """
        if not hasattr(fcntl, "F_OFD_SETLK"):
            return True
        path = self.path.with_name(f"{self.path.name}-claims")
        lock = struct.pack(_LOCK, getattr(fcntl, kind), os.SEEK_SET, byte, 1, 0)
        try:
            if self._claims is None:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._claims = os.open(path, flags, 0o600)
                with contextlib.suppress(PermissionError):  # whose owner has done it
                    os.fchmod(self._claims, self.path.stat().st_mode & 0o777)
            fcntl.fcntl(self._claims, fcntl.F_OFD_SETLK, lock)
        except BlockingIOError:
            return False
        except OSError as error:
            raise StoreError(f"{shown(path)} cannot be locked: {error.strerror}") from None
        return True


def _byte(identity: Identity) -> int:
    """Returns the byte that stands for a config among the claims."""
    text = json.dumps(_identified(identity))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _columns(kernel: str | None, workload: Workload | None, gpu: str | None = None) -> Row:
    """Returns the columns whose values are given."""
    place = {"kernel": kernel, "workload": workload and str(workload), "gpu": gpu}
    return {name: value for name, value in place.items() if value is not None}


def _identified(identity: Identity) -> Row:
    """Returns the columns of a trial's identity."""
    gpu, workload, kernel, source, config = identity
    return {**_columns(kernel, workload, gpu.key), "source": source, "config": config}


def _row(record: Trial | BestConfig) -> Row:
    """Returns the columns of a record. Raises ValueError."""
    dated = dataclasses.replace(record, when=record.when or now())
    key = _key("trials" if isinstance(record, Trial) else "winners", _identified(record.identity))
    return {**key, "date": dated.when, "record": json.dumps(fields.to_fields(dated))}


def _record(kind: type[T], row: sqlite3.Row) -> T:
    """Returns the record of a row. Raises sqlite3.DatabaseError for one that is damaged."""
    try:
        return fields.from_fields(kind, json.loads(row["record"]))
    except (ValueError, TypeError, KeyError) as error:
        raise sqlite3.DatabaseError(f"row {row['id']}: {error}") from None


def _equal(values: Row) -> str:
    """Returns the condition that columns have these values; they are the query's parameters."""
    return " AND ".join(f"{name} = :{name}" for name in values) or "1"


def _key(table: str, row: Row) -> Row:
    return {name: row[name] for name in KEYS[table]}


def _select(connection: sqlite3.Connection, table: str, values: Row) -> list[sqlite3.Row]:
    """Returns the rows with these values, ordered by date."""
    query = f"SELECT * FROM {table} WHERE {_equal(values)} ORDER BY date, id"
    return connection.execute(query, values).fetchall()


def _insert(connection: sqlite3.Connection, table: str, row: Row) -> None:
    """Inserts a row in place of the one with its key."""
    values = ", ".join(f":{name}" for name in row)
    query = f"INSERT OR REPLACE INTO {table} ({', '.join(row)}) VALUES ({values})"
    connection.execute(query, row)


def _add(connection: sqlite3.Connection, row: Row, *, replace: bool = False) -> bool:
    key = _key("trials", row)
    status = json.loads(row["record"])["status"]
    for old in _select(connection, "trials", key):
        by_chance = _record(Trial, old).status in CIRCUMSTANTIAL and status in ("ok", "wrong")
        if not (replace or by_chance):
            return False
    _insert(connection, "trials", row)
    return True


def _to_prune(
    older_than_days: float | None, kernel: str | None, sources: Mapping[str, str] | None
) -> tuple[str, Sequence[object]]:
    """Returns the condition for what is removed, and its values. Raises ValueError."""
    parts, values = list[str](), list[object]()
    if older_than_days is not None:
        if not 0 <= older_than_days <= 365_000:
            raise ValueError(
                f"older_than_days is {older_than_days}, expected a number from 0 to 365000"
            )
        limit = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=older_than_days)
        parts.append("date < ?")
        values.append(limit.isoformat())
    if kernel is not None:
        parts.append("kernel = ?")
        values.append(kernel)
    if sources is not None:
        parts.append(" OR ".join(["kernel = ? AND source != ?"] * len(sources)) or "0")
        values += [value for item in sources.items() for value in item]
    if not parts:
        raise ValueError("prune needs at least one of older_than_days, kernel and sources")
    return " AND ".join(f"({part})" for part in parts), values

"""Trials and winners in SQLite: sweeps in several processes share a file, and lose no result to
what befalls it.
"""

from __future__ import annotations

import contextlib
import sqlite3
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from . import leases, listing, queries, sqlite
from .durable_file import DurableFile, Record
from .leases import Claim
from .listing import Selection, Summary
from .queries import Operation
from .records import BestConfig, Gpu, Trial, TunedConfig, Workload
from .sqlite import StoreError

__all__ = ["Store", "StoreError"]

T = TypeVar("T")


class Store(DurableFile):
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
        self._leases = leases.Holder()
        self._heart: leases.Heart | None = None
        weakref.finalize(self, self._leases.retire)
        super().__init__(path, read_only=read_only)

    # Writing.

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

    def record_best(self, best: BestConfig) -> None:
        """Stores a best config, in place of that of its GPU, workload, kernel and source.

        Raises ValueError for one that could not be read again.
        """
        self._write(queries.recording_best(best), [best])

    def crown(self, winner: BestConfig) -> None:
        """The former name of `record_best`, which programs may still use."""
        self.record_best(winner)

    def merge(self, trials: Iterable[Trial], winners: Iterable[BestConfig]) -> tuple[int, int]:
        """Stores trials as `add` does, and winners that are newer than those here; returns how many
        of each are new.

        A date in the future makes no winner the newer. Raises ValueError, with nothing stored, for
        one that could not be read again.
        """
        trials, winners = list(trials), list(winners)
        additions = [queries.adding(trial) for trial in trials]
        recordings = [queries.recording_best(winner, only_newer=True) for winner in winners]

        def merge(connection: sqlite3.Connection) -> tuple[int, int]:
            new = sum([add(connection) for add in additions])
            return new, sum([record(connection) for record in recordings])

        return self._write(merge, [*trials, *winners])

    def prune(
        self,
        *,
        older_than_days: float | None = None,
        kernel: str | None = None,
        sources: Mapping[str, str] | None = None,
        dry_run: bool = False,
    ) -> int:
        """Removes the trials and winners to which all that is given applies; returns how many.

        `sources` are the current fingerprints of kernels: what these kernels have of another source
        goes. Leases of configs go as well. With `dry_run` nothing goes, and the count is returned.
        Raises ValueError where nothing is given.
        """
        if dry_run:
            return self._read(queries.prunable(older_than_days, kernel, sources))
        remove = queries.removing(older_than_days, kernel, sources)
        with self._mutex:
            removed = self._write(remove)
            if self._file is not None and not self._waiting:
                # The file stays as large where others are at work, or the disk is full.
                with contextlib.suppress(sqlite3.Error):
                    self._file.execute("VACUUM")
                    self._file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return removed

    # Reading.

    def find(
        self, gpu: Gpu, workload: Workload, kernel: str, source: str, config: str
    ) -> Trial | None:
        """The valid trial of this identity."""
        row = queries.identity(gpu, workload, kernel, source, config)
        found = self._read(lambda connection: queries.there(connection, "trials", row))
        return found if isinstance(found, Trial) else None

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
    ) -> list[BestConfig]:
        """By date. Rows that are no valid winners are left out."""
        found = self._records("winners", {"kernel": kernel}, workload)
        return [
            record
            for record in found
            if isinstance(record, BestConfig) and (gpu_name is None or record.gpu.name == gpu_name)
        ]

    def _records(
        self, table: str, wanted: Mapping[str, object], workload: Workload | None
    ) -> Iterator[Record]:
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
        consume: Callable[[Iterator[Trial], Iterator[BestConfig]], T],
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

    # Leases.

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
        """Gives the lease of a config back, as if nobody had started to measure it."""
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

    def _before_closing(self) -> None:
        """Gives the leases back."""
        if self._heart is not None:
            self._heart.stop()
        if self._leases.held and self._file is not None and not self._moved():
            with contextlib.suppress(sqlite3.Error):
                sqlite.at_once(self._file, [self._leases.releasing_all()])
        self._leases.retire()


def _beat_of(store: weakref.ref[Store]) -> Callable[[], bool]:
    """The beat of a store that may be forgotten without having been closed."""

    def beat() -> bool:
        found = store()
        return found is not None and found._beat()

    return beat

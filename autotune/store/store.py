"""Trials and winners in SQLite. Sweeps in several processes share a file, and lose no result when
something happens to it.
"""

from __future__ import annotations

import contextlib
import sqlite3
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from . import leases, listing, pruning, queries, sqlite
from .durable_file import DurableFile, Record
from .leases import Claim
from .listing import Selection, Summary
from .queries import Operation
from .records import BestConfig, Gpu, Trial, TunedConfig, Workload
from .sqlite import StoreError

__all__ = ["Store", "StoreError"]

T = TypeVar("T")


class Store(DurableFile):
    """A store of trials and winners, in a SQLite file that sweeps share.

    Any number of threads may use a store, and any number of processes its file. A result is in the
    file when the call that adds it returns. While the disk refuses it (it is full, for example),
    the result is kept in memory and written with the next write that succeeds: `unsaved` counts
    such results, and `emergency_export` writes them to another file.

    A damaged file is set aside, and what can be read in it is copied to a fresh one. Where no file
    can be made, the store lives in memory. The attribute `warning` says what went wrong, and so do
    Python's warnings.

    A store is a context manager, which closes it.

    Args:
        path: The file; None for `tuning.sqlite` in the cache directory.
        read_only: True writes nothing, and treats what cannot be read as empty.

    Raises:
        StoreError: The file is of a newer version of outblas, or is none that outblas wrote. It is
            left as it is.

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
        self._leases = leases.Holder()
        self._heart: leases.Heart | None = None
        weakref.finalize(self, self._leases.retire)
        super().__init__(path, read_only=read_only)

    # Writing.

    def add(self, trial: Trial, *, replace: bool = False) -> bool:
        """Store a trial, and end the lease of its config.

        A trial that is "ok" or "wrong" always replaces one that failed for a reason that may lie
        outside the config: a crash, a hang, memory that ran out.

        Args:
            trial: The trial.
            replace: Whether it replaces a trial of the same identity.

        Returns:
            True if it was stored; False if there is a trial of its identity, which was kept.

        Raises:
            ValueError: A field has a value that could not be read again.
            StoreError: The store is closed, or was opened for reading only.
        """
        added = self._write(queries.adding(trial, replace=replace), [trial])
        with self._mutex:
            self._leases.held.pop(
                leases.key_of(queries.identity(trial.gpu, *trial.identity[1:])), None
            )
        return added

    def record_best(self, best: BestConfig) -> None:
        """Store a best config, in place of the one of its GPU, workload, kernel and source.

        Args:
            best: The best config.

        Raises:
            ValueError: A field has a value that could not be read again.
            StoreError: The store is closed, or was opened for reading only.
        """
        self._write(queries.recording_best(best), [best])

    def crown(self, winner: BestConfig) -> None:
        """Call `record_best`, of which this is the former name.

        Args:
            winner: The best config.
        """
        self.record_best(winner)

    def merge(self, trials: Iterable[Trial], winners: Iterable[BestConfig]) -> tuple[int, int]:
        """Store trials as `add` does, and the winners that are newer than those in the store.

        A winner whose date lies in the future does not count as newer.

        Args:
            trials: The trials.
            winners: The best configs.

        Returns:
            How many trials, and how many winners, are new.

        Raises:
            ValueError: A record could not be read again; nothing was stored.
            StoreError: The store is closed, or was opened for reading only.
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
        """Remove trials and winners to which every given condition applies, and leases of configs.

        Args:
            older_than_days: Removes records older than this many days.
            kernel: Removes records of this kernel.
            sources: The current fingerprint of each kernel: removes records of these kernels that
                have another one.
            dry_run: True removes nothing, and only counts.

        Returns:
            The number of records that were removed, or would be.

        Raises:
            ValueError: No condition is given.
            StoreError: The store is closed, or was opened for reading only.
        """
        if dry_run:
            return self._read(pruning.prunable(older_than_days, kernel, sources))
        remove = pruning.removing(older_than_days, kernel, sources)
        with self._mutex:
            removed = self._write(remove)
            if self._file is not None and not self._waiting:
                # The file does not shrink while others work with it, or if the disk is full.
                with contextlib.suppress(sqlite3.Error):
                    self._file.execute("VACUUM")
                    self._file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return removed

    # Reading.

    def find(
        self, gpu: Gpu, workload: Workload, kernel: str, source: str, config: str
    ) -> Trial | None:
        """Look up one trial.

        Args:
            gpu: The GPU and its software.
            workload: The product.
            kernel: The name of the kernel.
            source: The fingerprint of the kernel's source.
            config: The config as text.

        Returns:
            The trial; None where there is none, or its row is damaged.
        """
        row = queries.identity(gpu, workload, kernel, source, config)
        found = self._read(lambda connection: queries.there(connection, "trials", row))
        return found if isinstance(found, Trial) else None

    def trials(
        self, *, kernel: str | None = None, workload: Workload | None = None, gpu: str | None = None
    ) -> list[Trial]:
        """List trials by date, without rows that are damaged.

        Args:
            kernel: Only those of this kernel.
            workload: Only those of this workload.
            gpu: Only those of the GPU with this `Gpu.key`.

        Returns:
            The trials, the oldest first.
        """
        found = self._records("trials", {"kernel": kernel, "gpu": gpu}, workload)
        return [record for record in found if isinstance(record, Trial)]

    def winners(
        self,
        *,
        kernel: str | None = None,
        workload: Workload | None = None,
        gpu_name: str | None = None,
    ) -> list[BestConfig]:
        """List winners by date, without rows that are damaged.

        Args:
            kernel: Only those of this kernel.
            workload: Only those of this workload.
            gpu_name: Only those on GPUs of this name.

        Returns:
            The best configs, the oldest first.
        """
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
        """List what a lookup needs of the winners on GPUs of one model, by date.

        Args:
            gpu: A GPU of the model.

        Returns:
            The kernel, the config, the time and the ratio of each winner.
        """
        return self._read(lambda connection: listing.tuned(connection, *gpu.model))

    def summaries(self) -> list[Summary]:
        """Summarize the trials of each kernel at each workload.

        Returns:
            A record for each GPU, kernel and workload: the numbers of trials, the best time, the
            winner.
        """
        return self._read(listing.summaries)

    def browse(
        self, wanted: Selection = listing.ALL, limit: int | None = None
    ) -> tuple[list[Trial], int]:
        """List trials, the fastest of each workload first.

        Args:
            wanted: Which trials.
            limit: How many to return at most; None for all.

        Returns:
            The trials, and how many there are without the limit.
        """
        return self._read(lambda connection: listing.browse(connection, wanted, limit))

    def kernels(self) -> list[str]:
        """List the kernels that the store has results of.

        Returns:
            Their names.
        """
        return self._read(listing.kernels)

    def stream(
        self,
        consume: Callable[[Iterator[Trial], Iterator[BestConfig]], T],
        wanted: Selection | None = None,
    ) -> T:
        """Pass all trials and winners, one at a time, to a function.

        The function sees the store as it is at one moment. It is called again, from the beginning,
        if another process writes to the file meanwhile.

        Args:
            consume: A function of an iterator of trials and one of winners.
            wanted: Which records; None for all.

        Returns:
            What the function returns.
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
        """Take the lease of a config, so that no other process measures it.

        A lease ends with `add`, `release` or `close`. Meanwhile a thread tells other processes that
        this one lives.

        Args:
            gpu: The GPU and its software.
            workload: The product.
            kernel: The name of the kernel.
            source: The fingerprint of the kernel's source.
            config: The config as text.
            again: Whether to take the lease although there is a trial.

        Returns:
            Whether the lease was granted, or the trial that there is, or who holds the lease.
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
        """Give the lease of a config back without a result.

        Args:
            gpu: The GPU and its software.
            workload: The product.
            kernel: The name of the kernel.
            source: The fingerprint of the kernel's source.
            config: The config as text.
        """
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

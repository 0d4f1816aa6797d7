"""Trials and winners in SQLite, which sweeps in several processes of a machine share."""

from __future__ import annotations

import contextlib
import datetime
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from outblas.autotune.store import claims, rows
from outblas.autotune.store.claims import Claim, Owner
from outblas.autotune.store.database import Database, StoreError
from outblas.autotune.store.records import (
    CIRCUMSTANTIAL,
    BestConfig,
    Facts,
    Gpu,
    Trial,
    Workload,
    now,
)
from outblas.autotune.store.rows import Row
from outblas.base.shapes import Shape

__all__ = ["ALL", "Selection", "Store", "StoreError", "Summary"]


@dataclass(frozen=True)
class Selection:
    """Selects records: of any of these kernels, of any of these shapes, of this dtype and layout.
    An empty field, or None, selects all.
    """

    kernels: Sequence[str] = ()
    shapes: Sequence[Shape] = ()
    dtype: str | None = None
    layout: str | None = None

    def where(self) -> tuple[str, list[object]]:
        """Returns a condition on rows, and its values."""
        parts, values = ["1"], list[object]()
        if self.kernels:
            parts.append(f"kernel IN ({', '.join('?' * len(self.kernels))})")
            values += self.kernels
        if self.shapes:
            places = ", ".join(["(?, ?, ?)"] * len(self.shapes))
            parts.append(f"(M, N, K) IN (VALUES {places})")
            values += [size for shape in self.shapes for size in shape]
        for name, value in (("dtype", self.dtype), ("layout", self.layout)):
            if value is not None:
                parts.append(f"{name} = ?")
                values.append(value)
        return " AND ".join(parts), values


ALL = Selection()


@dataclass
class Summary:
    """The trials of one kernel at one workload on GPUs of one model, and its newest winner."""

    gpu: str
    sms: int
    kernel: str
    workload: Workload
    trials: int = 0
    ok: int = 0
    best_us: float | None = None
    winner: BestConfig | None = None
    when: str = ""

    @property
    def failed(self) -> int:
        """The number of trials that are not "ok"."""
        return self.trials - self.ok


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
        self._owner = Owner.here()
        super().__init__(path, rows.SCHEMA, read_only=read_only)

    def close(self) -> None:
        """Give back the claims of this store object, and close the file."""
        if not self.read_only and self._connection is not None:
            with contextlib.suppress(StoreError):
                self.write(lambda connection: _release(connection, str(self._owner), {}))
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
        row = rows.row_of(trial)
        return self.write(lambda connection: _add(connection, trial, row, replace=replace))

    def record_best(self, best: BestConfig) -> None:
        """Store a best config, in place of the one of its GPU, workload, kernel and source.

        Args:
            best: The best config. One without a date gets that of now.

        Raises:
            ValueError: A field has a value that could not be read again.
            StoreError: The store is closed, read-only or cannot be written.
        """
        row = rows.row_of(best)
        self.write(lambda connection: rows.put(connection, "winners", row, best.gpu))

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
        trial_rows = [(trial, rows.row_of(trial)) for trial in trials]
        winner_rows = [(winner, rows.row_of(winner)) for winner in winners]

        def merge(connection: sqlite3.Connection) -> tuple[int, int]:
            added = sum([_add(connection, trial, row) for trial, row in trial_rows])
            newer = 0
            for winner, row in winner_rows:
                stored = rows.select(connection, "winners", rows.key_of("winners", row))
                if not stored or stored[0]["when"] < row["when"]:
                    rows.put(connection, "winners", row, winner.gpu)
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
        """Remove trials and winners to which every given condition applies, and claims of configs.

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
        if dry_run:
            return self.read(lambda connection: _count(connection, condition, values))
        return self._remove(condition, values)

    def clear(self) -> int:
        """Remove everything.

        Returns:
            The number of trials and winners that were removed.

        Raises:
            StoreError: The store is closed, read-only or cannot be written.
        """
        return self._remove("1", [])

    def _remove(self, condition: str, values: Sequence[object]) -> int:
        def remove(connection: sqlite3.Connection) -> int:
            count = _count(connection, condition, values)
            for table in rows.TABLES:
                connection.execute(f"DELETE FROM {table} WHERE {condition}", values)
            used = "SELECT gpu FROM trials UNION SELECT gpu FROM winners"
            connection.execute(f'DELETE FROM gpus WHERE "key" NOT IN ({used})')
            return count

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
        values = _values(kernel, workload, gpu)
        return self.read(lambda c: rows.records(c, Trial, rows.select(c, "trials", values)))

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
        values = _values(kernel, workload, None)
        winners = self.read(
            lambda c: rows.records(c, BestConfig, rows.select(c, "winners", values))
        )
        return [winner for winner in winners if gpu_name in (None, winner.gpu.name)]

    def select(
        self, selection: Selection = ALL, limit: int | None = None
    ) -> tuple[list[Trial], int]:
        """List trials, the fastest of each workload first.

        Args:
            selection: Which trials.
            limit: How many to return at most; None for all.

        Returns:
            The trials, and how many there are without the limit.
        """
        where, values = selection.where()

        def select(connection: sqlite3.Connection) -> tuple[list[Trial], int]:
            total = connection.execute(
                f"SELECT count(*) FROM trials WHERE {where}", values
            ).fetchone()
            selected = connection.execute(
                f"SELECT trials.* FROM trials JOIN gpus ON gpus.key = gpu WHERE {where} ORDER BY "
                f'name, {rows.listed(rows.WORKLOAD)}, us IS NULL, us, "when", id LIMIT ?',
                [*values, -1 if limit is None else limit],
            )
            return rows.records(connection, Trial, selected), total[0]

        return self.read(select)

    def select_winners(self, selection: Selection = ALL) -> list[BestConfig]:
        """List winners by date.

        Args:
            selection: Which winners.

        Returns:
            The best configs, the oldest first.
        """
        where, values = selection.where()
        query = f'SELECT * FROM winners WHERE {where} ORDER BY "when", id'
        return self.read(lambda c: rows.records(c, BestConfig, c.execute(query, values)))

    def summaries(self) -> list[Summary]:
        """Summarize the trials of each kernel at each workload.

        Returns:
            A record for each GPU model, kernel and workload: the numbers of trials, the best time,
            the newest winner.
        """
        return self.read(_summaries)

    def kernels(self) -> list[str]:
        """List the kernels that the store has results of.

        Returns:
            Their names.
        """
        query = "SELECT kernel FROM trials UNION SELECT kernel FROM winners ORDER BY kernel"
        return self.read(lambda connection: [row[0] for row in connection.execute(query)])

    def verify(self) -> None:
        """Check all of the file.

        Raises:
            StoreError: A page or a row is damaged.
        """

        def verify(connection: sqlite3.Connection) -> None:
            for (line,) in connection.execute("PRAGMA integrity_check(1)"):
                if line != "ok":
                    raise sqlite3.DatabaseError(line.splitlines()[-1])
            rows.records(connection, Trial, rows.select(connection, "trials", {}))
            rows.records(connection, BestConfig, rows.select(connection, "winners", {}))

        self.read(verify)

    # Claims.

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
        """Claim a config, so that no other process measures it; see `store.claims`.

        A claim ends with `add`, `release` or `close`, and with the process.

        Args:
            gpu: The GPU and its software.
            workload: The product.
            kernel: The name of the kernel.
            source: The fingerprint of the kernel's source.
            config: The config as text.
            again: Whether to claim it although there is a trial.

        Returns:
            Whether the claim was granted, or the trial that there is, or that another holds it.

        Raises:
            StoreError: The store is closed, read-only or cannot be written.
        """
        key = _identity(gpu, workload, kernel, source, config)

        def claim(connection: sqlite3.Connection) -> Claim:
            stored = [] if again else rows.select(connection, "trials", key)
            if stored:
                return Claim(trial=rows.records(connection, Trial, stored)[0])
            losses, taken_over = 0, False
            for row in rows.select(connection, "claims", key):
                losses, taken_over = row["machine_losses"], row["owner"] != ""
                if taken_over:
                    owner = Owner.parse(row["owner"])
                    if not claims.is_free(owner, self._owner, row["when"]):
                        return Claim(held=True)
                    losses += owner.went_down(self._owner)
            facts = {"owner": str(self._owner), "when": now(), "machine_losses": losses}
            rows.insert(connection, "claims", {**key, **facts})
            return Claim(granted=True, taken_over=taken_over, machine_losses=losses)

        return self.write(claim)

    def release(self, *facts: *Facts) -> None:
        """Give the claim of a config back without a result.

        Args:
            *facts: The GPU, the workload, the kernel, its source and the config, as in `claim`.
        """
        key = _identity(*facts)
        self.write(lambda connection: _release(connection, str(self._owner), key))


def _identity(gpu: Gpu, workload: Workload, kernel: str, source: str, config: str) -> Row:
    """Returns the key of a trial's row and of its claim."""
    return {"gpu": gpu.key, **vars(workload), "kernel": kernel, "source": source, "config": config}


def _values(kernel: str | None, workload: Workload | None, gpu: str | None) -> Row:
    """Returns the columns whose values are given."""
    columns = {"kernel": kernel, "gpu": gpu, **(vars(workload) if workload else {})}
    return {name: value for name, value in columns.items() if value is not None}


def _add(connection: sqlite3.Connection, trial: Trial, row: Row, *, replace: bool = False) -> bool:
    key = rows.key_of("trials", row)
    connection.execute(f"DELETE FROM claims WHERE {rows.equal(key)}", key)
    for old in rows.select(connection, "trials", key):
        by_chance = old["status"] in CIRCUMSTANTIAL and trial.status in ("ok", "wrong")
        if not (replace or by_chance):
            return False
    rows.put(connection, "trials", row, trial.gpu)
    return True


def _release(connection: sqlite3.Connection, owner: str, key: Row) -> None:
    """Ends an owner's claims on a config, or all for an empty key; counts of lost machines stay."""
    values = {**key, "owner": owner}
    where = rows.equal(values)
    connection.execute(f"DELETE FROM claims WHERE {where} AND machine_losses = 0", values)
    connection.execute(f"UPDATE claims SET owner = '' WHERE {where}", values)


def _count(connection: sqlite3.Connection, condition: str, values: Sequence[object]) -> int:
    return sum(
        connection.execute(f"SELECT count(*) FROM {table} WHERE {condition}", values).fetchone()[0]
        for table in ("trials", "winners")
    )


def _to_prune(
    older_than_days: float | None, kernel: str | None, sources: Mapping[str, str] | None
) -> tuple[str, list[object]]:
    """Returns the condition for what is removed, and its values. Raises ValueError."""
    parts, values = list[str](), list[object]()
    if older_than_days is not None:
        if not 0 <= older_than_days <= 365_000:
            raise ValueError(
                f"older_than_days is {older_than_days}, expected a number from 0 to 365000"
            )
        limit = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=older_than_days)
        parts.append('"when" < ?')
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


def _summaries(connection: sqlite3.Connection) -> list[Summary]:
    summaries: dict[object, Summary] = {}

    def summary(gpu: tuple[str, int], kernel: str, workload: Workload) -> Summary:
        return summaries.setdefault((gpu, kernel, workload), Summary(*gpu, kernel, workload))

    place = f"name, sms, {rows.listed(rows.WORKLOAD)}, kernel"
    counts = f"""SELECT {place}, count(*) AS trials,
        sum(status = 'ok') AS ok, min(us) AS us, max("when") AS latest
        FROM trials JOIN gpus ON gpus.key = gpu GROUP BY {place}"""
    for row in connection.execute(counts):
        line = summary((row["name"], row["sms"]), row["kernel"], rows.workload_of(row))
        line.trials, line.ok, line.best_us, line.when = (
            row[name] for name in ("trials", "ok", "us", "latest")
        )
    for winner in rows.records(connection, BestConfig, rows.select(connection, "winners", {})):
        line = summary(winner.gpu.model, winner.kernel, winner.workload)
        line.winner, line.when = winner, max(line.when, winner.when)
    return [summaries[place] for place in sorted(summaries)]  # type: ignore[type-var]

"""Queries over many trials, answered by SQLite row by row, so that memory does not grow with the
number of trials.
"""

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.shapes import Shape
from . import queries, validation
from .config_aliases import current_text
from .records import BestConfig, Gpu, Trial, TunedConfig, Workload, age, latest_date

_WORKLOAD = "M, N, K, dtype, out_dtype, layout, weights, epilogue, grouping"


@dataclass(frozen=True)
class Selection:
    """Selects records: of any of these kernels, of any of these shapes, of this dtype and layout.
    An empty field, or None, selects all.
    """

    kernels: Sequence[str] = ()
    shapes: Sequence[Shape] = ()
    dtype: str | None = None
    layout: str | None = None

    def where(self, table: str) -> tuple[str, list[object]]:
        """Returns a condition on the rows of a table, and its values."""
        parts, values = ["1"], list[object]()
        if self.kernels:
            parts.append(f"{table}.kernel IN ({', '.join('?' * len(self.kernels))})")
            values += self.kernels
        if self.shapes:
            parts.append(
                f"({table}.M, {table}.N, {table}.K) IN (VALUES "
                f"{', '.join(['(?, ?, ?)'] * len(self.shapes))})"
            )
            values += [size for shape in self.shapes for size in shape]
        for name, value in (("dtype", self.dtype), ("layout", self.layout)):
            if value is not None:
                parts.append(f"{table}.{name} = ?")
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
    winner: dict[str, Any] | None = None  # the columns of `WINNER`
    when: str = ""
    _won: str = field(default="", repr=False)  # the age of the winner

    @property
    def failed(self) -> int:
        return self.trials - self.ok

    @property
    def place(self) -> tuple[tuple[str, int], str, Workload]:
        return (self.gpu, self.sms), self.kernel, self.workload


WINNER = ("config", "us", "ratio", "ratio_low", "ratio_high")


def summaries(connection: sqlite3.Connection) -> list[Summary]:
    """Returns summaries by GPU, kernel and workload. Rows that name no valid GPU, kernel or
    workload are left out, and so are invalid winners; trials are counted without checking their
    other fields.
    """
    gpus, _ = queries.gpus_of(queries.select(connection, "gpus"))
    found: dict[object, Summary] = {}
    for row in connection.execute(_COUNTS):
        if summary := _place_of(row, gpus, found):
            summary.trials += row["trials"]
            if row["status"] == "ok":
                summary.ok += row["trials"]
            if validation.holds(row, ("us",)):
                summary.best_us = min(row["us"], summary.best_us or row["us"])
            if validation.holds(row, ("when",)):
                summary.when = max(summary.when, row["when"])
    latest = latest_date()
    for row in connection.execute(
        f'SELECT {_WORKLOAD}, kernel, gpu, "when", {", ".join(WINNER)} FROM winners'
    ):
        summary = _place_of(row, gpus, found) if validation.holds(row, ("when", *WINNER)) else None
        if summary:
            summary.when = max(summary.when, row["when"])
            if summary.winner is None or age(row["when"], latest) >= summary._won:
                summary._won = age(row["when"], latest)
                summary.winner = {name: row[name] for name in WINNER}
                config = current_text(row["kernel"], row["config"])
                summary.winner["config"] = config
    return sorted(found.values(), key=lambda summary: summary.place)


# In the order of the index `trials_by_workload`, so that SQLite sorts nothing and does not read the
# table itself.
_COUNTS = f"""SELECT {_WORKLOAD}, kernel, gpu, status, count(*) AS trials, min(us) AS us,
    max("when") AS "when" FROM trials GROUP BY {_WORKLOAD}, kernel, gpu, status"""


def _place_of(
    row: sqlite3.Row, gpus: dict[str, Gpu], found: dict[object, Summary]
) -> Summary | None:
    """Returns the summary that a row belongs to; None where the row names no valid GPU, kernel or
    workload.
    """
    gpu = gpus.get(row["gpu"])
    if gpu is None or not validation.holds(row, ("kernel",)):
        return None
    try:
        sizes = validation.checked(
            {name: row[name] for name in validation.WORKLOAD}, validation.WORKLOAD, "workload"
        )
        made = Summary(*gpu.model, row["kernel"], validation.workload_of(sizes, "workload"))
    except ValueError:
        return None
    return found.setdefault(made.place, made)


def tuned(connection: sqlite3.Connection, name: str, sms: int) -> list[TunedConfig]:
    """Returns what a lookup needs of the winners on GPUs of one model, ordered by age."""
    gpus, _ = queries.gpus_of(queries.select(connection, "gpus", {"name": name, "sms": sms}))
    if not gpus:
        return []
    query = f"""SELECT * FROM winners WHERE gpu IN ({", ".join(["?"] * len(gpus))})
        ORDER BY CASE WHEN "when" > ? THEN '' ELSE "when" END, id"""
    found = []
    for row in connection.execute(query, [*gpus, latest_date()]):
        with contextlib.suppress(ValueError):
            queries.check_digest("winners", row, "")
            found.append(validation.tuned_of(row, gpus))
    return found


def browse(
    connection: sqlite3.Connection, wanted: Selection, limit: int | None
) -> tuple[list[Trial], int]:
    """Returns the first trials by GPU, workload and speed, failed ones last, and the number of all
    selected trials.
    """
    where, values = wanted.where("trials")
    total: int = connection.execute(
        f"SELECT count(*) FROM trials WHERE {where}", values
    ).fetchone()[0]
    query = f"""SELECT trials.* FROM trials LEFT JOIN gpus ON gpus."key" = trials.gpu WHERE {where}
        ORDER BY gpus.name, {_WORKLOAD}, us IS NULL, us, "when", trials.id LIMIT ?"""
    gpus, _ = queries.gpus_of(queries.select(connection, "gpus"))
    found = connection.execute(query, [*values, -1 if limit is None else limit])
    trials = _valid(connection, "trials", found, gpus)
    return [record for record in trials if isinstance(record, Trial)], total


def stream(
    connection: sqlite3.Connection, wanted: Selection
) -> tuple[Iterator[Trial], Iterator[BestConfig]]:
    """Returns the trials and the winners in the order in which they were stored. Both show the same
    moment while the connection has a transaction.
    """
    gpus, _ = queries.gpus_of(queries.select(connection, "gpus"))

    def records(table: str) -> Iterator[Any]:
        where, values = wanted.where(table)
        found = connection.execute(f"SELECT * FROM {table} WHERE {where} ORDER BY id", values)
        return _valid(connection, table, found, gpus)

    return records("trials"), records("winners")


def _valid(
    connection: sqlite3.Connection, table: str, found: sqlite3.Cursor, gpus: dict[str, Gpu]
) -> Iterator[Trial | BestConfig]:
    for row in found:
        if table == "trials" and queries.is_superseded(connection, row):
            continue
        with contextlib.suppress(ValueError):
            yield queries.parse(table, row, gpus)


def kernels(connection: sqlite3.Connection) -> list[str]:
    """Returns the kernels that have trials or winners. It steps from each name to the next, without
    visiting every row.
    """
    found = set()
    for table in ("trials", "winners"):
        name = ""
        while row := connection.execute(
            f"SELECT kernel FROM {table} WHERE kernel > ? ORDER BY kernel LIMIT 1", (name,)
        ).fetchone():
            name = row["kernel"]
            found.add(name)
    return sorted(found)

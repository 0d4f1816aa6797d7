"""The tables of a store: its columns, and records as rows."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from outblas.autotune.store import fields
from outblas.autotune.store.records import BestConfig, Finalist, Gpu, Trial, Workload, now

T = TypeVar("T", Trial, BestConfig)
Row = Mapping[str, Any]


def _names(kind: type) -> tuple[str, ...]:
    """Returns the columns of a record: its fields, those of its workload in place of that."""
    names = [column.name for column in dataclasses.fields(kind)]
    return tuple(column for name in names for column in ([name], WORKLOAD)[name == "workload"])


WORKLOAD = [column.name for column in dataclasses.fields(Workload)]
_PLACE = (*WORKLOAD, "kernel", "gpu", "source")  # of a winner; a trial and a claim have a config
KEYS = {"trials": (*_PLACE, "config"), "winners": _PLACE, "claims": (*_PLACE, "config")}
TABLES = {
    "trials": _names(Trial),
    "winners": _names(BestConfig),
    "claims": (*KEYS["claims"], "owner", "when", "machine_losses"),
}


def listed(names: Iterable[str]) -> str:
    """Returns the names of columns as SQL lists them."""
    return ", ".join(f'"{name}"' for name in names)


# Columns have no types, so that SQLite returns each value as it was stored.
SCHEMA = (
    f"CREATE TABLE gpus (key PRIMARY KEY, {listed(_names(Gpu))})",
    *(
        f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, {listed(names)}, "
        f"UNIQUE ({listed(KEYS[table])}))"
        for table, names in TABLES.items()
    ),
)


def key_of(table: str, row: Row) -> Row:
    """Returns the columns that tell a row of this table from all others."""
    return {name: row[name] for name in KEYS[table]}


def row_of(record: Trial | BestConfig) -> Row:
    """Returns the columns of a record. Raises ValueError."""
    dated = dataclasses.replace(record, when=record.when or now())
    if isinstance(dated, Trial):
        reason = dated.reason.encode(errors="replace").decode()[: fields.TEXT_LIMIT]
        dated = dataclasses.replace(dated, reason=reason)
    row = fields.to_fields(dated)
    row |= row.pop("workload") | {"gpu": record.gpu.key}
    if "finalists" in row:
        row["finalists"] = json.dumps(row["finalists"])
    return row


def equal(values: Row) -> str:
    """Returns the condition that columns have these values; they are the query's parameters."""
    return " AND ".join(f'"{name}" = :{name}' for name in values) or "1"


def select(connection: sqlite3.Connection, table: str, values: Row) -> list[sqlite3.Row]:
    """Returns the rows with these values, ordered by date."""
    query = f'SELECT * FROM {table} WHERE {equal(values)} ORDER BY "when", id'
    return connection.execute(query, values).fetchall()


def records(connection: sqlite3.Connection, kind: type[T], rows: Iterable[sqlite3.Row]) -> list[T]:
    """Returns the records of rows. Raises sqlite3.DatabaseError for one that is damaged."""
    gpus = {
        row["key"]: Gpu(*(row[name] for name in _names(Gpu)))
        for row in connection.execute("SELECT * FROM gpus")
    }
    names = [column.name for column in dataclasses.fields(kind) if column.name != "workload"]
    built = []
    for row in rows:
        try:
            values = {name: row[name] for name in names}
            values["gpu"], values["workload"] = gpus[row["gpu"]], workload_of(row)
            if kind is BestConfig:
                finalists = json.loads(row["finalists"])
                values["finalists"] = tuple(Finalist(**finalist) for finalist in finalists)
                values["separated"] = bool(row["separated"])
            built.append(kind(**values))
        except (ValueError, TypeError, KeyError) as error:
            raise sqlite3.DatabaseError(f"row {row['id']}: {error}") from None
    return built


def workload_of(row: Row | sqlite3.Row) -> Workload:
    """Returns the workload whose fields are columns of a row."""
    return Workload(*(row[name] for name in WORKLOAD))


def insert(connection: sqlite3.Connection, table: str, row: Row) -> None:
    """Inserts a row in place of the one with its key."""
    values = ", ".join(f":{name}" for name in row)
    connection.execute(f"INSERT OR REPLACE INTO {table} ({listed(row)}) VALUES ({values})", row)


def put(connection: sqlite3.Connection, table: str, row: Row, gpu: Gpu) -> None:
    """Inserts the row of a record, and its GPU."""
    insert(connection, "gpus", {"key": row["gpu"], **vars(gpu)})
    insert(connection, table, row)

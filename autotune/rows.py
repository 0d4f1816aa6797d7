"""Rows of the store and the records that they hold, and what is done to them within a transaction."""

import contextlib
import dataclasses
import datetime
import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from . import checks
from .records import Gpu, Trial, Winner, Workload

T = TypeVar("T")
Operation = Callable[[sqlite3.Connection], T]
Row = Mapping[str, Any]

_WORKLOAD = tuple(field.name for field in dataclasses.fields(Workload))
_GPU = tuple(field.name for field in dataclasses.fields(Gpu))
_PLACE = ("kernel", *_WORKLOAD, "gpu", "source")  # by kernel and workload first, as rows are looked up
KEYS = {"trials": (*_PLACE, "config"), "winners": _PLACE, "leases": (*_PLACE, "config")}
_PARSERS: dict[str, Callable[[object, str, Mapping[str, Gpu]], Trial | Winner]] = {
    "trials": checks.trial_of,
    "winners": checks.winner_of,
}

_SHARED = """id INTEGER PRIMARY KEY, gpu TEXT NOT NULL,
    M INTEGER NOT NULL, N INTEGER NOT NULL, K INTEGER NOT NULL,
    dtype TEXT NOT NULL, out_dtype TEXT NOT NULL, layout TEXT NOT NULL,
    kernel TEXT NOT NULL, source TEXT NOT NULL, config TEXT NOT NULL, "when" TEXT NOT NULL"""
# power_limit_w has no type: the key of a GPU tells 700 from 700.0.
SCHEMA = {
    "gpus": """CREATE TABLE gpus ("key" TEXT PRIMARY KEY, name TEXT, arch INTEGER, sms INTEGER, power_limit_w,
    driver TEXT, cuda TEXT, torch TEXT, triton TEXT, dsl TEXT)""",
    "trials": f"""CREATE TABLE trials ({_SHARED},
    status TEXT NOT NULL, reason TEXT NOT NULL, us REAL, ratio REAL, ratio_low REAL, ratio_high REAL,
    clock_mhz REAL, predicted_us REAL, compile_s REAL, UNIQUE ({", ".join(KEYS["trials"])}))""",
    "winners": f"""CREATE TABLE winners ({_SHARED},
    us REAL, cublas_us REAL, ratio REAL, ratio_low REAL, ratio_high REAL, rounds INTEGER, runner_up TEXT,
    lead REAL, lead_low REAL, lead_high REAL, confidence REAL, separated INTEGER, screened INTEGER, valid INTEGER,
    finalists TEXT NOT NULL, UNIQUE ({", ".join(KEYS["winners"])}))""",
    "leases": f"""CREATE TABLE leases ({_SHARED},
    owner TEXT NOT NULL, beat INTEGER NOT NULL, machine_losses INTEGER NOT NULL,
    UNIQUE ({", ".join(KEYS["leases"])}))""",
}


def select(connection: sqlite3.Connection, table: str, wanted: Row | None = None) -> list[sqlite3.Row]:
    """The rows that have what is `wanted` and not None, by date."""
    given = {name: value for name, value in (wanted or {}).items() if value is not None}
    where = " AND ".join(f'"{name}" = :{name}' for name in given) or "1"
    order = '"key"' if table == "gpus" else '"when", id'
    return connection.execute(f"SELECT * FROM {table} WHERE {where} ORDER BY {order}", given).fetchall()


def parse(table: str, row: sqlite3.Row, gpus: Mapping[str, Gpu]) -> Trial | Winner:
    """Raises ValueError that names the row and the field."""
    return _PARSERS[table](_fields(row), f"{table}[{row['id']}]", gpus)


def _fields(row: sqlite3.Row) -> checks.Fields:
    """A row in the form that JSON files have, unchecked."""
    fields = {name: row[name] for name in row.keys() if name != "id"}  # noqa: SIM118
    fields["workload"] = {name: fields.pop(name) for name in _WORKLOAD}
    if "finalists" in fields:
        fields["separated"] = {0: False, 1: True}.get(fields["separated"], fields["separated"])
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            fields["finalists"] = json.loads(fields["finalists"])
    return fields


def _row(record: Trial | Winner) -> dict[str, Any]:
    """The columns of a record. Raises ValueError."""
    fields = checks.checked_fields(record, type(record).__name__.lower())
    fields |= fields.pop("workload")
    return fields | ({"finalists": json.dumps(fields["finalists"])} if "finalists" in fields else {})


def gpus_of(rows: Iterable[sqlite3.Row]) -> tuple[dict[str, Gpu], list[str]]:
    """GPUs by key, and what is wrong with the others."""
    gpus, problems = {}, []
    for row in rows:
        place = f"gpus[{row['key']!r}]"
        try:
            gpu = checks.gpu_of({name: row[name] for name in _GPU}, place)
        except ValueError as error:
            problems.append(str(error))
            continue
        if gpu.key == row["key"]:
            gpus[gpu.key] = gpu
        else:
            problems.append(f"{place} is the key of another GPU, expected {gpu.key!r}")
    return gpus, problems


def _insert(connection: sqlite3.Connection, table: str, row: Row) -> None:
    """In place of one of the same identity."""
    columns = ", ".join(f'"{name}"' for name in row)
    values = ", ".join(f":{name}" for name in row)
    connection.execute(f"INSERT OR REPLACE INTO {table} ({columns}) VALUES ({values})", row)


def there(connection: sqlite3.Connection, table: str, row: Row) -> Trial | Winner | None:
    """The valid record of a row's identity."""
    found = select(connection, table, {name: row[name] for name in KEYS[table]})
    if not found:
        return None
    gpus, _ = gpus_of(select(connection, "gpus", {"key": row["gpu"]}))
    try:
        return parse(table, found[0], gpus)
    except ValueError:
        return None


def _put(connection: sqlite3.Connection, table: str, row: Row, gpu: Gpu) -> None:
    facts = {"key": row["gpu"], **vars(gpu)}
    known = select(connection, "gpus", {"key": row["gpu"]})
    if not known or dict(known[0]) != facts:
        _insert(connection, "gpus", facts)
    _insert(connection, table, row)


def adding(trial: Trial, *, replace: bool = False) -> Operation[bool]:
    """Stores it unless it is there; whether it did. Ends the lease of its config. Raises ValueError, at once."""
    row = _row(trial)

    def add(connection: sqlite3.Connection) -> bool:
        end_lease(connection, row)
        if not replace and there(connection, "trials", row):
            return False
        _put(connection, "trials", row, trial.gpu)
        return True

    return add


def crowning(winner: Winner, *, only_newer: bool = False) -> Operation[bool]:
    """Stores it unless a newer is there, or one as new; whether it did. Raises ValueError, at once."""
    row = _row(winner)

    def crown(connection: sqlite3.Connection) -> bool:
        found = there(connection, "winners", row)
        if found and (found.when > row["when"] or (only_newer and found.when == row["when"])):
            return False
        _put(connection, "winners", row, winner.gpu)
        return True

    return crown


def identity(gpu: Gpu, workload: Workload, kernel: str, source: str, config: str) -> dict[str, Any]:
    """The key of a trial's row, and of one of `leases`."""
    return {"gpu": gpu.key, **vars(workload), "kernel": kernel, "source": source, "config": config}


def end_lease(connection: sqlite3.Connection, trial: Row) -> None:
    """Of a config that has a trial, whoever holds it."""
    key = {name: trial[name] for name in KEYS["leases"]}
    where = " AND ".join(f'"{name}" = :{name}' for name in key)
    connection.execute(f"DELETE FROM leases WHERE {where}", key)


def removing(older_than_days: float | None, kernel: str | None, sources: Mapping[str, str] | None) -> Operation[int]:
    """Removes trials and winners to which all applies that is given; how many. Raises ValueError, at once."""
    parts: list[str] = []
    values: list[object] = []
    if older_than_days is not None:
        if not 0 <= older_than_days <= 365_000:
            raise ValueError(f"older_than_days is {older_than_days}, expected a number from 0 to 365000")
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
        raise ValueError("nothing says what to prune, expected older_than_days, kernel or sources")
    condition = " AND ".join(f"({part})" for part in parts)

    def remove(connection: sqlite3.Connection) -> int:
        counts = [connection.execute(f"DELETE FROM {table} WHERE {condition}", values).rowcount for table in KEYS]
        used = "SELECT gpu FROM trials UNION SELECT gpu FROM winners"
        connection.execute(f'DELETE FROM gpus WHERE "key" NOT IN ({used})')
        return sum(counts[:2])  # without leases

    return remove

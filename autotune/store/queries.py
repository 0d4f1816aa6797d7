"""Rows of the store and the records that they hold, and the operations on them within a
transaction.
"""

import contextlib
import dataclasses
import functools
import json
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from . import validation
from .config_aliases import current_text, spellings
from .records import CIRCUMSTANTIAL, BestConfig, Gpu, Trial, Workload, age, latest_date

T = TypeVar("T")
Operation = Callable[[sqlite3.Connection], T]
Row = Mapping[str, Any]

_WORKLOAD = tuple(field.name for field in dataclasses.fields(Workload))
_GPU = tuple(field.name for field in dataclasses.fields(Gpu))
# Kernel and workload come first, because rows are looked up by them.
_PLACE = ("kernel", *_WORKLOAD, "gpu", "source")
KEYS = {"trials": (*_PLACE, "config"), "winners": _PLACE, "leases": (*_PLACE, "config")}
_PARSERS: dict[str, Callable[[object, str, Mapping[str, Gpu]], Trial | BestConfig]] = {
    "trials": validation.trial_of,
    "winners": validation.best_config_of,
}

PROBE = 1 << 18  # bytes: as many as the results of some minutes take
_ANY_GPU = Gpu("any", 0, 0)

_SHARED = """id INTEGER PRIMARY KEY, gpu TEXT NOT NULL,
    M INTEGER NOT NULL, N INTEGER NOT NULL, K INTEGER NOT NULL,
    dtype TEXT NOT NULL, out_dtype TEXT NOT NULL, layout TEXT NOT NULL,
    weights TEXT NOT NULL DEFAULT 'warm', epilogue TEXT NOT NULL DEFAULT '',
    grouping TEXT NOT NULL DEFAULT '',
    kernel TEXT NOT NULL, source TEXT NOT NULL, config TEXT NOT NULL, "when" TEXT NOT NULL"""
# The schema of `migrations.VERSION`. power_limit_w has no type, because the key of a GPU
# distinguishes 700 from 700.0.
SCHEMA = {
    "gpus": """CREATE TABLE gpus (
    "key" TEXT PRIMARY KEY, name TEXT, arch INTEGER, sms INTEGER, power_limit_w,
    driver TEXT, cuda TEXT, torch TEXT, triton TEXT, dsl TEXT)""",
    "trials": f"""CREATE TABLE trials ({_SHARED},
    status TEXT NOT NULL, reason TEXT NOT NULL,
    us REAL, ratio REAL, ratio_low REAL, ratio_high REAL,
    clock_mhz REAL, predicted_us REAL, compile_s REAL, digest INTEGER,
    UNIQUE ({", ".join(KEYS["trials"])}))""",
    "winners": f"""CREATE TABLE winners ({_SHARED},
    us REAL, cublas_us REAL, ratio REAL, ratio_low REAL, ratio_high REAL, rounds INTEGER,
    runner_up TEXT, lead REAL, lead_low REAL, lead_high REAL, confidence REAL, separated INTEGER,
    screened INTEGER, valid INTEGER,
    finalists TEXT NOT NULL, digest INTEGER, UNIQUE ({", ".join(KEYS["winners"])}))""",
    "leases": f"""CREATE TABLE leases ({_SHARED},
    owner TEXT NOT NULL, beat INTEGER NOT NULL, machine_losses INTEGER NOT NULL,
    UNIQUE ({", ".join(KEYS["leases"])}))""",
}
# The columns that rows of older versions lack, with the values that they stand for. Tables of older
# versions may lack them. The checksum of a row leaves them out where they have these values, so
# that rows of an older version keep their checksums.
_NEW: Mapping[str, str] = validation.NEW_IN_WORKLOAD
# The trials of a workload are looked up by this index; it contains everything that a summary of
# trials needs, in order.
INDEXES = {
    "trials_by_workload": """CREATE INDEX IF NOT EXISTS trials_by_workload
    ON trials (M, N, K, dtype, out_dtype, layout, weights, epilogue, grouping, kernel, gpu,
    status, us, "when")"""
}


# Orders winners like `records.age`; needs :latest.
BY_AGE = """CASE WHEN "when" > :latest THEN '' ELSE "when" END, id"""


@functools.cache
def columns(table: str) -> tuple[str, ...]:
    """Returns the names of a table's columns, in order."""
    with contextlib.closing(sqlite3.connect(":memory:")) as memory:
        memory.execute(SCHEMA[table])
        return columns_there(memory, table)


def columns_there(connection: sqlite3.Connection, table: str) -> tuple[str, ...]:
    """Returns the names of the columns that a table has in a file; none if the table does not
    exist.
    """
    return tuple(row[1] for row in connection.execute(f"PRAGMA table_info({table})"))


def lacking(connection: sqlite3.Connection, *, new: bool = True) -> str:
    """Returns, in words, what a file of the newest version must have and lacks; "" if nothing. If
    it is not `new`, checks only what the oldest version has too.

    Columns are compared by name, so that white space in a statement and added columns do not
    matter.
    """
    for table in ("gpus", "trials", "winners", "leases") if new else ("gpus", "trials", "winners"):
        there = columns_there(connection, table)
        spared = () if new else (*_NEW, "digest")
        missing = [name for name in columns(table) if name not in (*there, *spared)]
        if missing:
            return f"table {table} lacks {', '.join(missing) if there else 'all columns'}"
        key = tuple(name for name in KEYS.get(table, ()) if name in there)
        if key and key not in _unique(connection, table):
            return f"table {table} allows two rows of one identity"
    return ""


def _unique(connection: sqlite3.Connection, table: str) -> list[tuple[str, ...]]:
    """Returns the columns of each unique index of a table."""
    indexes = [row[1] for row in connection.execute(f"PRAGMA index_list({table})") if row[2]]
    return [
        tuple(row[2] for row in connection.execute(f'PRAGMA index_info("{name}")'))
        for name in indexes
    ]


@functools.cache
def _digested(table: str) -> tuple[tuple[str, bool], ...]:
    """Returns the columns that the digest of a row covers, and whether SQLite converts their values
    to floats.
    """
    with contextlib.closing(sqlite3.connect(":memory:")) as memory:
        memory.execute(SCHEMA[table])
        found = [
            (row[1], row[2] == "REAL") for row in memory.execute(f"PRAGMA table_info({table})")
        ]
    without = {"id", "digest", *_NEW}
    return tuple((name, is_real) for name, is_real in found if name not in without)


@functools.lru_cache(maxsize=16)
def _places(table: str, names: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the positions of a digest's columns among these, because looking up each column of a
    row by name takes several times as long.
    """
    return tuple(names.index(name) for name, _ in _digested(table))


def _new(row: validation.Columns) -> dict[str, Any]:
    """Returns a row's values in the columns of `_NEW`, or their defaults where the row lacks
    them.
    """
    there = row.keys()
    return {name: row[name] if name in there else plain for name, plain in _NEW.items()}


def _as_stored(value: Any, is_real: bool) -> Any:
    """Returns the value that SQLite returns after storing this one."""
    if value is not None and is_real:
        return float(value)
    return int(value) if type(value) is bool else value


def digest(table: str, row: validation.Columns) -> int:
    """Returns a checksum of a row's contents. SQLite has none, and a page of a file can be altered
    and still be readable.

    Raises ValueError, TypeError or OverflowError for values that no row of the table can hold.
    """
    if isinstance(row, sqlite3.Row):
        whole = tuple(row)
        values = [whole[place] for place in _places(table, tuple(row.keys()))]
    else:
        values = [_as_stored(row[name], is_real) for name, is_real in _digested(table)]
    values += [item for item in _new(row).items() if item[1] != _NEW[item[0]]]
    return zlib.crc32(repr(values).encode("utf-8", "surrogateescape"))


def check_digest(table: str, row: validation.Columns, place: str) -> None:
    """Raises ValueError for a row that differs from what was stored. A row of the oldest version,
    which has no digest, passes.
    """
    stored = row["digest"] if "digest" in row.keys() else None  # noqa: SIM118
    if stored is None:
        return
    try:
        intact = stored == digest(table, row)
    except (ValueError, TypeError, OverflowError):
        intact = False
    if not intact:
        raise ValueError(
            f"{place} was changed after it was stored: its checksum is {validation.shown(stored)}, "
            "expected another"
        )


def select(
    connection: sqlite3.Connection, table: str, wanted: Row | None = None
) -> list[sqlite3.Row]:
    """Returns the rows whose columns equal the values of `wanted` that are not None, ordered by
    date; winners by their `age`.

    The values are compared again after the query, because rows are found by an index, which may be
    damaged.
    """
    asked = {name: value for name, value in (wanted or {}).items() if value is not None}
    given = asked
    where = " AND ".join(f'"{name}" = :{name}' for name in asked) or "1"
    order = {"gpus": '"key"', "winners": BY_AGE}.get(table, '"when", id')
    if table == "winners":
        given = {**asked, "latest": latest_date()}
    found = connection.execute(
        f"SELECT * FROM {table} WHERE {where} ORDER BY {order}", given
    ).fetchall()
    return [row for row in found if all(row[name] == value for name, value in asked.items())]


def parse(table: str, row: validation.Columns, gpus: Mapping[str, Gpu]) -> Trial | BestConfig:
    """Returns the record of a row. Raises ValueError that names the row and the field."""
    place = f"{table}[{row['id']}]"
    record = _PARSERS[table](_fields(table, row), place, gpus)
    check_digest(table, row, place)
    return record


def problems(connection: sqlite3.Connection) -> list[str]:
    """Returns the errors in all rows, one message per row."""
    gpus, found = gpus_of(select(connection, "gpus"))
    for table in _PARSERS:
        for row in connection.execute(f"SELECT * FROM {table} ORDER BY id"):
            try:
                parse(table, row, gpus)
            except ValueError as error:
                found.append(str(error))
    for table, name, least in (("leases", "beat", 0), ("leases", "machine_losses", 0)):
        if not columns_there(connection, table):  # a table that an older version lacks
            continue
        for row in connection.execute(f"SELECT id, {name} FROM {table}"):
            if type(row[name]) is not int or row[name] < least:
                place = f"{table}[{row['id']}].{name}"
                found.append(
                    f"{place} is {validation.shown(row[name])}, "
                    f"expected an integer of at least {least}"
                )
    return found


def _fields(table: str, row: validation.Columns) -> validation.Fields:
    """Converts a row, unchecked, to the form of JSON files."""
    try:
        fields = {name: row[name] for name, _ in _digested(table)}
    except IndexError:  # somebody has dropped it since the file was opened
        raise sqlite3.DatabaseError(f"table {table} lacks a column") from None
    fields |= _new(row)
    fields["workload"] = {name: fields.pop(name) for name in _WORKLOAD}
    if "finalists" in fields:
        fields["separated"] = {0: False, 1: True}.get(fields["separated"], fields["separated"])
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            fields["finalists"] = json.loads(fields["finalists"])
    return fields


def _row(record: Trial | BestConfig) -> dict[str, Any]:
    """Returns the columns of a record. Raises ValueError."""
    table = "trials" if isinstance(record, Trial) else "winners"
    fields = validation.checked_fields(record, table[:-1])
    fields |= fields.pop("workload") | vars(record.workload)
    if "finalists" in fields:
        fields["finalists"] = json.dumps(fields["finalists"])
    return fields | {"digest": digest(table, fields)}


def gpus_of(rows: Iterable[sqlite3.Row]) -> tuple[dict[str, Gpu], list[str]]:
    """Returns the valid GPUs by key, and messages about the others."""
    gpus, problems = {}, []
    for row in rows:
        place = f"gpus[{row['key']!r}]"
        try:
            gpu = validation.gpu_of({name: row[name] for name in _GPU}, place)
        except ValueError as error:
            problems.append(str(error))
            continue
        if gpu.key == row["key"]:
            gpus[gpu.key] = gpu
        else:
            problems.append(f"{place} is the key of another GPU, expected {gpu.key!r}")
    return gpus, problems


def could_be_valid(table: str, row: Row) -> bool:
    """Returns whether a row is a valid record, or becomes one once its GPU is known."""
    place = f"{table}[]"
    try:
        if table == "gpus":
            return bool(
                validation.gpu_of({name: row[name] for name in _GPU}, place).key == row["key"]
            )
        if table in _PARSERS:
            _PARSERS[table](_fields(table, row), place, {row["gpu"]: _ANY_GPU})
            check_digest(table, row, place)
    except (ValueError, KeyError, TypeError):
        return False
    return True


def _insert(
    connection: sqlite3.Connection, table: str, row: Row, conflict: str = "REPLACE"
) -> bool:
    """Inserts a row in place of the one with the same identity, unless `conflict` says otherwise.
    Returns whether it is in the table now.
    """
    columns = ", ".join(f'"{name}"' for name in row)
    values = ", ".join(f":{name}" for name in row)
    done = connection.execute(
        f"INSERT OR {conflict} INTO {table} ({columns}) VALUES ({values})", row
    )
    return done.rowcount == 1


def there(connection: sqlite3.Connection, table: str, row: Row) -> Trial | BestConfig | None:
    """Returns the valid record with a row's identity, whichever names of fields its config is
    stored with.
    """
    found = _of_identity(connection, table, row)
    if not found:
        return None
    gpus, _ = gpus_of(select(connection, "gpus", {"key": row["gpu"]}))
    for each in found:
        with contextlib.suppress(ValueError):
            return parse(table, each, gpus)
    return None


def _of_identity(connection: sqlite3.Connection, table: str, row: Row) -> list[sqlite3.Row]:
    """Returns the rows with a row's identity: one for each spelling of its config, the current
    names of fields first.
    """
    identity = {name: row[name] for name in KEYS[table]}
    if "config" not in identity:
        return select(connection, table, identity)
    texts = spellings(row["kernel"], row["config"])
    return [
        each for text in texts for each in select(connection, table, identity | {"config": text})
    ]


def is_superseded(connection: sqlite3.Connection, row: sqlite3.Row) -> bool:
    """Returns whether a trial's row has old names of config fields, and another row has the same
    trial with the current names. Programs of two versions that share a store can leave both.
    """
    kernel, config = row["kernel"], row["config"]
    if type(kernel) is not str or type(config) is not str:
        return False
    current = current_text(kernel, config)
    if current == config:
        return False
    identity = {name: row[name] for name in KEYS["trials"]}
    return bool(select(connection, "trials", identity | {"config": current}))


def _put(connection: sqlite3.Connection, table: str, row: Row, gpu: Gpu) -> None:
    _put_gpu(connection, row["gpu"], gpu)
    _insert(connection, table, row)


def _put_gpu(connection: sqlite3.Connection, key: str, gpu: Gpu) -> None:
    facts = {"key": key, **vars(gpu)}
    known = select(connection, "gpus", {"key": key})
    if not known or any(known[0][name] != value for name, value in facts.items()):
        _insert(connection, "gpus", facts)


def adding(trial: Trial, *, replace: bool = False) -> Operation[bool]:
    """Makes the operation that stores a trial, unless one with its identity stays, and ends its
    lease; it returns whether it stored the trial. Raises ValueError at once.
    """
    row = _row(trial)

    def add(connection: sqlite3.Connection) -> bool:
        _delete(connection, "leases", row)
        _put_gpu(connection, row["gpu"], trial.gpu)
        texts = spellings(row["kernel"], row["config"])
        # Most trials are new: where no field was renamed, no lookup is needed.
        if len(texts) == 1 and _insert(connection, "trials", row, "IGNORE"):
            return True
        if not replace:
            found = there(connection, "trials", row)
            if isinstance(found, Trial) and not _takes_the_place_of(trial, found):
                return False
        for text in texts[1:]:
            _delete(connection, "trials", row | {"config": text})
        _insert(connection, "trials", row)
        return True

    return add


def _takes_the_place_of(trial: Trial, known: Trial) -> bool:
    """Returns whether a new trial has a result where the known one failed for a reason that may lie
    outside the config.
    """
    return known.status in CIRCUMSTANTIAL and trial.status in ("ok", "wrong")


def recording_best(winner: BestConfig, *, only_newer: bool = False) -> Operation[bool]:
    """Makes the operation that stores a winner in place of the one with its identity; it returns
    whether it did. With `only_newer`, an existing winner stays unless the new one is newer. Raises
    ValueError at once.
    """
    row = _row(winner)

    def record_best(connection: sqlite3.Connection) -> bool:
        if only_newer:
            found, latest = there(connection, "winners", row), latest_date()
            if found and (
                found.when == row["when"] or age(found.when, latest) >= age(row["when"], latest)
            ):
                return False
        _put(connection, "winners", row, winner.gpu)
        return True

    return record_best


def _delete(connection: sqlite3.Connection, table: str, row: Row) -> None:
    """Deletes the row with this identity, if there is one."""
    where = " AND ".join(f'"{name}" = :{name}' for name in KEYS[table])
    connection.execute(
        f"DELETE FROM {table} WHERE {where}", {name: row[name] for name in KEYS[table]}
    )


def write_probe(connection: sqlite3.Connection) -> None:
    """Writes some data to the file, to find out whether there is room."""
    connection.execute("CREATE TABLE IF NOT EXISTS probe (content)")
    connection.execute("INSERT INTO probe VALUES (zeroblob(?))", (PROBE,))


def remove_probe(connection: sqlite3.Connection) -> None:
    connection.execute("DROP TABLE IF EXISTS probe")


def identity(gpu: Gpu, workload: Workload, kernel: str, source: str, config: str) -> dict[str, Any]:
    """Returns the key of a trial's row and of its lease, with the current names of config
    fields.
    """
    config = current_text(kernel, config)
    return {"gpu": gpu.key, **vars(workload), "kernel": kernel, "source": source, "config": config}

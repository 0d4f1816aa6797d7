"""The versions of a store's tables, and the steps that migrate each version to the next.

A step is written for the tables of its time: it names tables and columns in full and shares nothing
with `queries.SCHEMA`, which continues to change. A published step is never edited. All steps that a
file needs run in one transaction, so that the file always has either its old version or the newest
one.

The texts of configs are not migrated when a field is renamed: see `config_aliases`.
"""

import sqlite3
from collections.abc import Callable, Mapping

VERSION = 4  # the version of the tables that this code reads and writes
# The oldest version that can be migrated, and read without migration: trials and winners have had
# the same columns since, except for their checksum and for the columns that `show_as_newest` adds.
OLDEST = 1

Step = Callable[[sqlite3.Connection], None]


def version_of(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def migrate(connection: sqlite3.Connection) -> None:
    """Runs the steps that the tables still need. Call it only within a transaction."""
    for version in range(max(version_of(connection), OLDEST), VERSION):
        STEPS[version](connection)
    connection.execute(f"PRAGMA user_version = {VERSION}")


def show_as_newest(connection: sqlite3.Connection) -> None:
    """Adds the missing columns of an older version to a read-only connection: weights were warm,
    and there were neither epilogues nor groups.
    """
    for table in ("trials", "winners", "leases"):
        there = _columns(connection, table)
        new = {"weights": "warm", "epilogue": "", "grouping": ""}
        missing = [f"'{value}' AS {name}" for name, value in new.items() if name not in there]
        if there and missing:
            # A temporary view takes precedence over the table of the same name.
            connection.execute(
                f"""CREATE TEMP VIEW {table} AS
                SELECT rowid AS rowid, *, {", ".join(missing)} FROM main.{table}"""
            )


def _columns(connection: sqlite3.Connection, table: str) -> dict[str, str]:
    """Returns the declared types of a table's columns by name; {} if the table does not exist."""
    return {row[1]: row[2] for row in connection.execute(f"PRAGMA table_info({table})")}


def _from_1(connection: sqlite3.Connection) -> None:
    """Replaces counts of attempts by leases, whose owner can be checked for life, and adds a
    checksum to rows; it is NULL in the rows that exist.
    """
    for table in ("trials", "winners"):
        if "digest" not in _columns(
            connection, table
        ):  # it is, where only the number of the version is wrong
            connection.execute(f"ALTER TABLE {table} ADD COLUMN digest INTEGER")
    connection.execute("DROP TABLE IF EXISTS begun")
    connection.execute(
        """CREATE TABLE IF NOT EXISTS leases (id INTEGER PRIMARY KEY, gpu TEXT NOT NULL,
        M INTEGER NOT NULL, N INTEGER NOT NULL, K INTEGER NOT NULL,
        dtype TEXT NOT NULL, out_dtype TEXT NOT NULL, layout TEXT NOT NULL,
        kernel TEXT NOT NULL, source TEXT NOT NULL, config TEXT NOT NULL, "when" TEXT NOT NULL,
        owner TEXT NOT NULL, beat INTEGER NOT NULL, machine_losses INTEGER NOT NULL,
        UNIQUE (kernel, M, N, K, dtype, out_dtype, layout, gpu, source, config))"""
    )
    connection.execute(
        """CREATE INDEX IF NOT EXISTS trials_by_workload
        ON trials (M, N, K, dtype, out_dtype, layout, kernel, gpu, status, us, "when")"""
    )


# The columns of the tables since version 3, without those of the workload and those that all three
# tables share.
_TABLES_SINCE_3 = {
    "trials": """status TEXT NOT NULL, reason TEXT NOT NULL,
        us REAL, ratio REAL, ratio_low REAL, ratio_high REAL,
        clock_mhz REAL, predicted_us REAL, compile_s REAL, digest INTEGER""",
    "winners": """us REAL, cublas_us REAL, ratio REAL, ratio_low REAL, ratio_high REAL,
        rounds INTEGER, runner_up TEXT, lead REAL, lead_low REAL, lead_high REAL, confidence REAL,
        separated INTEGER, screened INTEGER, valid INTEGER,
        finalists TEXT NOT NULL, digest INTEGER""",
    "leases": "owner TEXT NOT NULL, beat INTEGER NOT NULL, machine_losses INTEGER NOT NULL",
}


def _from_2(connection: sqlite3.Connection) -> None:
    """Adds whether weights were warm or cold, and the epilogue, to rows; both are part of their
    identity.
    """
    _create_again(connection, 3, {"weights": "warm", "epilogue": ""})


def _from_3(connection: sqlite3.Connection) -> None:
    """Adds how groups divide a product to rows; it is a part of their identity."""
    _create_again(connection, 4, {"weights": "warm", "epilogue": "", "grouping": ""})


def _create_again(connection: sqlite3.Connection, version: int, added: dict[str, str]) -> None:
    """Creates the tables of a version, whose workloads have these columns besides those of version
    2, with their defaults, and copies all rows. SQLite cannot change a key, which they are part of.
    Columns that somebody added are kept.
    """
    newest = list(added)[-1]
    workload = f"M, N, K, dtype, out_dtype, layout, {', '.join(added)}"
    defined = "".join(f"{name} TEXT NOT NULL DEFAULT '{value}', " for name, value in added.items())
    for table, columns in _TABLES_SINCE_3.items():
        there = _columns(connection, table)
        if newest in there:  # only the version number is wrong
            continue
        made = f"{table}_of_version_{version}"
        key = f"kernel, {workload}, gpu, source"
        connection.execute(f"DROP TABLE IF EXISTS {made}")
        connection.execute(
            f"""CREATE TABLE {made} (id INTEGER PRIMARY KEY, gpu TEXT NOT NULL,
            M INTEGER NOT NULL, N INTEGER NOT NULL, K INTEGER NOT NULL,
            dtype TEXT NOT NULL, out_dtype TEXT NOT NULL, layout TEXT NOT NULL,
            {defined}
            kernel TEXT NOT NULL, source TEXT NOT NULL, config TEXT NOT NULL,
            "when" TEXT NOT NULL, {columns},
            UNIQUE ({key}{"" if table == "winners" else ", config"}))"""
        )
        known = _columns(connection, made)
        for name in there.keys() - known.keys():
            connection.execute(f"ALTER TABLE {made} ADD COLUMN {_quoted(name)} {there[name]}")
        names = ", ".join(map(_quoted, there))
        connection.execute(f"INSERT INTO {made} ({names}) SELECT {names} FROM {table}")
        connection.execute(f"DROP TABLE {table}")
        connection.execute(f"ALTER TABLE {made} RENAME TO {table}")
    connection.execute("DROP INDEX IF EXISTS trials_by_workload")
    connection.execute(
        f"""CREATE INDEX trials_by_workload
        ON trials ({workload}, kernel, gpu, status, us, "when")"""
    )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


STEPS: Mapping[int, Step] = {1: _from_1, 2: _from_2, 3: _from_3}

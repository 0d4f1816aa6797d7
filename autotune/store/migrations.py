"""The versions of a store's tables, and the steps that lead from each to the next.

A step is written for the tables of its day: it names tables and columns in full and shares nothing
with `queries.SCHEMA`, which goes on changing. A published step is never edited. All steps that a
file needs run in one transaction, so that the file is of its old version or of the newest, whatever
happens meanwhile.

The texts of configs are not migrated when a field is renamed: see `config_aliases`.
"""

import sqlite3
from collections.abc import Callable, Mapping

VERSION = 2  # of the tables that this code reads and writes
# The oldest that can be migrated, and read as it is: trials and winners have had the same columns
# since, but for their checksum.
OLDEST = 1

Step = Callable[[sqlite3.Connection], None]


def version_of(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def migrate(connection: sqlite3.Connection) -> None:
    """Runs the steps that the tables still need. Only within a transaction."""
    for version in range(max(version_of(connection), OLDEST), VERSION):
        STEPS[version](connection)
    connection.execute(f"PRAGMA user_version = {VERSION}")


def _from_1(connection: sqlite3.Connection) -> None:
    """Leases, whose owner can be asked whether it lives, replace counts of attempts; rows have a
    checksum, NULL in those that were there before.
    """
    for table in ("trials", "winners"):
        there = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        if "digest" not in there:  # it is, where only the number of the version is wrong
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


STEPS: Mapping[int, Step] = {1: _from_1}

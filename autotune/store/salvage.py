"""Reads the intact rows around the damage of a damaged store, and copies them to a sound store."""

import contextlib
import sqlite3
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import queries

LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1  # of SQLite's row ids
REACH = 1 << 22  # row ids beyond the last readable one in which more rows are searched
QUERIES = 4000  # maximum queries in the damaged part of a table


@dataclass
class Salvaged:
    """The numbers of copied trials and winners."""

    trials: int = 0
    winners: int = 0

    def __str__(self) -> str:
        return f"{self.trials} trials and {self.winners} winners"


def carry(source: sqlite3.Connection, target: sqlite3.Connection) -> Salvaged:
    """Inserts every readable row of the source that could be valid into the target, unless the
    target has its identity already. Call it only within a transaction of the target. Raises
    sqlite3.Error for errors of the target.
    """
    counts = {table: _carry_table(source, target, table) for table in queries.SCHEMA}
    return Salvaged(counts["trials"], counts["winners"])


def _carry_table(source: sqlite3.Connection, target: sqlite3.Connection, table: str) -> int:
    """Copies the rows of a table; returns how many were new to the target."""
    try:
        there = queries.columns_there(source, table)
    except sqlite3.DatabaseError:
        return 0
    names = [name for name in queries.columns(table) if name in there and name != "id"]
    if not names:
        return 0
    listed, places = ", ".join(f'"{name}"' for name in names), ", ".join("?" * len(names))
    statement = f"INSERT OR IGNORE INTO {table} ({listed}) VALUES ({places})"
    count = 0
    for row in readable_rows(source, table, listed):
        if queries.could_be_valid(table, dict(zip(names, row, strict=True))):
            with contextlib.suppress(UnicodeError):
                count += target.execute(statement, row).rowcount
    return count


def readable_rows(
    source: sqlite3.Connection, table: str, columns: str
) -> Iterator[tuple[Any, ...]]:
    """Yields the rows of a table: first those before the damage, then those after it, then those in
    between.

    An unreadable page hides the rows below it; rows of other pages are found by querying ranges of
    row ids.
    """
    query = f"SELECT rowid, {columns} FROM {table} WHERE rowid BETWEEN ? AND ? ORDER BY rowid"
    low, high = LOWEST, HIGHEST
    try:
        for row in source.execute(query, (low, high)):
            low = row[0] + 1
            yield tuple(row)[1:]
        return
    except sqlite3.DatabaseError:
        pass
    try:
        for row in source.execute(f"{query} DESC", (low, high)):
            high = row[0] - 1
            yield tuple(row)[1:]
    except sqlite3.DatabaseError:
        pass
    if high == HIGHEST:
        high = max(low, 0) + REACH
    ranges = deque([(low, high)])
    for _ in range(QUERIES):
        if not ranges:
            break
        low, high = ranges.popleft()
        try:
            for row in source.execute(query, (low, high)):
                low = row[0] + 1
                yield tuple(row)[1:]
        except sqlite3.DatabaseError:
            if low < high:
                middle = (low + high) // 2
                ranges += [(low, middle), (middle + 1, high)]

"""Which trials and winners are removed from the store, and their removal within a transaction."""

import datetime
import sqlite3
from collections.abc import Mapping

from .queries import KEYS, Operation


def removing(
    older_than_days: float | None, kernel: str | None, sources: Mapping[str, str] | None
) -> Operation[int]:
    """Makes the operation that removes trials and winners to which all given conditions apply; it
    returns their number. Raises ValueError at once.
    """
    condition, values = _to_prune(older_than_days, kernel, sources)

    def remove(connection: sqlite3.Connection) -> int:
        counts = [
            connection.execute(f"DELETE FROM {table} WHERE {condition}", values).rowcount
            for table in KEYS
        ]
        used = "SELECT gpu FROM trials UNION SELECT gpu FROM winners"
        connection.execute(f'DELETE FROM gpus WHERE "key" NOT IN ({used})')
        return sum(counts[:2])  # without leases

    return remove


def prunable(
    older_than_days: float | None, kernel: str | None, sources: Mapping[str, str] | None
) -> Operation[int]:
    """Makes the operation that counts the trials and winners that `removing` would remove. Raises
    ValueError at once.
    """
    condition, values = _to_prune(older_than_days, kernel, sources)

    def count(connection: sqlite3.Connection) -> int:
        counts = [
            connection.execute(f"SELECT COUNT(*) FROM {table} WHERE {condition}", values)
            for table in ("trials", "winners")
        ]
        return sum(int(found.fetchone()[0]) for found in counts)

    return count


def _to_prune(
    older_than_days: float | None, kernel: str | None, sources: Mapping[str, str] | None
) -> tuple[str, list[object]]:
    """Returns the SQL condition for what is removed, and its values. Raises ValueError."""
    parts: list[str] = []
    values: list[object] = []
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

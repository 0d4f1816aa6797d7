"""A config to lease, and what a store's file has of leases."""

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from support.stored import H100, WORKLOAD

# As `Store.claim` and `Store.release` take it.
CONFIG = (H100, WORKLOAD, "hopper.hilbert", "abc", "x=1")


def config(text: str) -> tuple[Any, ...]:
    """Another config of the same kernel, to be leased."""
    return (*CONFIG[:-1], text)


def leases_of(path: Path) -> list[dict[str, Any]]:
    """The leases in a store's file."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute("SELECT * FROM leases")]

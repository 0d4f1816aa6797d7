"""A config to lease, and what a store's file has of leases."""

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from outblas.autotune.store.leases import Claim
from outblas.autotune.store.store import Store
from support.clocks import Clock
from support.stored import H100, WORKLOAD, sql

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


def watched(path: Path, store: Store, clock: Clock, seconds: float, *, beat: bool = False) -> Claim:
    """What a claim says once a lease was watched for so long, if not before."""
    end = clock.now + seconds
    while clock.now < end:
        if not (found := store.claim(*CONFIG)).held:
            return found
        clock.now += 1.0
        if beat:
            sql(path, "UPDATE leases SET beat = beat + 1")
    return store.claim(*CONFIG)

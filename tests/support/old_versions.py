"""Stores as older versions of the tables had them."""

import contextlib
import sqlite3
import tempfile
from collections.abc import Sequence
from pathlib import Path

from outblas.autotune.store.records import BestConfig, Trial
from outblas.autotune.store.store import Store
from support.stored import sql

SHARED = """id INTEGER PRIMARY KEY, gpu TEXT NOT NULL,
    M INTEGER NOT NULL, N INTEGER NOT NULL, K INTEGER NOT NULL,
    dtype TEXT NOT NULL, out_dtype TEXT NOT NULL, layout TEXT NOT NULL,
    kernel TEXT NOT NULL, source TEXT NOT NULL, config TEXT NOT NULL, "when" TEXT NOT NULL"""
PLACE = "kernel, M, N, K, dtype, out_dtype, layout, gpu, source"
VERSION_1 = [
    """CREATE TABLE gpus (
    "key" TEXT PRIMARY KEY, name TEXT, arch INTEGER, sms INTEGER, power_limit_w,
    driver TEXT, cuda TEXT, torch TEXT, triton TEXT, dsl TEXT)""",
    f"""CREATE TABLE trials ({SHARED},
    status TEXT NOT NULL, reason TEXT NOT NULL,
    us REAL, ratio REAL, ratio_low REAL, ratio_high REAL,
    clock_mhz REAL, predicted_us REAL, compile_s REAL, UNIQUE ({PLACE}, config))""",
    f"""CREATE TABLE winners ({SHARED},
    us REAL, cublas_us REAL, ratio REAL, ratio_low REAL, ratio_high REAL, rounds INTEGER,
    runner_up TEXT, lead REAL, lead_low REAL, lead_high REAL, confidence REAL, separated INTEGER,
    screened INTEGER, valid INTEGER,
    finalists TEXT NOT NULL, UNIQUE ({PLACE}))""",
    f"CREATE TABLE begun ({SHARED}, times INTEGER NOT NULL, UNIQUE ({PLACE}, config))",
    "PRAGMA application_id = 1869968482",
    "PRAGMA user_version = 1",
    "PRAGMA journal_mode = WAL",
]
VERSION_2 = [
    VERSION_1[0],
    *(statement.replace(", UNIQUE", ", digest INTEGER, UNIQUE") for statement in VERSION_1[1:3]),
    f"""CREATE TABLE leases ({SHARED},
    owner TEXT NOT NULL, beat INTEGER NOT NULL, machine_losses INTEGER NOT NULL,
    UNIQUE ({PLACE}, config))""",
    """CREATE INDEX trials_by_workload
    ON trials (M, N, K, dtype, out_dtype, layout, kernel, gpu, status, us, "when")""",
    "PRAGMA application_id = 1869968482",
    "PRAGMA user_version = 2",
    "PRAGMA journal_mode = WAL",
]
_NEW = "weights TEXT NOT NULL DEFAULT 'warm', epilogue TEXT NOT NULL DEFAULT '',"
VERSION_3 = [
    statement.replace("kernel TEXT", f"{_NEW} kernel TEXT")
    .replace("layout, gpu", "layout, weights, epilogue, gpu")
    .replace("layout, kernel", "layout, weights, epilogue, kernel")
    .replace("user_version = 2", "user_version = 3")
    for statement in VERSION_2
]
VERSIONS = {1: VERSION_1, 2: VERSION_2, 3: VERSION_3}


def write_version(
    version: int, path: Path, trials: Sequence[Trial], winners: Sequence[BestConfig]
) -> None:
    """Makes a store of an older version: the rows of one of today, in the columns of then."""
    path.parent.mkdir(exist_ok=True)
    sql(path, *VERSIONS[version])
    with tempfile.TemporaryDirectory() as folder:
        today = Path(folder, "today.sqlite")
        with Store(today) as store:
            store.merge(trials, winners)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("ATTACH ? AS today", [str(today)])
            for table in ("gpus", "trials", "winners"):
                columns = connection.execute(f"PRAGMA main.table_info({table})")
                names = ", ".join(f'"{column[1]}"' for column in columns)
                connection.execute(
                    f"INSERT INTO main.{table} ({names}) SELECT {names} FROM today.{table}"
                )

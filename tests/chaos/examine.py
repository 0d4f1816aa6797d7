"""A damaged store, opened, read, written and opened again: what it gives, and what it raises."""

import contextlib
import json
import os
import random
import signal
import sqlite3
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outblas.autotune.store import transfer
from outblas.autotune.store.records import BestConfig, Finalist, Gpu, Trial, Workload, to_record
from outblas.autotune.store.store import Store, StoreError

from . import damages

GPUS = (Gpu("NVIDIA H100 80GB HBM3", 90, 132, 700, "570.1", "12.8"), Gpu("NVIDIA H200", 90, 132))
KERNELS = ("hopper.hilbert", "hopper.gemm", "portable")
FINALIST = Finalist(
    kernel=KERNELS[0], config="number=1", us=200.5, ratio=1.047, ratio_low=1.04, ratio_high=1.05
)


def trial(number: int) -> Trial:
    """The trial of a number, different from all others in each of its figures."""
    facts: dict[str, Any] = {"status": "hang", "reason": f"not done in {number} s"}
    if number % 5:
        facts = {
            "status": "ok",
            "us": 100 + number / 7,
            "ratio": 1 + number / 1000,
            "clock_mhz": 1500 + number / 3,
        }
        facts |= {
            "ratio_low": 1 + number / 1100,
            "ratio_high": 1 + number / 900,
            "predicted_us": 90 + number / 11,
        }
    return Trial(
        gpu=GPUS[number % 2],
        workload=Workload(16 * (1 + number % 7), 4096, 4096),
        kernel=KERNELS[number % 3],
        source="0123456789abcdef",
        config=f"number={number},order=hilbert,phases=False",
        when=f"2026-01-{1 + number % 28:02}T12:{number // 60 % 60:02}:{number % 60:02}+00:00",
        **facts,
    )


def winner(number: int) -> BestConfig:
    figures: dict[str, Any] = {
        "us": 100 + number / 7,
        "ratio": 1.04,
        "ratio_low": 1.03,
        "ratio_high": 1.05,
    }
    return BestConfig(
        gpu=GPUS[number % 2],
        workload=Workload(16 * (1 + number), 4096, 4096),
        kernel=KERNELS[number % 3],
        source="0123456789abcdef",
        config=f"number={number}",
        cublas_us=210.0,
        rounds=30,
        confidence=0.99,
        finalists=(FINALIST, FINALIST),
        when="2026-02-01T00:00:00+00:00",
        **figures,
    )


def stock(path: str, trials: int, winners: int, killed: bool) -> int:
    """Fills a store; `killed`: and dies with it open, so that its log stays beside it."""
    store = Store(Path(path))
    half = trials // 2
    for number in range(half):
        store.add(trial(number))
    if killed:
        store.close()
        store = Store(Path(path))
    for number in range(half, trials):
        store.add(trial(number))
    for number in range(winners):
        store.record_best(winner(number))
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    store.close()
    return 0


class Examination:
    """Of one damaged store. `said` is the answer: faults, and shares of what is there."""

    def __init__(self, path: Path, trials: int, winners: int) -> None:
        self.path = path
        self.truth = {_key(record): to_record(record) for record in map(trial, range(trials))}
        self.truth |= {_key(record): to_record(record) for record in map(winner, range(winners))}
        self.faults: list[tuple[str, str]] = []
        self.refused = False
        self.may_refuse = False
        self.inode = 0

    def run(self, kind: str, seed: str, late: bool) -> dict[str, Any]:
        before = self.path.read_bytes()[:100]
        self.pragmas = {
            "user_version": int.from_bytes(before[60:64], "big", signed=True),
            "application_id": int.from_bytes(before[68:72], "big", signed=True),
        }
        with contextlib.ExitStack() as stack:
            early = stack.enter_context(Store(self.path)) if late else None
            damages.apply(kind, seed, self.path)
            readable, damaged = self._readable(), damages.snapshot(self.path.parent)
            self.may_refuse |= damages.header_changed(before, self.path)
            self.inode = self.path.stat().st_ino
            if early is not None:
                with self._step("use of a store damaged while it is open"):
                    self._check(early.trials(), early.winners())
                    early.add(trial(99_999))
            else:
                with self._step("reading"), Store(self.path, read_only=True) as store:
                    self._check(store.trials(), store.winners())
                    store.verify()
                if (
                    damages.snapshot(self.path.parent) != damaged
                    and self.path.name + "-wal" not in damaged
                ):
                    self.faults.append(("reading changes files", ""))
        there = self._write()
        if not self.refused:
            self._again(there)
            self._check_set_aside(there, damaged)
        return {
            "faults": self.faults,
            "refused": self.refused,
            "there": len(there & self.truth.keys()),
            "readable": len(readable),
            "salvaged": len(there & readable),
            "of": len(self.truth),
        }

    def _write(self) -> set[str]:
        """What is there once the store was opened for writing, and took new results."""
        there: set[str] = set()
        with self._step("writing"), Store(self.path) as store:
            there = self._check(store.trials(), store.winners())
            store.add(trial(100_000), replace=True)
            store.record_best(winner(100_000))
            store.verify()
            if store.in_memory:
                self.faults.append(("results stay in memory", str(store.warning)))
        return there

    def _again(self, there: set[str]) -> None:
        """What was there is there again, and new results too; nothing is wrong any more."""
        with self._step("opening again"), Store(self.path) as store:
            now = self._check(store.trials(), store.winners())
            if store.warning:
                self.faults.append(("damaged again", store.warning))
            if missing := there - now:
                self.faults.append(
                    ("lost after it was opened", f"{len(missing)} of {len(there)} records")
                )
            if not {_key(trial(100_000)), _key(winner(100_000))} <= now:
                self.faults.append(("new results lost", ""))
            file = self.path.with_name("export.json")
            trials, winners = store.trials(), store.winners()
            transfer.export(trials, winners, file)
            with Store(self.path.with_name("imported.sqlite")) as other:
                transfer.import_into(other, file)
                if (set(map(_key, other.trials())), set(map(_key, other.winners()))) != (
                    set(map(_key, trials)),
                    set(map(_key, winners)),
                ):
                    self.faults.append(("export and import lose records", ""))

    def _check_set_aside(self, there: set[str], damaged: dict[str, bytes]) -> None:
        """Where a fresh store was begun, the damaged one lies beside it."""
        if self.truth.keys() <= there or not damaged.get(self.path.name):
            return
        aside = [
            file
            for file in damages.snapshot(self.path.parent)
            if file.startswith(f"{self.path.name}.")
        ]
        if not aside and self.path.stat().st_ino == self.inode:
            return  # it goes on in place, without the rows that are not valid
        if not aside:
            self.faults.append(("damaged file not kept", f"there is only {self.path.name}"))

    def _check(self, trials: list[Trial], winners: list[BestConfig]) -> set[str]:
        """The keys of what is there; a record that was never stored so is a fault."""
        records: list[Trial | BestConfig] = [*trials, *winners]
        new = {_key(trial(99_999)), _key(trial(100_000)), _key(winner(100_000))}
        for record in records:
            key, fields = _key(record), to_record(record)
            if key in new:
                continue
            if key not in self.truth:
                self.faults.append(
                    (
                        "altered record returned",
                        f"{type(record).__name__} of another identity: {key}",
                    )
                )
            elif fields != self.truth[key]:
                names = [name for name in fields if fields[name] != self.truth[key][name]]
                self.faults.append(
                    ("altered record returned", f"{type(record).__name__} with another {names}")
                )
        return {_key(record) for record in records}

    def _readable(self) -> set[str]:
        """The records that a plain reader gets out of a copy, row by row, from either end."""
        folder = self.path.parent / "copy"
        folder.mkdir()
        for name, data in damages.snapshot(self.path.parent).items():
            (folder / name).write_bytes(data)
        found: set[str] = set()
        with contextlib.closing(sqlite3.connect(folder / self.path.name)) as connection:
            connection.row_factory = sqlite3.Row
            for pragma in (
                "application_id",
                "user_version",
            ):  # a foreign log may have brought others
                of_main = _rows(connection, f"PRAGMA {pragma}")
                self.may_refuse |= bool(of_main) and of_main[0][0] != self.pragmas[pragma]
            gpus = {row["key"] for row in _rows(connection, "SELECT * FROM gpus") if _is_right(row)}
            for table in ("trials", "winners"):
                for order in ("ASC", "DESC"):
                    rows = _rows(connection, f"SELECT * FROM {table} ORDER BY id {order}")
                    found |= {
                        self._key_of(table, row)
                        for row in rows
                        if "gpu" in row.keys() and row["gpu"] in gpus  # noqa: SIM118
                    }
        return found & self.truth.keys()

    def _key_of(self, table: str, row: sqlite3.Row) -> str:
        """The key of a row that is as it was stored; "" of any other."""
        sizes = ("M", "N", "K", "dtype", "out_dtype", "layout", "weights", "epilogue", "grouping")
        names = (*sizes, "kernel", "source", "config", "gpu")
        kept = (
            ("us", "ratio", "status", "reason", "when")
            if table == "trials"
            else ("us", "cublas_us", "when")
        )
        if not set(row.keys()).issuperset([*names, *kept]):
            return ""
        key = json.dumps([table, *(row[name] for name in names)], default=repr)
        truth = self.truth.get(key, {})
        if table == "winners" and not str(row["finalists"]).startswith('[{"'):
            return ""
        return key if all(truth.get(name) == row[name] for name in kept) else ""

    @contextlib.contextmanager
    def _step(self, name: str) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            if not self.may_refuse:
                self.faults.append((f"{name} raises", f"StoreError: {error}"))
            self.refused = True
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.name}"
            self.faults.append(
                (f"{name} raises", f"{type(error).__name__} in {where}: {error}"[:300])
            )


def examine(path: str, kind: str, seed: str, trials: int, winners: int, late: bool) -> int:
    """Prints what became of a damaged store."""
    warnings.simplefilter("ignore")
    found = Examination(Path(path), trials, winners).run(kind, seed, late)
    print(json.dumps(found), flush=True)
    return 0


def _rows(connection: sqlite3.Connection, query: str) -> list[sqlite3.Row]:
    """Rows until an error."""
    found = []
    with contextlib.suppress(sqlite3.Error, UnicodeError):
        for row in connection.execute(query):
            found.append(row)
    return found


def _is_right(row: sqlite3.Row) -> bool:
    """Whether a row of GPUs is as it was stored."""
    return any(
        (row["name"], row["sms"], row["arch"]) == (gpu.name, gpu.sms, gpu.arch) for gpu in GPUS
    )


def _key(record: Trial | BestConfig) -> str:
    """What makes a trial or a winner of this campaign unique: its config among other facts."""
    table = "trials" if isinstance(record, Trial) else "winners"
    workload = [*vars(record.workload).values()]
    return json.dumps(
        [table, *workload, record.kernel, record.source, record.config, record.gpu.key]
    )


def sample(numbers: random.Random) -> tuple[str, bool]:
    """A kind of damage, and whether it comes while the store is open."""
    kind = numbers.choice(list(damages.ALL))
    return kind, kind in damages.DAMAGES and numbers.random() < 0.15

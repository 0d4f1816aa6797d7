"""Shipped tables: for each GPU model, the best config of a kernel at each workload."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import signed_json, table_version_2, validation
from .config_aliases import current_text
from .records import BestConfig, Gpu, Workload, age, latest_date, now
from .validation import Fields, shown

FORMAT, VERSION = "outblas-table", 3
NAMES = ("gpu", "entries")  # the fields of a table
TABLES = Path(__file__).parents[1] / "tables"  # the folder of shipped tables


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The best config of a kernel at a workload, as shipped. Figures are those of
    `records.BestConfig`; `when` is a day.
    """

    workload: Workload
    kernel: str
    config: str
    us: float
    ratio: float
    ratio_low: float
    ratio_high: float
    confidence: float | None
    when: str

    @property
    def place(self) -> tuple[Workload, str]:
        """The key of an entry, which is unique in a table."""
        return self.workload, self.kernel


@dataclass(frozen=True)
class Table:
    """The table shipped for one GPU model. `gpu` has the software of the newest winner."""

    gpu: Gpu
    entries: tuple[Entry, ...]


def read_table(source: Path | str) -> Table:
    """Reads the table in a file (a Path) or in a text (a str), of version 3 or 2.

    Raises ValueError that names the place of the error.
    """
    text = signed_json.text_of(source) if isinstance(source, Path) else source
    content = signed_json.parse(text, FORMAT, {2: table_version_2.NAMES, VERSION: NAMES})
    listed = table_version_2.entries(content) if content["version"] == 2 else _entries(content)
    entries: dict[tuple[Workload, str], Entry] = {}
    for place, fields in listed:
        fields["config"] = current_text(fields["kernel"], fields["config"])
        entry = Entry(**fields)
        if entry.place in entries:
            raise ValueError(
                f"{place} is the second entry of {entry.kernel} at {entry.workload}, expected one"
            )
        entries[entry.place] = entry
    gpu = validation.gpu_of(content["gpu"], "gpu")
    return Table(gpu, tuple(sorted(entries.values(), key=_order)))


def _entries(content: Fields) -> Iterator[tuple[str, Fields]]:
    """Yields the entries of a table of version 3, each with its place in the file for error
    messages.
    """
    if type(content["entries"]) is not list:
        raise ValueError(f"entries is {shown(content['entries'])}, expected a JSON list")
    for i, fields in enumerate(content["entries"]):
        place = f"entries[{i}]"
        valid = validation.checked(fields, validation.TABLE_ENTRY, place)
        valid["workload"] = validation.checked_workload(valid["workload"], f"{place}.workload")
        yield place, valid


def own_tables() -> Path:
    """Returns the folder of the tables that come with the package, in a checkout. Raises ValueError
    where the package is installed, because the next installation would overwrite changes.
    """
    if not (Path(__file__).parents[2] / "pyproject.toml").is_file():
        raise ValueError(
            f"the tables in {TABLES} belong to an installed package, expected a FOLDER to write to"
        )
    return TABLES


def ship(winners: Iterable[BestConfig], folder: Path) -> list[Path]:
    """Writes a table for each GPU model. Of several winners at one workload with one kernel, it
    takes the one with the highest ratio.

    An existing table keeps its entries of other workloads and kernels. Raises ValueError, with
    nothing written, for an invalid table or winner, and OSError.
    """
    models: dict[tuple[str, int], list[BestConfig]] = {}
    for i, winner in enumerate(winners):
        validation.checked_fields(winner, f"winners[{i}]")
        if winner.gpu.arch == 0:
            raise ValueError(
                f"winners[{i}] was measured on {winner.gpu.name}, expected a winner of a GPU"
            )
        models.setdefault(winner.gpu.model, []).append(winner)
    tables: dict[Path, Table] = {}
    latest = latest_date()
    for _, found in sorted(models.items()):
        gpu = max(found, key=lambda winner: age(winner.when, latest)).gpu
        path, kept = _table_at(folder, gpu, tables)
        best = {
            entry.place: entry
            for entry in map(_entry, sorted(found, key=lambda w: (w.ratio, age(w.when, latest))))
        }
        entries = {entry.place: entry for entry in kept} | best
        tables[path] = Table(gpu, tuple(entries.values()))
    folder.mkdir(parents=True, exist_ok=True)
    for path, table in tables.items():
        _write(path, table)
    return list(tables)


def _table_at(
    folder: Path, gpu: Gpu, taken: Mapping[Path, Table]
) -> tuple[Path, tuple[Entry, ...]]:
    """Returns the file of a GPU's model and its contents. The name is NAME.json, or includes the
    number of SMs if another model has that file.
    """
    name = re.sub(r"[^A-Za-z0-9._-]", "_", gpu.name).lstrip(".") or "_"
    for stem in (name, f"{name}_{gpu.sms}_SMs"):
        path = folder / f"{stem}.json"
        try:
            there = taken.get(path) or (read_table(path) if path.exists() else None)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if there is None or there.gpu.model == gpu.model:
            return path, there.entries if there else ()
    raise ValueError(
        f"{path} is of another GPU than {gpu.name!r}, expected none or one of that name"
    )


def _entry(winner: BestConfig) -> Entry:
    names = [field.name for field in dataclasses.fields(Entry)]
    fields = {name: getattr(winner, name) for name in names}
    fields["config"] = current_text(winner.kernel, winner.config)
    return Entry(**fields | {"when": (winner.when or now())[:10]})


def newest(winners: Iterable[BestConfig]) -> Table:
    """Returns the table of winners of one model of GPU, at least one: of several at one workload
    with one kernel the newest, which a lookup in their store takes.
    """
    latest = latest_date()
    by_age = sorted(winners, key=lambda winner: age(winner.when, latest))
    best = {entry.place: entry for entry in map(_entry, by_age)}
    return Table(by_age[-1].gpu, tuple(best.values()))


def to_bytes(table: Table) -> bytes:
    """Returns the text of a table, which `read_table` reads."""
    return signed_json.to_bytes(FORMAT, VERSION, _payload(table))


def _write(path: Path, table: Table) -> None:
    """Replaces the file of a table. Raises OSError."""
    signed_json.write(path, FORMAT, VERSION, _payload(table))


def _payload(table: Table) -> Fields:
    entries = [
        {**vars(entry), "workload": validation.workload_fields(entry.workload)}
        for entry in sorted(table.entries, key=_order)
    ]
    return {"gpu": vars(table.gpu), "entries": entries}


def _order(entry: Entry) -> tuple[Any, ...]:
    return *entry.workload.kind, *entry.workload.shape, entry.kernel

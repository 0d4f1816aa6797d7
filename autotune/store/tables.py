"""Shipped tables: for each GPU model, the best config of a kernel at each workload."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outblas.autotune.store.fields import (
    Fields,
    check_names,
    checked,
    parsed,
    replacing,
    shown,
    text_of,
    to_fields,
)
from outblas.autotune.store.records import BestConfig, Gpu, Workload, now

FORMAT = "outblas-table"
TABLES = Path(__file__).parents[1] / "tables"  # the folder of shipped tables
# The fields of a workload that plain products leave out.
_PLAIN = {"weights": "warm", "epilogue": "", "grouping": ""}


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
    """Reads the table in a file (a Path) or in a text (a str).

    Raises ValueError that names the place of the error.
    """
    content = parsed(text_of(source) if isinstance(source, Path) else source, "the file")
    if type(content) is not dict or content.get("format") != FORMAT:
        raise ValueError(f"the file is {shown(content)}, expected the format {FORMAT!r}")
    check_names(content, ("format", "gpu", "entries"), "the file")
    if type(content["entries"]) is not list:
        raise ValueError(f"entries is {shown(content['entries'])}, expected a list")
    entries: dict[tuple[Workload, str], Entry] = {}
    for i, fields in enumerate(content["entries"]):
        place = f"entries[{i}]"
        if type(fields) is dict and type(fields.get("workload")) is dict:
            fields = fields | {"workload": _PLAIN | fields["workload"]}
        entry = checked(Entry, fields, place)
        if entry.place in entries:
            raise ValueError(
                f"{place} is the second entry of {entry.kernel} at {entry.workload}, expected one"
            )
        entries[entry.place] = entry
    return Table(checked(Gpu, content["gpu"], "gpu"), tuple(sorted(entries.values(), key=_order)))


def own_tables() -> Path:
    """Returns the folder of the tables that come with the package, in a checkout. Raises ValueError
    where the package is installed, because the next installation would overwrite changes.
    """
    if not (Path(__file__).resolve().parents[2] / "pyproject.toml").is_file():
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
        if winner.gpu.arch == 0:
            raise ValueError(
                f"winners[{i}] was measured on {winner.gpu.name}, expected a winner of a GPU"
            )
        models.setdefault(winner.gpu.model, []).append(winner)
    tables: dict[Path, Table] = {}
    for _, group in sorted(models.items()):
        gpu = max(group, key=lambda winner: winner.when).gpu
        path, old = _table_at(folder, gpu, tables)
        table = _best_of(group, gpu, lambda winner: (winner.ratio, winner.when))
        entries = {entry.place: entry for entry in (*old, *table.entries)}
        tables[path] = Table(gpu, tuple(entries.values()))
    contents = {path: to_bytes(table) for path, table in tables.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in contents.items():
        with replacing(path) as file:
            file.write(content)
    return list(tables)


def newest(winners: Iterable[BestConfig]) -> Table:
    """Returns the table of winners of one model of GPU, at least one: of several at one workload
    with one kernel the newest, which a lookup in their store takes.
    """
    listed = list(winners)
    gpu = max(listed, key=lambda winner: winner.when).gpu
    return _best_of(listed, gpu, lambda winner: winner.when)


def to_bytes(table: Table) -> bytes:
    """Returns the text of a table, which `read_table` reads. Raises ValueError for an entry that
    it would refuse.
    """
    entries = []
    for entry in sorted(table.entries, key=_order):
        fields = to_fields(entry)
        workload = fields["workload"].items()
        fields["workload"] = {name: v for name, v in workload if _PLAIN.get(name) != v}
        entries.append(fields)
    content: Fields = {"format": FORMAT, "gpu": to_fields(table.gpu), "entries": entries}
    return json.dumps(content, indent=2).encode() + b"\n"


def _best_of(winners: Iterable[BestConfig], gpu: Gpu, key: Any) -> Table:
    """Returns the table of the winners that are last in the order of a key."""
    best = {entry.place: entry for entry in map(_entry, sorted(winners, key=key))}
    return Table(gpu, tuple(best.values()))


def _table_at(
    folder: Path, gpu: Gpu, written: Mapping[Path, Table]
) -> tuple[Path, tuple[Entry, ...]]:
    """Returns the file of a GPU's model and its contents. The name is NAME.json, or includes the
    number of SMs if another model has that file.
    """
    name = re.sub(r"[^A-Za-z0-9._-]", "_", gpu.name).lstrip(".") or "_"
    for stem in (name, f"{name}_{gpu.sms}_SMs"):
        path = folder / f"{stem}.json"
        try:
            table = written.get(path) or (read_table(path) if path.exists() else None)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if table is None or table.gpu.model == gpu.model:
            return path, table.entries if table else ()
    raise ValueError(
        f"{path} is of another GPU than {gpu.name!r}, expected none or one of that name"
    )


def _entry(winner: BestConfig) -> Entry:
    fields = {field.name: getattr(winner, field.name) for field in dataclasses.fields(Entry)}
    return Entry(**fields | {"when": (winner.when or now())[:10]})


def _order(entry: Entry) -> tuple[Any, ...]:
    return *entry.workload.kind, *entry.workload.shape, entry.kernel

"""Shipped tables: for each GPU model, the best config of a kernel at each workload."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outblas.autotune.store.fields import (
    Fields,
    check_names,
    checked,
    parsed,
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
class ShippedConfig:
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
class TunedTable:
    """The table shipped for one GPU model. `gpu` has the software of the newest winner."""

    gpu: Gpu
    entries: tuple[ShippedConfig, ...]


def read_table(source: Path | str) -> TunedTable:
    """Reads the table in a file (a Path) or in a text (a str).

    Raises ValueError that names the place of the error.
    """
    content = parsed(text_of(source) if isinstance(source, Path) else source, "the file")
    if type(content) is not dict or content.get("format") != FORMAT:
        raise ValueError(f"the file is {shown(content)}, expected the format {FORMAT!r}")
    check_names(content, ("format", "gpu", "entries"), "the file")
    if type(content["entries"]) is not list:
        raise ValueError(f"entries is {shown(content['entries'])}, expected a list")
    entries: dict[tuple[Workload, str], ShippedConfig] = {}
    for i, fields in enumerate(content["entries"]):
        place = f"entries[{i}]"
        if type(fields) is dict and type(fields.get("workload")) is dict:
            fields = fields | {"workload": _PLAIN | fields["workload"]}
        entry = checked(ShippedConfig, fields, place)
        if entry.place in entries:
            raise ValueError(
                f"{place} is the second entry of {entry.kernel} at {entry.workload}, expected one"
            )
        entries[entry.place] = entry
    return TunedTable(
        checked(Gpu, content["gpu"], "gpu"), tuple(sorted(entries.values(), key=_order))
    )


def best_of(winners: Iterable[BestConfig], order: Callable[[BestConfig], Any]) -> TunedTable:
    """Returns the table of winners of one model of GPU, at least one: of several at one workload
    with one kernel that which comes last in an order.
    """
    ordered = sorted(winners, key=order)
    gpu = max(ordered, key=lambda winner: winner.when).gpu
    best = {entry.place: entry for entry in map(_entry, ordered)}
    return TunedTable(gpu, tuple(best.values()))


def to_bytes(table: TunedTable) -> bytes:
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


def _entry(winner: BestConfig) -> ShippedConfig:
    fields = {
        field.name: getattr(winner, field.name) for field in dataclasses.fields(ShippedConfig)
    }
    return ShippedConfig(**fields | {"when": (winner.when or now())[:10]})


def _order(entry: ShippedConfig) -> tuple[Any, ...]:
    return *entry.workload.kind, *entry.workload.shape, entry.kernel

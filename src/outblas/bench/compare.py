"""Compares two campaigns: which ratios fell since the one that is kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from outblas.bench.record import Record
from outblas.bench.statistics import BURST_TOLERANCE, SUSTAINED_TOLERANCE

# The fields by which two records belong to the same measurement.
_SAME = attrgetter(
    *("provider", "config", "shape", "dtype", "layout", "mode", "epilogue", "batch_invariant"),
    *("product", "experts", "form", "distribution"),
)
_RATIOS = attrgetter("ratio_low", "ratio", "ratio_high")


@dataclass(frozen=True)
class Change:
    """One measurement in both campaigns, as it is now. The ratios are to the base in the same
    rounds; `tolerance` is how much two runs of the same program may differ.
    """

    record: Record
    before: float
    after: float
    tolerance: float

    @property
    def name(self) -> str:
        """The name in messages: `outblas 4096 nt burst`."""
        return _name(self.record)

    @property
    def verdict(self) -> str:
        """`fell`, `rose` or `same`."""
        if self.after < self.before * (1 - self.tolerance):
            return "fell"
        return "rose" if self.after > self.before * (1 + self.tolerance) else "same"


@dataclass(frozen=True)
class Comparison:
    """What two reports have in common, and the names that only the earlier one has."""

    changes: tuple[Change, ...]
    missing: tuple[str, ...]

    def of(self, verdict: str) -> list[Change]:
        """Returns the changes with a verdict, the largest first."""
        chosen = [change for change in self.changes if change.verdict == verdict]
        return sorted(chosen, key=lambda change: -abs(change.after / change.before - 1))


def load(path: Path) -> dict[str, Any]:
    """Reads a report that `outblas bench --save` wrote. Raises ValueError for any other file."""
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _timed(report["results"])
    except (OSError, ValueError) as error:
        raise ValueError(f"--against is {path}, but it cannot be read: {error}") from None
    except (AttributeError, KeyError, TypeError):
        raise ValueError(
            f"--against is {path}, expected a file that `outblas bench --save` wrote"
        ) from None
    return report


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Compares the ratios that both reports have with the earlier values.

    Two ratios differ if their difference exceeds the campaign's own tolerance and half of the
    spread of either, which is from the 10th to the 90th percentile of its rounds. Raises ValueError
    for reports of different GPUs, whose ratios are not comparable.
    """
    gpus = [report.get("environment", {}).get("gpu") for report in (before, after)]
    if gpus[0] != gpus[1]:
        raise ValueError(f"--against was measured on {gpus[0]}, expected this GPU, {gpus[1]}")
    earlier, later = _timed(before["results"]), _timed(after["results"])
    changes = [_change(earlier[key], later[key]) for key in earlier if key in later]
    missing = [_name(earlier[key]) for key in earlier if key not in later]
    return Comparison(tuple(changes), tuple(missing))


def _timed(entries: Sequence[Mapping[str, Any]]) -> dict[Any, Record]:
    """Returns the records with a ratio; files lack the fields that are null."""
    records = [
        Record(**{**entry, "shape": tuple(entry["shape"])})
        for entry in entries
        if entry.get("ratio") is not None
    ]
    return {_SAME(record): record for record in records}


def _change(before: Record, after: Record) -> Change:
    tolerance = SUSTAINED_TOLERANCE if before.mode == "sustained" else BURST_TOLERANCE
    (low, old, high), (low_now, now, high_now) = map(_RATIOS, (before, after))
    return Change(after, old, now, max(tolerance, (high - low) / 2, (high_now - low_now) / 2))


def _name(record: Record) -> str:
    invariant = "batch-invariant" if record.batch_invariant else ""
    parts = record.label, record.size, record.layout, record.mode, record.epilogue, invariant
    return " ".join(filter(None, (*parts, record.product)))

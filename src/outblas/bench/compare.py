"""Compares two campaigns: which ratios fell since the one that is kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outblas.base.grouped_shapes import GroupedWorkload
from outblas.base.shapes import to_text
from outblas.bench.statistics import BURST_TOLERANCE, SUSTAINED_TOLERANCE

# The fields by which two records belong to the same measurement. Files lack those that are null.
_SAME = (
    *("provider", "config", "shape", "dtype", "layout", "mode", "epilogue", "batch_invariant"),
    *("product", "experts", "form", "distribution"),
)
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Change:
    """One measurement in both campaigns. The ratios are to the base in the same rounds; `tolerance`
    is how much two runs of the same program may differ.
    """

    key: Key
    before: float
    after: float
    tolerance: float

    @property
    def name(self) -> str:
        """The name in messages: `outblas 4096 nt burst`."""
        provider, config, shape, _, layout, mode, epilogue, invariant, product, *groups = self.key
        experts, form, distribution = groups
        label = f"{provider}[{config}]" if config else provider
        size = to_text(shape)
        if experts is not None:
            size = str(GroupedWorkload.of(experts, shape, distribution, form))
        extra = epilogue, "batch-invariant" if invariant else "", product
        return " ".join(part for part in (label, size, layout, mode, *extra) if part)

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
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--against is {path}, but it cannot be read: {error}") from None
    if not isinstance(report, dict) or not isinstance(report.get("results"), list):
        raise ValueError(f"--against is {path}, expected a file that `outblas bench --save` wrote")
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
    changes = [_change(key, earlier[key], later[key]) for key in earlier if key in later]
    missing = [_change(key, earlier[key], earlier[key]).name for key in earlier if key not in later]
    return Comparison(tuple(changes), tuple(missing))


def _timed(records: Sequence[Mapping[str, Any]]) -> dict[Key, Mapping[str, Any]]:
    return {_key(record): record for record in records if record.get("ratio") is not None}


def _key(record: Mapping[str, Any]) -> Key:
    values = {name: record.get(name) or None for name in _SAME}
    return tuple((values | {"shape": tuple(record["shape"])}).values())


def _change(key: Key, before: Mapping[str, Any], after: Mapping[str, Any]) -> Change:
    tolerance = SUSTAINED_TOLERANCE if before.get("mode") == "sustained" else BURST_TOLERANCE
    spreads = [
        (record.get("ratio_high", record["ratio"]) - record.get("ratio_low", record["ratio"])) / 2
        for record in (before, after)
    ]
    return Change(key, before["ratio"], after["ratio"], max(tolerance, *spreads))

"""Why a kernel and config were chosen: texts that are made when somebody asks for them."""

import math
from dataclasses import replace
from typing import NamedTuple

from .store.records import Workload, base_name
from .tuned_entries import COUSIN, TunedEntry


class ByEntry(NamedTuple):
    """Says that a winner was chosen for a workload, where so many µs are expected; infinity where
    it is the winner there, or nothing is expected.
    """

    entry: TunedEntry
    workload: Workload
    us: float
    on_gpu: bool

    def __str__(self) -> str:
        entry = self.entry
        is_there = entry.workload.plain == self.workload.plain
        place = str(entry.workload) if is_there else f"neighbour {entry.workload}"
        expected = f", {self.us:.1f} µs expected here" if self.us < math.inf else ""
        return f"{entry.origin}, {place}, {figure(entry, self.on_gpu)} there{expected}"


def is_faster(reason: object, workload: Workload) -> bool:
    """Returns whether a choice was made because its config was faster than torch at this very
    workload, on this model of GPU.
    """
    if not isinstance(reason, ByEntry):
        return False
    entry = reason.entry
    return (
        entry.ratio > 1
        and entry.origin != COUSIN
        and replace(entry.workload, weights=workload.weights) == workload
    )


def figure(entry: TunedEntry, on_gpu: bool) -> str:
    """Formats the ratio of a winner, or its time where there is nothing to compare it with."""
    base = base_name(entry.workload, on_gpu=on_gpu)
    return f"{entry.ratio:.3f} × {base}" if base else f"{entry.us:.1f} µs"


class ByRule(NamedTuple):
    """Says that the production kernel's own rule was chosen, from which so many µs are expected."""

    us: float

    def __str__(self) -> str:
        return f"its own heuristic, {self.us:.1f} µs expected from the times of neighbouring shapes"


class ByModel(NamedTuple):
    """Says that the model chose, which expects so many µs."""

    us: float

    def __str__(self) -> str:
        return f"analytic model, {self.us:.1f} µs expected"

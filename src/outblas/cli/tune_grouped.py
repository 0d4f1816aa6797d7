"""`outblas tune --op grouped`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core import grouped_shapes
from ..core.grouped_shapes import TERMS_LAYOUT
from .common import split

if TYPE_CHECKING:
    from ..autotune.store.records import Weights, Workload

KERNEL = "hopper.grouped"


def check(explain: str | None, epilogue: str | None, ranker: str) -> None:
    """Raises ValueError for options that only sweeps of single products have."""
    for option, value in (("--explain", explain), ("--epilogue", epilogue)):
        if value is not None:
            raise ValueError(f"{option} cannot be combined with --op grouped")
    if ranker != "model":
        raise ValueError(f"--ranker is {ranker!r}, expected model with --op grouped")


def workloads(
    shapes: str, dtype: str, out_dtype: str | None, layout: str, weights: Weights
) -> list[Workload]:
    """The workloads of groups, each in the layouts that it can have. Raises ValueError."""
    from ..autotune.store.records import Workload

    found = []
    for each in grouped_shapes.parse(shapes):
        if each.form == "terms" and weights == "cold":
            raise ValueError(
                "--weights is 'cold', expected warm with :terms, which read no weights"
            )
        for letters in split(layout) if each.form == "rows" else [TERMS_LAYOUT]:
            found.append(
                Workload(
                    *each.shape,
                    dtype,
                    out_dtype or "",
                    letters,
                    weights,
                    grouping=str(each.grouping),
                )
            )
    return list(dict.fromkeys(found))

"""The tables of a page on a shipped tuning table: what `matmul` runs for each workload."""

from __future__ import annotations

import math
from dataclasses import asdict
from statistics import geometric_mean

from outblas.autotune.named_configs import short
from outblas.autotune.store.tables import ShippedConfig
from outblas.base.shapes import SUITE, to_text
from tools.pages import tables
from tools.pages.results import Results


def part(results: Results, _: str) -> str:
    """The best config at each shape of the suite, in each dtype and layout, and what came of the
    other shapes, by the kind of workload.
    """
    table = results.tables[0]
    best: dict[object, ShippedConfig] = {}
    for entry in table.entries:
        place = entry.workload.shape, entry.workload.kind
        if place not in best or entry.ratio > best[place].ratio:
            best[place] = entry
    suite: list[tuple[str, ...]] = []
    others: dict[str, list[float]] = {}
    for entry in sorted(
        best.values(), key=lambda e: (math.prod(e.workload.shape), e.workload.shape)
    ):
        if entry.workload.shape in SUITE and not entry.workload.grouping:
            config = short(entry.kernel, entry.config).replace(",", ", ") or "default"
            figures = f"{entry.ratio:.3f}", f"`{entry.kernel}`", config
            suite.append((to_text(entry.workload.shape), _kind(entry), *figures))
        else:
            others.setdefault(_kind(entry), []).append(entry.ratio)
    lines = tables.table(("shape", "workload", "× cuBLAS", "kernel", "config"), suite)
    if others:
        columns = ("workload", "shapes", "geometric mean", "highest", "below 1")
        rows = [
            (
                kind,
                str(len(ratios)),
                f"{geometric_mean(ratios):.3f}",
                f"{max(ratios):.3f}",
                str(sum(ratio < 1 for ratio in ratios)),
            )
            for kind, ratios in sorted(others.items())
        ]
        lines += ["", "Shapes outside of the suite:", "", *tables.plain(columns, rows)]
    gpu = {"gpu": table.gpu.name, **asdict(table.gpu), "nvidia-cutlass-dsl": table.gpu.dsl}
    note = (
        "*× cuBLAS*: as measured in the finals of the sweep; *config*: the fields that differ from "
        f"the kernel's own. {tables.environments([gpu])[0]}; "
        f"{max(entry.when for entry in table.entries)[:10]}."
    )
    return "\n".join([*lines, "", note, ""])


def _kind(entry: ShippedConfig) -> str:
    """What a workload is beside its shape: dtype, layout, cold weights, epilogue and groups."""
    dtype, _, layout, weights, epilogue, groups = entry.workload.kind
    words = (dtype, layout, weights.replace("warm", ""), epilogue, groups)
    return ", ".join(filter(None, words))

"""The parts that show one kernel: its times, and its cycles by phase."""

from __future__ import annotations

from outblas.base.shapes import to_text
from tools.pages import campaigns
from tools.pages.documents import PHASES
from tools.pages.results import Results
from tools.pages.tables import NONE, closed, listed, plain, table

# The phases whose cycles are counted for each step along K, and for each tile.
STEP, TILE = ("wait", "load", "tensor"), ("store", "total")


def timings(results: Results, kernel: str) -> str:
    """A row for each timing of a kernel in its own config, in burst."""
    timed = [m for m in results.measurements if m.provider == kernel and not m.config]
    timed = sorted((m for m in timed if m.mode == "burst"), key=lambda m: m.shape)
    columns = ("shape", "layout", "µs", "TFLOP/s", "× cuBLAS", "spread", "apart")
    note = (
        f"{kernel} in burst; *spread*: from the 10th to the 90th percentile of rounds; *apart*: "
        "the ratio with a foreign kernel between calls; every product was checked: "
        f"{listed(dict.fromkeys(m.check for m in timed))}"
    )
    return closed(plain(columns, campaigns.rows_of(timed, columns)), timed, note)


def phases(results: Results, _: str) -> str:
    """A row for each role of a kernel: its cycles by phase. 001's cycles follow those of its own
    kernel.
    """
    cells = []
    for entry in results.phases:
        provider, config = entry["provider"], entry.get("config")
        name = f"{provider}[{config}]" if config else provider
        cells += [
            (name, role["name"], *(_cycles(role[phase]) for phase in STEP + TILE))
            for role in entry["phases"]
        ]
        if provider in PHASES and not config:
            source, cycles = PHASES[provider]
            cells.append((source, "all", *(_cycles(cycles.get(phase)) for phase in STEP + TILE)))
    gpus = ", ".join(dict.fromkeys(entry["device"] for entry in results.phases))
    shapes = ", ".join(dict.fromkeys(to_text(entry["shape"]) for entry in results.phases))
    note = (
        f"SM cycles by clock64 in an instrumented compile, {shapes}, {gpus}; *wait*, *load*, "
        "*tensor*: of one step along K; *store*, *all*: of one tile."
    )
    return "\n".join([*table(("kernel", "role", *STEP, "store", "all"), cells), "", note]) + "\n"


def _cycles(cycles: float | None) -> str:
    return f"{cycles:,.0f}" if cycles else NONE

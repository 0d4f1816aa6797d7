"""The parts that show one kernel: over square sizes, over layouts, and its cycles by phase."""

from __future__ import annotations

from outblas.base import registry
from outblas.base.shapes import SQUARES, to_text
from tools.pages.documents import PHASES, of_rung
from tools.pages.results import Results, find, gpus_of
from tools.pages.tables import NONE, closed, figure, listed, number, ratio, span, spread, table

# The phases whose cycles are counted for each step along K, and for each tile.
STEP, TILE = ("wait", "load", "tensor"), ("store", "total")


def sizes(results: Results, kernel: str) -> str:
    """A row for each square size at which a kernel was timed on the first GPU, with the ratio that
    its document gives there.
    """
    columns = ("N", "µs", "TFLOP/s", "× cuBLAS", "spread", "µs apart", "× apart", "seed")
    dtype = registry.dtype_of(kernel.partition(".")[0])
    gpu = gpus_of(results.measurements)[0]
    timings = (find(results.measurements, kernel, (n, n, n), dtype, gpu) for n in SQUARES)
    timed = [m for m in timings if m is not None]
    cells = [
        (
            str(m.shape[0]),
            number(m.us),
            number(m.tflops),
            figure(m.ratio, ".3f"),
            spread(m),
            number(m.us_apart),
            figure(m.ratio_apart, ".3f"),
            _seed(kernel, m.shape[0], m.gpu),
        )
        for m in timed
    ]
    note = (
        "burst (calls under 100 µs in a CUDA graph); *spread*: from the 10th to the 90th "
        "percentile of rounds; *apart*: with a foreign kernel between calls; *seed*: the ratio of "
        "the document behind it to its own cuBLAS; every product was checked: "
        f"{listed(dict.fromkeys(m.check for m in timed))}"
    )
    return closed(table(columns, cells), timed, note)


def _seed(kernel: str, n: int, gpu: str) -> str:
    """The document's ratio to its own cuBLAS; a dash where it has none at this size."""
    figures = (f.ratio for f in of_rung(kernel) if f.n == n and f.gpu == gpu and f.ratio)
    return span(next(figures, None), lambda value: f"{value:.4g}")


def layouts(results: Results, kernel: str) -> str:
    """A row for each layout of one kernel in its own config."""
    timed = [m for m in results.measurements if m.provider == kernel and not m.config]
    cells = [(m.layout, number(m.us), number(m.tflops), ratio(m), m.check) for m in timed]
    shapes = ", ".join(dict.fromkeys(to_text(m.shape) for m in timed))
    note = f"{kernel} at {shapes}, burst, each layout in a campaign of its own"
    return closed(table(("layout", "µs", "TFLOP/s", "× cuBLAS", "check"), cells), timed, note)


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

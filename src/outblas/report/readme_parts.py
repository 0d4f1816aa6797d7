"""The tables and charts that pages have between their markers, made from measurements."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.shapes import parse, to_text
from . import (
    access_cases,
    accesses,
    campaigns,
    grouped,
    ladder,
    ladder_tables,
    markdown,
    phases,
    raster,
    sizes,
    text,
)
from .evidence import Evidence
from .tuning import shipped

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure


def _ladder(evidence: Evidence, argument: str) -> str:
    """The tables of a ladder. The argument is its name and, after a space, the sizes where they are
    not its usual ones.
    """
    name, _, wanted = argument.partition(" ")
    edges = tuple(shape[0] for shape in parse(wanted, "sizes of a ladder")) if wanted else None
    rows = ladder.rows(
        evidence.measurements, name, edges or ladder.default_sizes(name), evidence.profiles
    )
    measured = [m for row in rows for m in row.measured]
    checks = markdown.listed(dict.fromkeys(m.check for m in measured))
    note = (
        "burst; *spread*: from the 10th to the 90th percentile of rounds; *× parent*: the ratio to "
        "cuBLAS over that of the rung's parent in the same campaign; every product was checked: "
        f"{checks}"
    )
    return markdown.closed(ladder_tables.lines(name, rows), measured, note)


def _sizes(evidence: Evidence, kernel: str) -> str:
    """The table of one kernel over square products."""
    rows = sizes.rows(evidence.measurements, kernel)
    columns = ("N", "µs", "TFLOP/s", "× cuBLAS", "spread", "µs apart", "× apart", "seed")
    cells = [
        (
            str(row.n),
            text.number(row.ours.us),
            text.number(row.ours.tflops),
            text.figure(row.ours.ratio, ".3f"),
            text.spread(row.ours),
            text.number(row.ours.us_apart),
            text.figure(row.ours.ratio_apart, ".3f"),
            row.seed(),
        )
        for row in rows
    ]
    checks = markdown.listed(dict.fromkeys(row.ours.check for row in rows))
    note = (
        "burst (calls under 100 µs in a CUDA graph); *spread*: from the 10th to the 90th "
        "percentile of rounds; *apart*: with a foreign kernel between calls; *seed*: the ratio of "
        f"the document behind it to its own cuBLAS; every product was checked: {checks}"
    )
    return markdown.closed(markdown.table(columns, cells), [row.ours for row in rows], note)


def _layouts(evidence: Evidence, kernel: str) -> str:
    """A row for each layout of one kernel in its own config."""
    found = [m for m in evidence.measurements if m.provider == kernel and not m.config]
    cells = [
        (m.layout, text.number(m.us), text.number(m.tflops), text.ratio(m), m.check) for m in found
    ]
    lines = markdown.table(("layout", "µs", "TFLOP/s", "× cuBLAS", "check"), cells)
    shapes = ", ".join(dict.fromkeys(to_text(m.shape) for m in found))
    return markdown.closed(
        lines, found, f"{kernel} at {shapes}, burst, each layout in a campaign of its own"
    )


def _chart(evidence: Evidence, name: str) -> str:
    """The picture of a campaign. The argument is its file."""
    gpus = ", ".join(dict.fromkeys(m.device for m in evidence.measurements))
    return f"![Speed relative to cuBLAS by shape, and TFLOP/s by N, on an {gpus}]({name})\n"


def _climb(evidence: Evidence, argument: str) -> str:
    """The picture of a climb. The argument is the ladder's name and the picture's file."""
    name, _, file = argument.partition(" ")
    gpus = ", ".join(dict.fromkeys(m.device for m in evidence.measurements))
    return (
        f"![Speed of each rung of the {name} ladder relative to cuBLAS on an {gpus}, beside the "
        f"seed document's figures]({file})\n"
    )


def _phases(evidence: Evidence, argument: str) -> str:
    """A row for each role of a kernel: its cycles by phase."""
    gpus = ", ".join(dict.fromkeys(counted.device for counted in evidence.phases))
    shapes = ", ".join(dict.fromkeys(to_text(counted.shape) for counted in evidence.phases))
    columns = ("kernel", "role", *phases.STEP, "store", "all")
    lines = markdown.table(columns, phases.rows(evidence.phases))
    note = (
        f"SM cycles by clock64 in an instrumented compile, {shapes}, {gpus}; *wait*, *load*, "
        "*tensor*: of one step along K; *store*, *all*: of one tile."
    )
    return "\n".join([*lines, "", note]) + "\n"


def _conflicts(evidence: Evidence, argument: str) -> str:
    """The tables of bank conflicts, predicted and counted by ncu."""
    gpus = _accessed(evidence)
    rows = accesses.conflicts(evidence.profiles)
    lines = [*markdown.table(accesses.SQUARE_COLUMNS, accesses.square(rows)), ""]
    columns, cells, within = markdown.without(
        "within 2%", accesses.CONFLICT_COLUMNS, [row.cells() for row in rows]
    )
    lines += markdown.table(columns, cells)
    all_within = f"; in every row: {within}" if within else ""
    return "\n".join([*lines, "", f"{accesses.CONFLICTS_NOTE}{all_within}. {gpus}, ncu."]) + "\n"


def _coalescing(evidence: Evidence, argument: str) -> str:
    """The table of accesses to global memory by kernels that do not stage their operands."""
    gpus = _accessed(evidence)
    direct = {kernel for kernel, _ in accesses.DIRECT}
    rows = [row for row in accesses.coalescing(evidence.profiles) if row.case.kernel in direct]
    lines = markdown.table(accesses.COALESCING_COLUMNS, (row.cells() for row in rows))
    return "\n".join([*lines, "", f"{accesses.COALESCING_NOTE}. {gpus}, ncu."]) + "\n"


def _accessed(evidence: Evidence) -> str:
    """The GPUs on which memory instructions of CUDA-core kernels were profiled. Raises ValueError
    where no profile has them.
    """
    found = access_cases.profiled(evidence.profiles)
    if not found:
        raise ValueError("no profile of simt.* made with --instructions, expected one at least")
    return ", ".join(dict.fromkeys(profile.device for profile in found))


def _raster(evidence: Evidence, n: str) -> str:
    """The tables of orders of tiles at one square product."""
    found = _orders_report(evidence, n)
    lines = markdown.table(raster.COLUMNS, (row.cells() for row in found.rows))
    lines += ["", *markdown.table(raster.AGREEMENT_COLUMNS, (a.cells() for a in found.agreements))]
    return "\n".join([*lines, "", f"{found.title}. {' '.join(found.notes())}"]) + "\n"


def _orders(evidence: Evidence, argument: str) -> str:
    """The picture of orders of tiles. The argument is the edge of the product and the picture's
    file.
    """
    n, _, file = argument.partition(" ")
    return (
        f"![Tiles of C at {n}³ by the wave in which they run, and the path through them, for each "
        f"order]({file})\n"
    )


def _orders_report(evidence: Evidence, n: str) -> raster.Report:
    (shape,) = parse(n, "raster", least=1)
    return raster.report(raster.Setting(shape), raster.GROUPS[-1], evidence.profiles)


# The text of a part by its kind, from the measurements and the argument.
TEXTS: dict[str, Callable[[Evidence, str], str]] = {
    "suite": campaigns.suite,
    "headline": campaigns.headline,
    "cold": campaigns.cold,
    "layers": campaigns.layers,
    "sustained": campaigns.sustained,
    "fp8": campaigns.fp8,
    "invariance": campaigns.invariance,
    "grouped": grouped.tables,
    "grouped-means": grouped.means,
    "ladder": _ladder,
    "sizes": _sizes,
    "layouts": _layouts,
    "chart": _chart,
    "climb": _climb,
    "phases": _phases,
    "conflicts": _conflicts,
    "coalescing": _coalescing,
    "raster": _raster,
    "orders": _orders,
}


# The kinds whose files may be missing because nobody has measured yet, and what such a part says.
NOT_YET = {"grouped": "No campaign was saved yet.\n"}


# The text of a part by its kind, from a shipped table of `autotune/tables/` and the argument.
TABLES: dict[str, Callable[[Path, str], str]] = {"tuned": shipped.part}


def _chart_figure(evidence: Evidence, _: str) -> Figure:
    from ..bench import chart

    measurements = evidence.measurements
    results = [{**m.record(), "shape": list(m.shape)} for m in measurements]
    return chart.figure({"environment": measurements[0].environment, "results": results})


def _climb_figure(evidence: Evidence, name: str) -> Figure:
    from . import ladder_chart

    edges = ladder.default_sizes(name)
    return ladder_chart.draw(ladder.rows(evidence.measurements, name, edges), edges)


def _orders_figure(evidence: Evidence, n: str) -> Figure:
    from . import raster_chart

    return raster_chart.draw(_orders_report(evidence, n))


# The figure of a part that is drawn, by its kind, from the measurements and the argument's first
# word.
FIGURES: dict[str, Callable[[Evidence, str], Figure]] = {
    "chart": _chart_figure,
    "climb": _climb_figure,
    "orders": _orders_figure,
}

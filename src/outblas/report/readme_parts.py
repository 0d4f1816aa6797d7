"""The tables and charts that pages have between their markers, made from measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import geometric_mean
from typing import TYPE_CHECKING

from ..bench.record import BASE, BEST
from ..core.shapes import SUITE, Shape, parse, to_text
from . import access_cases, accesses, ladder, page, phases, raster, sizes, text
from .evidence import Evidence
from .results import Measurement, Measurements
from .tuning import shipped

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure


def _suite(evidence: Evidence, argument: str) -> str:
    """A row for each shape: cuBLAS's time, then every other provider's ratio with its spread, and
    its ratio with a foreign kernel between calls.
    """
    burst = _campaign(evidence.measurements, "burst")
    others = list(dict.fromkeys(m.label for m in burst if m.provider != BASE))
    shapes = sorted({m.shape for m in burst}, key=_order)
    lines = [
        f"| shape | cuBLAS µs | TFLOP/s | {' | '.join(f'{name} × cuBLAS' for name in others)} |"
    ]
    lines.append("|---" * (3 + len(others)) + "|")
    for shape in shapes:
        at = {m.label: m for m in burst if m.shape == shape}
        if BASE not in at:
            raise ValueError(
                f"{to_text(shape)} has no {BASE} in burst, expected it beside every other provider"
            )
        base = at[BASE]
        cells = [_ratio(at.get(name)) for name in others]
        lines.append(
            f"| {to_text(shape)} | {_us(base.us)} | {base.tflops:.0f} | {' | '.join(cells)} |"
        )
    means = [_mean([m for m in burst if m.label == name], shapes) for name in others]
    lines.append(f"| geometric mean | | | {' | '.join(means)} |")
    note = (
        "burst (idle, one warm call, then 8 timed, or a CUDA graph of about 1 ms for calls under "
        "100 µs); "
        "10th–90th percentile of rounds in brackets; *apart*: with a foreign kernel between calls"
    )
    return _closed(lines, burst, note)


def _mean(rows: Sequence[Measurement], shapes: Sequence[Shape]) -> str:
    """The geometric mean of a provider's ratios over all shapes, and to the best of cuBLASLt where
    that was timed; a dash where a shape lacks.
    """
    ratios = [m.ratio for m in rows if m.ratio is not None]
    if len(ratios) != len(shapes):
        return text.NONE
    best = [m.ratio_best for m in rows if m.ratio_best is not None and m.provider != BEST]
    beside = f" ({geometric_mean(best):.3f} of {BEST})" if len(best) == len(shapes) else ""
    return f"**{geometric_mean(ratios):.3f}**{beside}"


def _cold(evidence: Evidence, argument: str) -> str:
    """A row for each shape: the base's time with cold weights, and another provider's with its
    bandwidth. The argument is that provider.
    """
    found = _campaign(evidence.measurements, "cold")
    lines = [
        f"| shape | cuBLAS µs | {argument} µs | GB/s | of copy | × cuBLAS | × {BEST} | "
        "warm × cuBLAS |",
        "|---" * 8 + "|",
    ]
    warm = {m.shape: m for m in evidence.measurements if (m.label, m.mode) == (argument, "burst")}
    base = {m.shape: m for m in found if m.provider == BASE}
    ours = sorted((m for m in found if m.label == argument), key=lambda m: _order(m.shape))
    for m in ours:
        cells = (
            to_text(m.shape),
            _us(base[m.shape].us),
            _us(m.us),
            text.figure(m.gbs, ".0f"),
            text.figure(m.bandwidth_share, ".0%"),
            text.ratio(m),
            text.figure(m.ratio_best, ".3f"),
            text.ratio(warm[m.shape]) if m.shape in warm else text.NONE,
        )
        lines.append(f"| {' | '.join(cells)} |")
    copies = dict.fromkeys(m.environment.get("copy_gbs") for m in ours)
    bandwidth = " and ".join(text.figure(each, ".0f") for each in copies)
    note = (
        "bursts over copies of the weights whose sum is twice L2; 10th–90th percentile of rounds "
        f"in brackets; a copy of a gigabyte reaches {bandwidth} GB/s"
    )
    return _closed(lines, found, note)


def _sustained(evidence: Evidence, argument: str) -> str:
    """A row for each shape and provider: speed, clock and power in calls without pause."""
    kept = _campaign(evidence.measurements, "sustained")
    lines = [
        "| shape | provider | TFLOP/s | × cuBLAS | SM clock, MHz | utilisation | W | pJ/FLOP |",
        "|---" * 8 + "|",
    ]
    for m in kept:
        figures = (
            (m.clock_mhz, ".0f"),
            (m.utilisation, ".3f"),
            (m.watts, ".0f"),
            (m.pj_per_flop, ".2f"),
        )
        cells = (
            to_text(m.shape),
            m.label,
            f"{m.tflops:.0f}",
            _ratio(m),
            *(text.figure(*each) for each in figures),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return _closed(
        lines,
        kept,
        "sustained (turns of 2 s, the first half discarded, cuBLAS before and after each)",
    )


def _campaign(measurements: Measurements, mode: str) -> list[Measurement]:
    """The timings in a mode. Raises ValueError unless they are of one campaign, on one GPU, in one
    dtype and layout.
    """
    found = [m for m in measurements if m.mode == mode and m.ratio is not None]
    conditions = {(m.device, m.dtype, m.layout, m.is_plain) for m in found}
    if len(conditions) != 1:
        raise ValueError(
            f"a table of {mode} figures has {len(conditions)} kinds of GPU, dtype, layout and "
            "operation, expected one"
        )
    if len({(m.label, m.shape) for m in found}) != len(found):
        raise ValueError(
            f"a table of {mode} figures has one provider and shape twice, expected one run"
        )
    return found


def _ladder(evidence: Evidence, argument: str) -> str:
    """The table of a ladder. The argument is its name and, after a space, the sizes where they are
    not its usual ones.
    """
    name, _, wanted = argument.partition(" ")
    edges = tuple(shape[0] for shape in parse(wanted, "sizes of a ladder")) if wanted else None
    rows = ladder.rows(
        evidence.measurements, name, edges or ladder.default_sizes(name), evidence.profiles
    )
    usual = rows[0].at[0].n
    measured = [m for row in rows for m in row.measured]
    columns = ladder.columns(name)
    counted = ", ".join(heading.replace("\n", " ") for heading in columns[-4:-1])
    variants = dict.fromkeys(variant for row in rows for at in row.at for variant in at.timed)
    meaning = {ladder.MIXED_OPERANDS: "bfloat16 operands, beside the rung's own float32"}
    beside = "".join(
        f"; {variant}: {meaning.get(variant, 'compiled for it, and loaded as PTX')}"
        for variant in variants
        if variant
    )
    note = (
        f"burst; a seed's figure is an H100's at {usual} where it does not say; {counted} by "
        f"ncu{beside}"
    )
    return _closed(_markdown(columns, [row.cells() for row in rows]), measured, note)


def _sizes(evidence: Evidence, kernel: str) -> str:
    """The table of one kernel over square products."""
    rows = sizes.rows(evidence.measurements, kernel)
    note = (
        "burst (calls under 100 µs in a CUDA graph); *apart*: with a foreign kernel between calls"
    )
    return _closed(
        _markdown(sizes.COLUMNS, [row.cells() for row in rows]), [row.ours for row in rows], note
    )


def _layouts(evidence: Evidence, kernel: str) -> str:
    """A row for each layout of one kernel in its own config."""
    found = [m for m in evidence.measurements if m.provider == kernel and not m.config]
    cells = [
        (m.layout, text.number(m.us), text.number(m.tflops), text.ratio(m), m.check) for m in found
    ]
    lines = _markdown(("layout", "µs", "TFLOP/s", "× cuBLAS", "check"), cells)
    shapes = ", ".join(dict.fromkeys(to_text(m.shape) for m in found))
    return _closed(
        lines, found, f"{kernel} at {shapes}, burst, each layout in a campaign of its own"
    )


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table whose first column is code; line breaks within a cell are kept."""
    cells = [[f"`{first}`", *rest] for first, *rest in rows]
    lines = [" | ".join(row).replace("\n", "<br>") for row in (columns, *cells)]
    return [f"| {lines[0]} |", "|---" * len(columns) + "|", *(f"| {line} |" for line in lines[1:])]


def _chart(evidence: Evidence, name: str) -> str:
    """The picture of a campaign. The argument is its file."""
    gpus = ", ".join(dict.fromkeys(m.device for m in evidence.measurements))
    return f"![Ratio to cuBLAS by shape, and TFLOP/s against N: {gpus}]({name})\n"


def _climb(evidence: Evidence, argument: str) -> str:
    """The picture of a climb. The argument is the ladder's name and the picture's file."""
    name, _, file = argument.partition(" ")
    gpus = ", ".join(dict.fromkeys(m.device for m in evidence.measurements))
    return (
        f"![Ratio to cuBLAS by rung of the {name} ladder, the seed's beside ours: {gpus}]({file})\n"
    )


def _phases(evidence: Evidence, argument: str) -> str:
    """A row for each role of a kernel: its cycles by phase."""
    gpus = ", ".join(dict.fromkeys(counted.device for counted in evidence.phases))
    shapes = ", ".join(dict.fromkeys(to_text(counted.shape) for counted in evidence.phases))
    lines = _markdown(phases.COLUMNS, phases.rows(evidence.phases))
    return (
        "\n".join(
            [*lines, "", f"SM cycles by clock64 in an instrumented compile, {shapes}, {gpus}."]
        )
        + "\n"
    )


def _conflicts(evidence: Evidence, argument: str) -> str:
    """The tables of bank conflicts, predicted and counted by ncu."""
    gpus = _accessed(evidence)
    rows = accesses.conflicts(evidence.profiles)
    lines = [*_markdown(accesses.SQUARE_COLUMNS, accesses.square(rows)), ""]
    lines += _markdown(accesses.CONFLICT_COLUMNS, (row.cells() for row in rows))
    return "\n".join([*lines, "", f"{accesses.CONFLICTS_NOTE}. {gpus}, ncu."]) + "\n"


def _coalescing(evidence: Evidence, argument: str) -> str:
    """The table of accesses to global memory by kernels that do not stage their operands."""
    gpus = _accessed(evidence)
    direct = {kernel for kernel, _ in accesses.DIRECT}
    rows = [row for row in accesses.coalescing(evidence.profiles) if row.case.kernel in direct]
    lines = _markdown(accesses.COALESCING_COLUMNS, (row.cells() for row in rows))
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
    lines = _markdown(raster.COLUMNS, (row.cells() for row in found.rows))
    lines += ["", *_markdown(raster.AGREEMENT_COLUMNS, (a.cells() for a in found.agreements))]
    return "\n".join([*lines, "", f"{found.title}. {' '.join(found.notes())}"]) + "\n"


def _orders(evidence: Evidence, argument: str) -> str:
    """The picture of orders of tiles. The argument is the edge of the product and the picture's
    file.
    """
    n, _, file = argument.partition(" ")
    return f"![Tiles of C at {n}³ by the wave in which they run, for each order]({file})\n"


def _orders_report(evidence: Evidence, n: str) -> raster.Report:
    (shape,) = parse(n, "raster", least=1)
    return raster.report(raster.Setting(shape), raster.GROUPS[-1], evidence.profiles)


# The text of a part by its kind, from the measurements and the argument.
TEXTS: dict[str, Callable[[Evidence, str], str]] = {
    "suite": _suite,
    "cold": _cold,
    "sustained": _sustained,
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
    return raster.draw(_orders_report(evidence, n))


# The figure of a part that is drawn, by its kind, from the measurements and the argument's first
# word.
FIGURES: dict[str, Callable[[Evidence, str], Figure]] = {
    "chart": _chart_figure,
    "climb": _climb_figure,
    "orders": _orders_figure,
}


def _closed(lines: list[str], measurements: Sequence[Measurement], note: str) -> str:
    """A table with a last line on dtypes, layouts, the way of timing and the environments."""
    kinds = dict.fromkeys((m.dtype, m.layout) for m in measurements)
    dtypes, layouts = (_listed(dict.fromkeys(of)) for of in zip(*kinds, strict=True))
    where = "; ".join(page.environment_notes(m.environment for m in measurements))
    return "\n".join([*lines, "", f"{dtypes}, {layouts}, {note}. {where}."]) + "\n"


def _listed(words: Iterable[str]) -> str:
    """The words as a sentence lists them: "a, b and c"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _ratio(m: Measurement | None) -> str:
    if m is None or m.ratio is None:
        return text.NONE
    apart = f", apart {m.ratio_apart:.3f}" if m.ratio_apart is not None else ""
    return f"{text.ratio(m)}{apart}"


def _us(us: float | None) -> str:
    return text.figure(us, ".0f" if us and us >= 1000 else ".3g")


def _order(shape: Shape) -> tuple[int, Shape]:
    """A key that sorts shapes in the order of the suite, others after them."""
    return (SUITE.index(shape) if shape in SUITE else len(SUITE)), shape

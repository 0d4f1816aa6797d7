"""The tables of a ladder: a row for each rung and size, then what ncu counted of each rung. Its
chart has the ratio to cuBLAS by rung at each size, a seed document's beside ours.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from matplotlib.figure import Figure as Chart

from outblas.base import registry
from outblas.base.shapes import parse
from outblas.bench import plotting
from tools.pages import drawing
from tools.pages.documents import FIGURES, Figure, of_rung
from tools.pages.results import GPUS, Measurement, Profile, Results, find, gpus_of, profiled
from tools.pages.tables import (
    NONE,
    closed,
    devices,
    figure,
    listed,
    number,
    operands,
    percent,
    spread,
    table,
)

# The edges of square GEMMs at which the documents measured a ladder.
SIZES = {"simt": (2048, 4096), "turing": (2048, 4096), "hopper": (4096, 8192)}
# The variants in which a rung is measured: its own, with mixed operands, and, under the name of an
# older GPU, code that was compiled for that GPU.
OWN, MIXED = "", "mixed"
VARIANTS = {"simt": {MIXED: ("bfloat16", "")}, "turing": {"sm_75": ("float16", "arch=75")}}

_SPEED = ("rung", "N", "TFLOP/s", "× cuBLAS", "spread", "× parent", "check")
_MIXED = ("rung", "N", "TFLOP/s", "× its own float32", "check")
_Counter = tuple[str, Callable[[Profile], str]]
_OCCUPANCY: _Counter = ("occupancy", lambda p: percent(p.occupancy))
_IPC: _Counter = ("IPC", lambda p: number(p.ipc))
# What ncu's table has beside registers, by ladder.
_COUNTERS: dict[str, tuple[_Counter, ...]] = {
    "simt": (_OCCUPANCY, ("FMA pipe", lambda p: percent(p.fma_active)), _IPC),
    "turing": (_OCCUPANCY, ("tensor pipe", lambda p: percent(p.tensor_active)), _IPC),
    "hopper": (
        ("stages", lambda p: p.settings.get("stages", NONE)),
        ("L2 hits", lambda p: percent(p.l2_hit_rate)),
    ),
}
# Of the chart.
OURS, SEED = plotting.PALETTE[0], plotting.BASE_COLOUR
_ROW, _AROUND = 0.36, 1.4  # inches: a rung, and what is above and below the rungs
_BAR = 0.4  # the height of a bar, where rungs are 1 apart


@dataclass(frozen=True)
class Rung:
    """A rung of a climb, the dtype in which it is compared, and the documents' figures on it."""

    name: str
    parent: str | None
    dtype: str
    figures: Sequence[Figure]


@dataclass(frozen=True)
class AtSize:
    """A rung at the square GEMM of edge `n`, by variant: the timing, and its ratio to cuBLAS over
    that of its parent in the same campaign.
    """

    n: int
    timed: dict[str, Measurement]
    gains: dict[str, float]


@dataclass(frozen=True)
class Row:
    """A rung at each size, and ncu's counters at the first size that was profiled."""

    rung: Rung
    at: tuple[AtSize, ...]
    profile: Profile | None


def tables(results: Results, argument: str) -> str:
    """The tables of a ladder. The argument is its name and, after a space, the sizes."""
    name, _, sizes = argument.partition(" ")
    ladder = rows(results, name, [shape[0] for shape in parse(sizes, "sizes of a ladder")])
    lines = _speeds(ladder, OWN, _SPEED)
    for variant in VARIANTS.get(name, {}):
        is_mixed = variant == MIXED
        what = "with bfloat16 operands and float32 sums"
        if not is_mixed:
            what = f"compiled for {variant} and loaded as PTX"
        lines += ["", f"The same rungs {what}:", ""]
        lines += _speeds(ladder, variant, _MIXED if is_mixed else _SPEED)
    if any(row.profile for row in ladder):
        lines += ["", "Counted by ncu:", "", *_counted(name, ladder)]
    measured = [m for row in ladder for at in row.at for m in at.timed.values()]
    note = (
        "burst; *spread*: from the 10th to the 90th percentile of rounds; *× parent*: the ratio to "
        "cuBLAS over that of the rung's parent in the same campaign; every product was checked: "
        f"{listed(dict.fromkeys(m.check for m in measured))}"
    )
    return closed(lines, measured, note)


def rows(results: Results, name: str, sizes: Sequence[int]) -> list[Row]:
    """A row for each rung of a ladder. The first of Turing's and of Hopper's is the CUDA-core
    kernel from which the climb starts.
    """
    dtype = registry.dtype_of(name)
    climb = [
        Rung(k.name, k.parent, dtype, [f for f in of_rung(k.name) if f.dtype == dtype])
        for k in registry.ladder(name)
    ]
    rungs = [*_baseline(name), *climb]
    names = {rung.name for rung in rungs}
    return [_row(results, rung, name, sizes, names) for rung in rungs]


def _baseline(name: str) -> list[Rung]:
    """The rung from which a ladder starts, with the one figure that its documents have on it."""
    if name == "turing":
        figures = [f for f in of_rung("simt.vectorized") if f.source == "003 v05"]
        # Compared with the same document's cuBLAS on the operands of this ladder.
        cublas = next(f.cublas for f in FIGURES if f.rung.startswith("turing.") and f.gpu == "T4")
        source = f"{figures[0].source} in {figures[0].dtype}"
        of_half = replace(figures[0], dtype="float16", cublas=cublas, source=source)
        parent = registry.find("simt.vectorized").parent
        return [Rung("simt.vectorized", parent, "float16", [of_half])]
    if name == "hopper":
        figures = [f for f in of_rung("simt.warptile") if f.source == "001 kernel 1"]
        parent = registry.find("simt.warptile").parent
        return [Rung("simt.warptile", parent, "bfloat16", figures)]
    return []


def _layouts(rung: str, ladder: str) -> tuple[str, ...]:
    """The layouts in which a rung is compared on a ladder: the ladder's first, then its own."""
    return tuple(dict.fromkeys((registry.layout_of(ladder), registry.layout_of(rung))))


def _timing(
    results: Results, rung: str, ladder: str, n: int, dtype: str, config: str
) -> Measurement | None:
    """The newest timing of a rung on the first GPU, in the first layout, that has one."""
    timings = (
        find(results.measurements, rung, (n, n, n), dtype, gpu, config=config, layout=layout)
        for gpu in gpus_of(results.measurements)
        for layout in _layouts(rung, ladder)
    )
    return next(filter(None, timings), None)


def _row(
    results: Results, rung: Rung, ladder: str, sizes: Sequence[int], names: Container[str]
) -> Row:
    """The row of a rung. `names` are those of the ladder's rungs, with which it is compared."""
    at = tuple(AtSize(n, {}, {}) for n in sizes)
    variants = {OWN: (rung.dtype, ""), **VARIANTS.get(ladder, {})}
    for size, (variant, dtype_and_config) in product(at, variants.items()):
        if ours := _timing(results, rung.name, ladder, size.n, *dtype_and_config):
            size.timed[variant] = ours
            if variant == MIXED or rung.parent is None or rung.parent not in names:
                continue
            parent = _timing(results, rung.parent, ladder, size.n, *dtype_and_config)
            same = parent is not None and parent.environment == ours.environment
            if parent and same and ours.ratio and parent.ratio:
                size.gains[variant] = ours.ratio / parent.ratio
    gpu = next((size.timed[OWN].gpu for size in at if OWN in size.timed), GPUS[0])
    profiles = (
        profiled(results.profiles, rung.name, (n, n, n), rung.dtype, gpu, layout)
        for n in sizes
        for layout in _layouts(rung.name, ladder)
    )
    return Row(rung, at, next(filter(None, profiles), None))


def _speeds(ladder: Sequence[Row], variant: str, columns: Sequence[str]) -> list[str]:
    """A row for each rung and size at which a variant was timed."""
    cells = [
        _speed(row, at, variant, at.timed[variant])
        for row in ladder
        for at in row.at
        if variant in at.timed
    ]
    if len({cell[-1] for cell in cells}) == 1:
        columns, cells = columns[:-1], [cell[:-1] for cell in cells]
    return table(columns, cells)


def _speed(row: Row, at: AtSize, variant: str, m: Measurement) -> tuple[str, ...]:
    left = (row.rung.name, str(at.n), number(m.tflops))
    if variant == MIXED:
        # The ratio to cuBLAS would compare with cuBLAS's tensor cores.
        ours = at.timed.get(OWN)
        share = m.tflops / ours.tflops if m.tflops and ours and ours.tflops else None
        return (*left, percent(share), m.check)
    gpu = "" if m.gpu == GPUS[0] else f", {m.gpu}"
    gain = figure(at.gains.get(variant), ".3f")
    return (*left, f"{figure(m.ratio, '.3f')}{gpu}", spread(m), gain, m.check)


def _counted(name: str, ladder: Sequence[Row]) -> list[str]:
    counters = _COUNTERS[name]
    cells = [
        (
            row.rung.name,
            str(row.profile.shape[0]),
            figure(row.profile.registers, ".0f"),
            *(show(row.profile) for _, show in counters),
        )
        for row in ladder
        if row.profile
    ]
    return table(("rung", "N", "registers", *(heading for heading, _ in counters)), cells)


# ---- the chart
def link(results: Results, argument: str) -> str:
    """The picture of a climb. The argument is the ladder's name and the picture's file."""
    name, _, file = argument.partition(" ")
    return (
        f"![Speed of each rung of the {name} ladder relative to cuBLAS on an "
        f"{devices(results.measurements)}, beside the seed document's figures]({file})\n"
    )


def draw(results: Results, name: str) -> Chart:
    """A panel for each size: a bar for each rung, and one for the document's figure where the
    document measured that size. Figures stand beside the bars, a dash where nothing was measured.
    """
    sizes = SIZES[name]
    ladder = [
        row
        for row in rows(results, name, sizes)
        if any(_ours(row, i) is not None or _seed(row, n) is not None for i, n in enumerate(sizes))
    ]
    height = _AROUND + _ROW * len(ladder)
    canvas, axes = plotting.grid(plotting.WIDTH, [(height, (1,) * len(sizes))], extra=0.75)
    for i, (axis, n) in enumerate(zip(axes, sizes, strict=True)):
        _panel(axis, ladder, i, n)
    timed = [at.timed[OWN] for row in ladder for at in row.at if OWN in at.timed]
    measured = [m for row in ladder for at in row.at for m in at.timed.values()]
    note = (
        f"{operands(timed)}, burst. A seed document's figure is relative to the cuBLAS that it "
        "measured, on its own GPU."
    )
    plotting.entitle(canvas, f"The {name} ladder on an {devices(measured)}", note)
    plotting.describe(canvas, " ".join(_in_words(ladder, i, n) for i, n in enumerate(sizes)))
    return canvas


def _panel(axis: Any, ladder: Sequence[Row], i: int, n: int) -> None:
    """The rungs at one size."""
    drawing.horizontal(axis, [row.rung.name for row in ladder])
    gpus = dict.fromkeys(f.gpu for row in ladder for f in row.rung.figures if f.n == n and f.ratio)
    document = f"seed document ({', '.join(gpus)})"
    series = [
        (document, "seed", SEED, [_seed(row, n) for row in ladder]),
        ("ours", "ours", OURS, [_ours(row, i) for row in ladder]),
    ]
    series = [line for line in series if any(value is not None for value in line[3])]
    for bar, (label, _, colour, values) in enumerate(series):
        offset = (bar - (len(series) - 1) / 2) * _BAR
        places = [place + offset for place, value in enumerate(values) if value is not None]
        lengths = [value for value in values if value is not None]
        axis.barh(places, lengths, _BAR * 0.92, color=colour, label=label)
    ends = [value for *_, values in series for value in values if value is not None]
    axis.set_xlim(0, 1.04 * max(1.0, *ends))
    axis.axvline(1.0, color=plotting.INK, linewidth=1.0)
    axis.set_xlabel("speed / cuBLAS's (1: as fast)")
    axis.set_ylabel("rung")
    plotting.legend_above(axis, f"N = {n}", columns=1)
    columns = [
        drawing.Column(
            heading,
            [NONE if value is None else drawing.ratio(value) for value in values],
            plotting.QUIET if colour == SEED else colour,
        )
        for _, heading, colour, values in series
    ]
    drawing.columns(axis, columns)


def _ours(row: Row, i: int) -> float | None:
    ours = row.at[i].timed.get(OWN)
    return ours.ratio if ours else None


def _seed(row: Row, n: int) -> float | None:
    """The middle of the range that a document gives for the ratio at a size."""
    figure = next((f for f in row.rung.figures if f.n == n and f.ratio is not None), None)
    return sum(figure.ratio) / 2 if figure and figure.ratio else None


def _in_words(ladder: Sequence[Row], i: int, n: int) -> str:
    """The text alternative of one panel."""
    gpus = dict.fromkeys(m.gpu for row in ladder for m in row.at[i].timed.values())
    cells = []
    for row in ladder:
        values = (("ours", _ours(row, i)), ("seed document", _seed(row, n)))
        words = [f"{who} {drawing.ratio(value)}" for who, value in values if value is not None]
        cells.append(f"{row.rung.name} {', '.join(words) or 'not measured'}")
    return f"Speed over cuBLAS's at N = {n}, {', '.join(gpus)}: {'; '.join(cells)}."

"""The chart of a roofline: the roofs of a machine with the kernels below them, and a row for each
kernel with its bound and its speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..bench import plotting
from ..core.machines import Machine
from ..core.shapes import Shape, to_text
from . import text
from .roofline import Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

LEVELS = {"compute": "compute", "dram": "DRAM", "l1": "L1", "shared": "shared"}
_ROOFS, _ROW, _AROUND, _NOTES = 3.9, 0.2, 1.4, 0.85  # inches
_SEED = plotting.PALETTE[4]


def draw(found: Sequence[Point], shape: Shape) -> Canvas:
    """Roofs of DRAM, L2 and compute over each kernel's intensity at L2, at the clock of the data
    sheet; below them a row for each kernel, with its bound at the clock at which it was timed.
    """
    machine = found[0].machine
    figure, (roofs, rows) = plotting.grid(
        plotting.WIDTH, [(_ROOFS, (1,)), (_AROUND + _ROW * len(found), (1,))], extra=_NOTES
    )
    ladders = list(dict.fromkeys(map(_ladder, found)))
    colours, markers = plotting.colours(ladders), plotting.markers(ladders)
    _draw_kernels(roofs, found, colours, markers)
    _draw_rows(rows, found, shape, colours, markers)
    # Last, when the limits are known, along which the names of the slopes are turned.
    _draw_roofs(roofs, machine, found)
    dtypes = ", ".join(dict.fromkeys(p.inspection.dtype for p in found))
    note = (
        f"{dtypes}, {to_text(shape)}. Roofs: at the data sheet's clock, {machine.boost_mhz} MHz. "
        "Rows: each bound at the clock of its kernel's timing, in the column MHz"
    )
    if any(p.ours is None for p in found):
        note += f"; {machine.boost_mhz} MHz where nothing was timed"
    plotting.entitle(figure, f"Roofline of the {machine.name}: {to_text(shape)}", f"{note}.")
    plotting.describe(figure, _in_words(found, machine))
    return figure


def _ladder(point: Point) -> str:
    return point.inspection.kernel.partition(".")[0]


def _intensity(point: Point) -> float:
    return float(point.inspection.intensity["l2"] or 1)


def _speed(point: Point) -> float | None:
    return point.ours.tflops if point.ours else None


def _l2(point: Point) -> float | None:
    """What L2 allows if no two requests of neighbouring SMs merge."""
    return point.bound.ceilings.get("l2")


def _draw_kernels(
    axis: Any, found: Sequence[Point], colours: dict[str, str], markers: dict[str, str]
) -> None:
    """The kernels by ladder: filled where they were timed, else hollow at their bound."""
    for ladder, colour in colours.items():
        own = [p for p in found if _ladder(p) == ladder]
        # A ladder of few kernels is not hidden by one of many.
        order = 3 - len(own) / (2 * len(found))
        timed = [p for p in own if _speed(p) is not None]
        bare = [p for p in own if _speed(p) is None]
        style: dict[str, Any] = {"linestyle": "none", "marker": markers[ladder], "color": colour}
        style["zorder"] = order
        axis.plot([_intensity(p) for p in timed], [_speed(p) for p in timed], **style)
        axis.plot(
            [_intensity(p) for p in bare],
            [p.bound.tflops for p in bare],
            markerfacecolor=plotting.PAPER,
            **style,
        )
        count = f"{len(own)} kernels" if len(own) > 1 else "1 kernel"
        hollow = ", not timed: bound" if not timed else ""
        filled = {} if timed else {"markerfacecolor": plotting.PAPER}
        axis.plot([], [], label=f"{ladder} ({count}{hollow})", **style, **filled)


def _draw_roofs(axis: Any, machine: Machine, found: Sequence[Point]) -> None:
    """The slopes of DRAM and L2, a level for each unit's peak, and the intensity of A, B and C
    moved once; then limits, names and title.
    """
    peaks: dict[float, list[str]] = {}
    for unit in dict.fromkeys(p.inspection.unit for p in found):
        peaks.setdefault(machine.peak_tflops(unit), []).append(unit)
    top = max(peaks)
    dram = machine.dram_gbs / 1e3  # TB/s, and TFLOP/s at one FLOP per byte
    l2 = machine.l2_bytes_per_clock * machine.boost_mhz / 1e6
    once = sorted({float(p.inspection.intensity["dram"] or 1) for p in found})
    at = [*map(_intensity, found), *once, top / dram]
    low, high = min(1.0, *at) / 1.5, max(at) * 2.5
    speeds = [_speed(p) or p.bound.tflops for p in found]
    bottom = min(*speeds, low * dram, top) / 2
    plotting.logarithmic(axis, "x")
    plotting.logarithmic(axis, "y")
    axis.set_xlim(low, high)
    axis.set_ylim(bottom, top * 2.2)
    for slope, style in ((dram, "-"), (l2, "--")):
        axis.plot(
            [low, top / slope, high], [low * slope, top, top], style, color=plotting.BASE_COLOUR
        )
    for peak, units in peaks.items():
        axis.plot([peak / l2, high], [peak, peak], "-", color=plotting.BASE_COLOUR)
        axis.annotate(
            f"{_digits(peak)} TFLOP/s ({', '.join(units)})",
            (once[0] / 1.1, peak),
            xytext=(0, 2),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=8,
            color=plotting.QUIET,
        )
    for intensity in once:
        axis.axvline(intensity, color=plotting.BASE_COLOUR, linestyle=":", linewidth=1.2, zorder=1)
    axis.annotate(
        "A, B, C once\nthrough DRAM",
        (once[0], bottom),
        xytext=(-4, 6),
        textcoords="offset points",
        fontsize=8,
        color=plotting.QUIET,
        ha="right",
        va="bottom",
    )
    axis.set_xlabel("FLOP per byte, as CTAs ask L2 for operands")
    axis.set_ylabel("TFLOP/s")
    title = f"Roofs at {machine.boost_mhz} MHz, the data sheet's clock"
    plotting.legend_above(axis, title, columns=4)
    _name_slopes(axis, low, ((dram, f"DRAM {dram:.2f} TB/s"), (l2, f"L2 {l2:.1f} TB/s")))


def _name_slopes(axis: Any, low: float, slopes: Sequence[tuple[float, str]]) -> None:
    """Writes the names of slopes along them, near their lower ends, as the figure is laid out."""
    axis.figure.canvas.figure.draw_without_rendering()
    for slope, name in slopes:
        start, end = (axis.transData.transform((x, x * slope)) for x in (low, 10 * low))
        angle = math.degrees(math.atan2(end[1] - start[1], end[0] - start[0]))
        axis.annotate(
            name,
            (low * 1.15, low * 1.15 * slope),
            xytext=(-4, 4),
            textcoords="offset points",
            rotation=angle,
            rotation_mode="anchor",
            fontsize=8,
            color=plotting.QUIET,
            va="bottom",
        )


def _draw_rows(
    axis: Any,
    found: Sequence[Point],
    shape: Shape,
    colours: dict[str, str],
    markers: dict[str, str],
) -> None:
    """A row for each kernel: what bounds it, and what was measured here and in the documents."""
    plotting.horizontal(axis, [p.inspection.kernel for p in found])
    rows = range(len(found))
    for row, p in enumerate(found):
        color, speed = colours[_ladder(p)], _speed(p)
        axis.get_yticklabels()[row].set_color(color)
        if speed is not None:
            axis.plot([speed, p.bound.tflops], [row] * 2, color=plotting.RULE, linewidth=3)
            axis.plot([speed], [row], markers[_ladder(p)], color=color, markersize=5.5)
    tick: dict[str, Any] = {"linestyle": "none", "marker": "|", "markersize": 10}
    for values, colour, label in (
        ([p.bound.tflops for p in found], plotting.INK, "bound"),
        ([_l2(p) for p in found], plotting.BASE_COLOUR, "what L2 allows if nothing merges"),
    ):
        axis.plot(values, rows, color=colour, markeredgewidth=1.8, label=label, **tick)
    if any(_speed(p) is not None for p in found):
        axis.plot([], [], "o", color=plotting.QUIET, label="measured")
    seeds = [(sum(f.tflops) / 2, row) for row, p in enumerate(found) for f in p.seeds if f.tflops]
    if seeds:
        axis.plot(
            *zip(*seeds, strict=True),
            "D",
            color=_SEED,
            markerfacecolor=plotting.PAPER,
            markersize=4.5,
            label="seed document, at any N",
        )
    plotting.logarithmic(axis, "x")
    axis.set_xlabel("TFLOP/s")
    axis.set_ylabel("kernel")
    title = f"Bound and speed of each kernel at {to_text(shape)}"
    plotting.legend_above(axis, title, columns=2)
    plotting.columns(
        axis,
        [
            plotting.Column("bound", [_digits(p.bound.tflops) for p in found]),
            plotting.Column("by", [LEVELS[p.bound.by] for p in found], plotting.QUIET),
            plotting.Column("measured", [_digits(_speed(p)) for p in found]),
            plotting.Column("MHz", [f"{p.clock_mhz:.0f}" for p in found], plotting.QUIET),
            plotting.Column("seed", [_seed(p, shape) for p in found]),
        ],
    )


def _digits(value: float | None) -> str:
    """A figure with three digits: 0.499, 51.0, 813."""
    return text.figure(value, "#.3g" if value and value < 99.95 else ".0f")


def _seed(point: Point, shape: Shape) -> str:
    """The documents' figures at this product; "17.1 at 4096" of another one."""
    at = [text.span(f.tflops, text.number) for f in point.seeds if (f.n,) * 3 == shape]
    if at or not point.seeds:
        return ", ".join(at) or text.NONE
    first = point.seeds[0]
    return f"{text.span(first.tflops, text.number)} at {first.n}"


def _in_words(found: Sequence[Point], machine: Machine) -> str:
    """The text alternative."""
    cells = []
    for p in found:
        measured = "not timed" if _speed(p) is None else f"measured {_digits(_speed(p))}"
        seeds = "".join(
            f", seed document {text.span(f.tflops, text.number)} at {f.n}" for f in p.seeds
        )
        cells.append(
            f"{p.inspection.kernel}: bound {_digits(p.bound.tflops)} by {LEVELS[p.bound.by]} at "
            f"{p.clock_mhz:.0f} MHz, {measured}{seeds}"
        )
    return (
        f"Kernels on the roofline of the {machine.name}, whose DRAM delivers "
        f"{machine.dram_gbs / 1e3:.2f} TB/s. In TFLOP/s: {'; '.join(cells)}."
    )

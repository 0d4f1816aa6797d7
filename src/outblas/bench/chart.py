"""The chart of a campaign: ratios to cuBLAS by shape, and TFLOP/s and pJ/FLOP against N."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import chart_series, plotting
from .chart_series import BASE, BEST, MEAN, Condition, Series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSIONS = (("torch", "torch"), ("CUDA", "cuda"), ("driver", "driver"))
_COLUMNS = 3  # series whose figures have room right of the chart
_WIDE = 5.0  # ratios that are this many times apart are drawn on a logarithmic scale
_UNITS = 12  # the width of a chart, in which the widths of panels are given
# Inches: a row of a panel of ratios, each further line or series in it, and what is above and below
# the rows.
_ROW, _LINE, _AROUND = 0.25, 0.13, 1.3
_LINES, _SMALL = 3.0, 1.9  # inches: the heights of panels against N, of all series and of one
_ACROSS = 4  # panels of one series side by side
_LONGEST, _NARROW = 46, 24  # characters of a line: of a row's name, of a small panel's title
_STEP = 0.26  # between the marks of two series in a row, where rows are 1 apart

Row = tuple[float, list["_Panel"]]  # the height of a row of panels in inches, and its panels


@dataclass(frozen=True)
class _Panel:
    """What `draw` draws into an axis that is `span` of `_UNITS` wide."""

    draw: Callable[[Any], None]
    span: int


def draw(report: dict[str, Any], path: Path) -> None:
    """Writes the chart of a bench report to a file. Raises ValueError when it holds no figures."""
    plotting.save(figure(report), path)


def figure(report: dict[str, Any]) -> Figure:
    """The chart of a bench report: for each layout and mode a panel of ratios, and panels against N
    where square products of several sizes were timed.

    Raises ValueError when it holds no figures.
    """
    conditions = chart_series.conditions(report["results"])
    if not conditions:
        raise ValueError("the report holds no figures to draw")
    rows = [row for each in conditions for row in _rows(each)]
    canvas, axes = plotting.grid(
        plotting.WIDTH,
        [(height, [panel.span for panel in panels]) for height, panels in rows],
        extra=0.75,
    )
    plotting.entitle(canvas, _title(report, conditions), _note(report, conditions))
    for axis, panel in zip(axes, (panel for _, panels in rows for panel in panels), strict=True):
        panel.draw(axis)
    plotting.describe(canvas, " ".join(map(_in_words, conditions)))
    return canvas


def _title(report: dict[str, Any], conditions: Sequence[Condition]) -> str:
    labels = dict.fromkeys(name for each in conditions for name in each.own if name != BEST)
    who = next(iter(labels)) if len(labels) == 1 else "Kernels" if labels else BEST
    return f"{who} beside cuBLAS on an {report['environment']['gpu']}"


def _note(report: dict[str, Any], conditions: Sequence[Condition]) -> str:
    """How to read the marks, and where they were measured."""
    results = [r for each in conditions for r in each.results]
    e = report["environment"]
    versions = "".join(f", {name} {e[key]}" for name, key in VERSIONS if e.get(key))
    dtypes, layouts = (
        " and ".join(dict.fromkeys(r[key] for r in results)) for key in ("dtype", "layout")
    )
    spread = any(r.get("ratio_low") is not None for r in results)
    lines = "A line through a mark: 10th to 90th percentile of rounds. " if spread else ""
    if any(each.is_crowded and each.against_n("tflops") for each in conditions):
        lines += f"Grey lines: {BASE}. "
    return f"{lines}{dtypes}, {layouts}{versions}."


def _rows(each: Condition) -> list[Row]:
    """The rows of panels of one layout and mode."""
    rows: list[Row] = []
    shown, names = each.series()
    if names:
        lines = max(_wrapped(name, _LONGEST).count("\n") for name in names)
        height = _AROUND + max(len(names) * (_ROW + _LINE * max(lines, len(shown) - 2)), 1.0)
        rows.append((height, [_Panel(partial(_draw_ratios, each, shown, names), _UNITS)]))
    for key, unit in (("tflops", "TFLOP/s"), ("pj_per_flop", "pJ/FLOP")):
        lines_of = each.against_n(key)
        if not lines_of:
            continue
        if each.is_crowded:
            rows += _small_rows(lines_of, unit)
        else:
            rows.append((_LINES, [_Panel(partial(_draw_lines, each, lines_of, unit), _UNITS)]))
    if len(rows) == 2 and len(shown) < _COLUMNS and not each.is_crowded:
        # One panel of lines fits beside the ratios.
        (height, (ratios,)), (_, (lines_panel,)) = rows
        return [(max(height, _LINES), [_Panel(ratios.draw, 7), _Panel(lines_panel.draw, 5)])]
    return rows


def _draw_ratios(each: Condition, shown: Sequence[Series], names: Sequence[str], axis: Any) -> None:
    """Draws a row for each name, with a mark for each series; cuBLAS is the line at 1."""
    plotting.horizontal(axis, [_wrapped(name, _LONGEST) for name in names])
    step = min(_STEP, 0.7 / len(shown))
    for i, series in enumerate(shown):
        at = [
            (row + (i - (len(shown) - 1) / 2) * step, series.ratios[name])
            for row, name in enumerate(names)
            if name in series.ratios
        ]
        for place, ratio in at:
            if ratio.low is not None and ratio.high is not None:
                axis.plot([ratio.low, ratio.high], [place] * 2, color=series.colour, linewidth=1.4)
        axis.plot(
            [ratio.value for _, ratio in at],
            [place for place, _ in at],
            series.marker,
            color=series.colour,
            markersize=5.5,
            label=series.name,
        )
    _scale(axis, shown)
    axis.axvline(1.0, color=plotting.BASE_COLOUR, linewidth=1.4, zorder=1)
    if MEAN in names:
        axis.axhline(len(names) - 1.5, color=plotting.RULE, linewidth=1.0)
        axis.get_yticklabels()[-1].set_fontweight("bold")
    axis.set_xlabel("speedup (above 1: faster)")
    axis.set_ylabel("provider" if each.is_crowded else "shape (M×N×K, or N)")
    plotting.legend_above(axis, each.title, columns=1 if len(shown) < _COLUMNS else 4)
    if len(shown) <= _COLUMNS:
        plotting.columns(axis, [_column(series, names) for series in shown])


def _column(series: Series, names: Sequence[str]) -> plotting.Column:
    cells = [
        plotting.ratio(series.ratios[name].value) if name in series.ratios else "–"
        for name in names
    ]
    return plotting.Column(series.heading, cells, series.colour)


def _scale(axis: Any, shown: Sequence[Series]) -> None:
    """Limits that hold all marks and 1, on a logarithmic scale where ratios are far apart."""
    ends = [
        end
        for series in shown
        for ratio in series.ratios.values()
        for end in (ratio.value, ratio.low, ratio.high)
        if end is not None
    ]
    low, high = min(1.0, *ends), max(1.0, *ends)
    if low > 0 and high / low > _WIDE:
        plotting.logarithmic(axis, "x")
        axis.set_xlim(low / 1.3, high * 1.3)
    else:
        margin = 0.06 * max(high - low, 0.1)
        axis.set_xlim(low - margin, high + margin)


def _draw_lines(each: Condition, lines: chart_series.Lines, unit: str, axis: Any) -> None:
    """Draws a line for each provider over square products."""
    colours, markers = plotting.colours(list(lines)), plotting.markers(list(lines))
    for name, points in lines.items():
        axis.plot(
            *zip(*points, strict=True),
            marker=markers[name],
            markersize=4.5,
            color=colours[name],
            label=name,
            linewidth=1.6,
        )
    _against_n(axis, lines, unit)
    axis.set_title(f"{unit} of square products")
    ends = [(*points[-1], name, colours[name]) for name, points in lines.items()]
    plotting.label_ends(axis, ends)


def _small_rows(lines: chart_series.Lines, unit: str) -> list[Row]:
    """A small panel for each provider: its line beside cuBLAS's."""
    own = [name for name, points in lines.items() if name != BASE and len(points) > 1]
    panels = [_Panel(partial(_draw_small, lines, name, unit), _UNITS // _ACROSS) for name in own]
    rows = []
    for i in range(0, len(panels), _ACROSS):
        most = max(_wrapped(name, _NARROW).count("\n") for name in own[i : i + _ACROSS])
        rows.append((_SMALL + _LINE * most, panels[i : i + _ACROSS]))
    return rows


def _draw_small(lines: chart_series.Lines, name: str, unit: str, axis: Any) -> None:
    shown = ((BASE, plotting.BASE_COLOUR), (name, plotting.PALETTE[0]))
    for each, colour in shown:
        if each in lines:
            axis.plot(*zip(*lines[each], strict=True), marker="o", markersize=3, color=colour)
    _against_n(axis, lines, unit)
    axis.set_title(_wrapped(name, _NARROW), fontsize=plotting.SMALL)


def _against_n(axis: Any, lines: chart_series.Lines, unit: str) -> None:
    axis.set_xscale("log", base=2)
    sizes = sorted({n for points in lines.values() for n, _ in points})
    axis.set_xticks(sizes, [str(n) for n in sizes], rotation=40, ha="right", rotation_mode="anchor")
    axis.minorticks_off()
    axis.set_xlabel("N (M = N = K)")
    axis.set_ylabel(unit)
    top = max(value for points in lines.values() for _, value in points)
    axis.set_ylim(0, 1.08 * top)


def _in_words(each: Condition) -> str:
    """The text alternative of the panels of one layout and mode."""
    sentences = []
    shown, names = each.series()
    for series in shown:
        cells = [
            f"{name} {plotting.ratio(series.ratios[name].value)}"
            for name in names
            if name in series.ratios
        ]
        sentences.append(f"{each.title}, speedup of {series.name}: {', '.join(cells)}.")
    for key, unit in (("tflops", "TFLOP/s"), ("pj_per_flop", "pJ/FLOP")):
        for name, points in each.against_n(key).items():
            cells = [f"{n} {value:.3g}" for n, value in points]
            sentences.append(f"{unit} of {name} by N: {', '.join(cells)}.")
    return " ".join(sentences)


def _wrapped(name: str, width: int) -> str:
    """A provider's name on lines of at most `width` characters, broken after commas."""
    lines = [""]
    for part in name.replace(",", ",\0").replace("[", "[\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)

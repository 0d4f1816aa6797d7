"""The chart of a sweep: the best ratio by tile, and what the model predicted against what was
measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outblas.bench import plotting

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

    from outblas.report.model import TuneReport

MARK = plotting.PALETTE[1]  # the colour that marks the best config
# Cells have these shades in the light and in the dark, and so has what is written on them.
_SHADES = ("#f1f5fb", "#c3d5ee", "#86abdc", "#3b6fb6", "#1d3f73")
_ON_LIGHT, _FAILED, _ON_FAILED = "#1d2126", "#f4f4f4", "#5f6872"
_DARK = 0.7  # from this share of the scale on, text is white
_FLOOR = 0.7  # tiles below this share of the best ratio have the lightest shade
_FEWEST_CELLS = 4  # the width is for at least so many tiles, or a single one would be a banner
_ROW, _AROUND, _BELOW = 0.5, 0.9, 3.6  # inches: a row of tiles, what is around them, a panel below
_MARGIN = 1.06  # by which the axes of predictions go beyond the points
_WIDE = 4.0  # the slowest over the fastest, from which these axes are logarithmic


def drawable(report: TuneReport) -> list[str]:
    """The panels that the trials can fill."""
    filled = {
        "tiles": bool(report.timed and report.tiles),
        "model": report.agreement is not None,
    }
    return [name for name, has_data in filled.items() if has_data]


def draw(report: TuneReport) -> Canvas:
    """Draws the tiles, and below them the model.

    Raises ValueError when there is nothing to draw.
    """
    panels = drawable(report)
    if not panels:
        raise ValueError(
            f"there is nothing to draw of {report.title}: {len(report.timed)} trials have figures"
        )
    rows: list[tuple[float, tuple[int, ...]]] = []
    if "tiles" in panels:
        rows.append((_AROUND + _ROW * len({m for m, _ in report.tiles}), (2,)))
    if "model" in panels:
        rows.append((_BELOW, (2,)))
    figure, axes = plotting.grid(plotting.WIDTH, rows, extra=0.7)
    for name, axis in zip(panels, axes, strict=True):
        {"tiles": _tiles, "model": _model}[name](axis, report)
    title = f"{report.kernel} at {report.workload}: {_won(report)}"
    plotting.entitle(figure, title, f"{report.gpu}. {_metric(report)}")
    plotting.describe(figure, describe(report))
    return figure


def _metric(report: TuneReport) -> str:
    """What the ratio is, in a few words."""
    base = report.base or "the fastest config"
    return f"{report.metric}: the time of {base} over that of the config."


def describe(report: TuneReport) -> str:
    """The chart in words, for those who do not see it."""
    parts = []
    panels = drawable(report)
    if "tiles" in panels:
        ratios = {
            tile: trials[0].ratio
            for tile, trials in report.tiles.items()
            if trials[0].ratio is not None
        }
        ranked = sorted(ratios, key=lambda tile: -ratios[tile])
        ends = [f"{m}×{n} with {ratios[m, n]:.3f}" for m, n in (ranked[0], ranked[-1])]
        parts.append(
            f"Tiles: the best of {len(report.tiles)} is {ends[0]} {report.metric}, the slowest "
            f"{ends[1]}."
        )
    if "model" in panels:
        parts.append(f"Predicted against measured time: {report.agreement}.")
    title = f"Chart of {report.kernel} at {report.workload} on {report.gpu}: {_won(report)}."
    return " ".join([title, *parts])


def _won(report: TuneReport) -> str:
    """What the best config reached."""
    best = report.top[0]
    us = f"{best.us:.0f} µs" if best.us >= 1000 else f"{best.us:.4g} µs"
    return f"{best.ratio:.3f} {report.metric}, {us}" if report.base else us


def _tiles(axis: Any, report: TuneReport) -> None:
    """A cell for each tile, M down and N across: the best ratio, and how many of the configs tried
    were right.
    """
    from matplotlib.colors import LinearSegmentedColormap

    down, across = (sorted({tile[side] for tile in report.tiles}) for side in (0, 1))
    best = {
        tile: trials[0].ratio
        for tile, trials in report.tiles.items()
        if trials[0].ratio is not None
    }
    top = max(best.values())
    floor = max(min(best.values()), _FLOOR * top)
    shades = LinearSegmentedColormap.from_list("ratio", _SHADES)
    axis.grid(False)
    for (m, n), trials in report.tiles.items():
        y, x = down.index(m), across.index(n)
        ratio = best.get((m, n))
        share = 1.0 if top == floor else (max(ratio or 0.0, floor) - floor) / (top - floor)
        colour: Any = shades(share)
        ink = plotting.ON_COLOUR if share >= _DARK else _ON_LIGHT
        words, weight = f"{ratio:.3f}" if ratio is not None else "failed", "bold"
        if ratio is None:
            colour, ink, weight = _FAILED, _ON_FAILED, "normal"
        _cell(axis, x, y, colour, marked=any(t.config == report.top[0].config for t in trials))
        right = sum(trial.ok for trial in trials)
        count = str(right) if right == len(trials) else f"{right} of {len(trials)}"
        axis.text(x, y - 0.12, words, color=ink, ha="center", va="center", weight=weight)
        axis.text(x, y + 0.26, count, color=ink, ha="center", va="center", fontsize=7.0)
    axis.set_xlim(-0.5, max(len(across), _FEWEST_CELLS) - 0.5)
    axis.set_ylim(len(down) - 0.5, -0.5)
    axis.set_xticks(range(len(across)), [str(n) for n in across])
    axis.set_yticks(range(len(down)), [str(m) for m in down])
    axis.tick_params(length=0)
    axis.spines[["left", "bottom"]].set_visible(False)
    axis.set_xlabel("tile N", **({"loc": "left"} if len(across) < _FEWEST_CELLS else {}))
    axis.set_ylabel("tile M")
    title = f"Best {report.metric} in screening by tile; below it, how many configs were right"
    axis.set_title(title)


def _cell(axis: Any, x: int, y: int, colour: Any, *, marked: bool) -> None:
    from matplotlib.patches import Rectangle

    edge, width, side = (MARK, 2.2, 0.94) if marked else (plotting.PAPER, 1.5, 1.0)
    corner = x - side / 2, y - side / 2
    axis.add_patch(
        Rectangle(
            corner, side, side, facecolor=colour, edgecolor=edge, linewidth=width, zorder=1 + marked
        )
    )


def _model(axis: Any, report: TuneReport) -> None:
    """A point for each config: what the model predicted and what screening measured. On the
    diagonal the two are equal.
    """
    agreement = report.agreement
    assert agreement is not None
    n = len(agreement.points)
    predicted, measured = zip(*agreement.points, strict=True)
    low, high = min(predicted + measured), max(predicted + measured)
    ends = low / _MARGIN, high * _MARGIN
    axis.plot(
        ends,
        ends,
        color=plotting.BASE_COLOUR,
        linewidth=1.0,
        linestyle=":",
        label="predicted = measured",
    )
    size = 22 if n <= 60 else 12 if n <= 600 else 5
    axis.scatter(predicted, measured, s=size, color=plotting.PALETTE[0], alpha=0.6, linewidths=0)
    x, y = agreement.points[agreement.best]
    axis.scatter(
        [x],
        [y],
        s=60,
        facecolor="none",
        edgecolor=MARK,
        linewidths=1.8,
        zorder=3,
        label="best config",
    )
    _scale(axis, ends)
    axis.grid(True, axis="both", color=plotting.RULE, linewidth=0.8)
    axis.set_xlabel("predicted µs")
    axis.set_ylabel("measured µs, screening")
    rho = "" if agreement.rho is None else f", Spearman's ρ {agreement.rho:.2f}"
    plotting.legend_above(axis, f"Predicted against measured{rho}", 2)


def _scale(axis: Any, ends: tuple[float, float]) -> None:
    """Both axes of one range, logarithmic where the slowest takes several times as long as the
    fastest.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    wide = ends[1] > _WIDE * ends[0]
    if wide:
        axis.set_xscale("log")
        axis.set_yscale("log")
    for side in (axis.xaxis, axis.yaxis):
        if wide:
            side.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0)))
            side.set_minor_formatter(NullFormatter())
        else:
            side.set_major_locator(MaxNLocator(5))
        side.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_xlim(*ends)
    axis.set_ylim(*ends)

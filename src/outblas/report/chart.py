"""The chart of a sweep: what the model predicted against what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outblas.bench import plotting

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

    from outblas.report.model import TuneReport

_HEIGHT = 3.6  # inches
_MARGIN = 1.06  # by which the axes go beyond the points
_WIDE = 4.0  # the slowest over the fastest, from which the axes are logarithmic


def draw(report: TuneReport) -> Canvas:
    """Draws a point for each config: what the model predicted and what screening measured. On the
    diagonal the two are equal.

    Raises ValueError for fewer than two predictions.
    """
    if not report.predictions:
        raise ValueError(
            f"there is nothing to draw of {report.title}: fewer than two configs have a prediction"
        )
    figure, (axis,) = plotting.grid(plotting.WIDTH, [(_HEIGHT, (1,))], extra=0.7)
    predicted, measured = zip(*report.predictions, strict=True)
    low, high = min(predicted + measured), max(predicted + measured)
    ends = low / _MARGIN, high * _MARGIN
    dotted = {"color": plotting.BASE_COLOUR, "linewidth": 1.0, "linestyle": ":"}
    axis.plot(ends, ends, label="predicted = measured", **dotted)
    size = 22 if len(predicted) <= 60 else 12 if len(predicted) <= 600 else 5
    axis.scatter(predicted, measured, s=size, color=plotting.PALETTE[0], alpha=0.6, linewidths=0)
    ring = {"facecolor": "none", "edgecolor": plotting.PALETTE[1], "linewidths": 1.8, "zorder": 3}
    axis.scatter(predicted[:1], measured[:1], s=60, label="best config", **ring)
    if high > _WIDE * low:
        axis.set(xscale="log", yscale="log")
    axis.set(xlim=ends, ylim=ends, xlabel="predicted µs", ylabel="measured µs, screening")
    axis.grid(True, axis="both", color=plotting.RULE, linewidth=0.8)
    rho = "" if report.rho is None else f", Spearman's ρ {report.rho:.2f}"
    plotting.legend_above(axis, f"Predicted against measured{rho}", 2)
    best = report.top[0]
    won = f"{best.us:.4g} µs"
    if best.ratio is not None:
        won = f"{best.ratio:.3f} {report.metric}, {won}"
    title = f"{report.kernel} at {report.workload}: {won}"
    plotting.entitle(figure, title, f"{report.gpus[0].name}.")
    alternative = f"Predicted against measured time on {report.gpus[0].name}: {report.agreement}."
    plotting.describe(figure, f"Chart of {title}. {alternative}")
    return figure

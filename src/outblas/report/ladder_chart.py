"""The chart of a climb: the ratio to cuBLAS by rung, the seed's beside ours at every size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import charts
from .ladder import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

SEED_COLOUR = "#c9c9c9"
_PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # keeps figures apart from the line at 1
SPAN = 0.8  # of a rung's bars together


def draw(found: Sequence[Row], sizes: Sequence[int]) -> Canvas:
    """Bars of the ratio to cuBLAS by rung, ours at each size below the seed's at one of them.

    Raises ValueError when there is nothing to draw.
    """
    shown = [row for row in found if row.measured or _seed(row, sizes)]
    if not shown:
        raise ValueError("no rung has a figure to draw")
    width = SPAN / (1 + len(sizes))
    figure, (axis,) = charts.canvas(1, (9.0, 1.4 + (0.14 + 0.14 * (1 + len(sizes))) * len(shown)))

    def place(row: int, bar: int) -> float:
        return row - SPAN / 2 + (bar + 0.5) * width

    axis.barh(
        [place(i, 0) for i in range(len(shown))],
        [_seed(row, sizes) or 0.0 for row in shown],
        width * 0.94,
        color=SEED_COLOUR,
        label="the seed, against its own cuBLAS",
    )
    for bar, n in enumerate(sizes, 1):
        ours = [row.at[bar - 1].ours for row in shown]
        ratios = [m.ratio or 0.0 if m else 0.0 for m in ours]
        colour = charts.PALETTE[(bar - 1) % len(charts.PALETTE)]
        axis.barh(
            [place(i, bar) for i in range(len(shown))], ratios, width * 0.94, color=colour,
            label=f"ours at {n}, against today's",
        )  # fmt: skip
        for i, ratio in enumerate(ratios):
            if ratio:
                at = ratio + 0.01, place(i, bar)
                axis.text(*at, f"{ratio:.3f}", va="center", fontsize="x-small", bbox=_PAPER)
    axis.axvline(1.0, color=charts.BASE_COLOUR, linewidth=1.2)
    axis.set_yticks(range(len(shown)), [row.rung.name for row in shown])
    axis.set_ylim(len(shown) - 0.4, -0.6)
    axis.grid(True, axis="x", color="#e3e3e3", linewidth=0.8)
    axis.grid(False, axis="y")
    axis.set_xlabel("× cuBLAS")
    axis.legend(frameon=False, fontsize="small", ncols=3, loc="lower left", bbox_to_anchor=(0, 1.0))
    return figure


def _seed(row: Row, sizes: Sequence[int]) -> float | None:
    """The middle of the seed's ratio, if it is at one of the sizes."""
    if row.figure is None or row.figure.ratio is None or row.figure.n not in sizes:
        return None
    return sum(row.figure.ratio) / 2

"""The chart of a climb: the ratio to cuBLAS by rung, the document's beside ours at every size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..bench import plotting
from .ladder import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

SEED_COLOURS = ("#c9c9c9", "#9f9f9f")
# The box behind a number, which keeps it apart from the line at 1.
_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
SPAN = 0.8  # the height of a rung's bars together, where rungs are 1 apart


def draw(found: Sequence[Row], sizes: Sequence[int]) -> Canvas:
    """Bars of the ratio to cuBLAS by rung, ours at each size below the seeds' at those where they
    have any.

    Raises ValueError when there is nothing to draw.
    """
    shown = [
        row for row in found if any(at.ours for at in row.at) or any(_seed(row, n) for n in sizes)
    ]
    if not shown:
        raise ValueError("no rung has a figure to draw")
    seeded = [n for n in sizes if any(_seed(row, n) for row in shown)]
    bars = [
        ([_seed(row, n) or 0.0 for row in shown], _seed_label(shown, n, seeded)) for n in seeded
    ]
    colours = [SEED_COLOURS[i % len(SEED_COLOURS)] for i in range(len(bars))]
    for i, n in enumerate(sizes):
        ours = [row.at[i].ours for row in shown]
        bars.append(([m.ratio or 0.0 if m else 0.0 for m in ours], f"ours at {n}, against today's"))
        colours.append(plotting.PALETTE[i % len(plotting.PALETTE)])
    width = SPAN / len(bars)
    figure, (axis,) = plotting.canvas(1, (9.0, 1.4 + (0.14 + 0.14 * len(bars)) * len(shown)))
    for bar, ((ratios, label), colour) in enumerate(zip(bars, colours, strict=True)):
        places = [row - SPAN / 2 + (bar + 0.5) * width for row in range(len(shown))]
        axis.barh(places, ratios, width * 0.94, color=colour, label=label)
        for ratio, place in zip(ratios, places, strict=True):
            if ratio and bar >= len(seeded):
                axis.text(
                    ratio + 0.01,
                    place,
                    f"{ratio:.3f}",
                    va="center",
                    fontsize="x-small",
                    bbox=_BOX,
                )
    axis.axvline(1.0, color=plotting.BASE_COLOUR, linewidth=1.2)
    axis.set_yticks(range(len(shown)), [row.rung.name for row in shown])
    axis.set_ylim(len(shown) - 0.4, -0.6)
    axis.grid(True, axis="x", color="#e3e3e3", linewidth=0.8)
    axis.grid(False, axis="y")
    axis.set_xlabel("× cuBLAS")
    axis.legend(
        frameon=False,
        fontsize="small",
        ncols=3 if len(bars) <= 3 else 2,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
    )
    return figure


def _seed(row: Row, n: int) -> float | None:
    """The middle of the range that a document gives for the ratio at a size."""
    figure = next((f for f in row.figures if f.n == n and f.ratio is not None), None)
    return sum(figure.ratio) / 2 if figure and figure.ratio else None


def _seed_label(rows: Sequence[Row], n: int, seeded: Sequence[int]) -> str:
    """The legend's text for the documents' bars; with the size and the GPU where the documents
    measured at several sizes.
    """
    gpus = dict.fromkeys(
        f.gpu for row in rows for f in row.figures if f.n == n and f.ratio is not None
    )
    where = f" at {n} ({', '.join(gpus)})" if len(seeded) > 1 else ""
    return f"the seed{where}, against its own cuBLAS"

"""The chart of a climb: the ratio to cuBLAS by rung at each size, a seed document's beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..bench import plotting
from ..core.machines import short_name
from . import text
from .ladder import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

OURS, SEED = plotting.PALETTE[0], plotting.BASE_COLOUR
_ACROSS = 2  # panels side by side
_ROW, _AROUND = 0.36, 1.4  # inches: a rung, and what is above and below the rungs
_BAR = 0.4  # the height of a bar, where rungs are 1 apart


def draw(found: Sequence[Row], sizes: Sequence[int]) -> Canvas:
    """A panel for each size: a bar for each rung, and one for the document's figure where the
    document measured that size. Figures stand beside the bars, a dash where nothing was measured.

    Raises ValueError when there is nothing to draw.
    """
    shown = [
        row
        for row in found
        if any(_ours(row, i) is not None or _seed(row, n) is not None for i, n in enumerate(sizes))
    ]
    if not shown:
        raise ValueError("no rung has a figure to draw")
    known = [
        (i, n)
        for i, n in enumerate(sizes)
        if any(_ours(row, i) is not None or _seed(row, n) is not None for row in shown)
    ]
    height = _AROUND + _ROW * len(shown)
    rows = [
        (height, (1,) * len(known[first : first + _ACROSS]))
        for first in range(0, len(known), _ACROSS)
    ]
    figure, axes = plotting.grid(plotting.WIDTH, rows, extra=0.75)
    for axis, (i, n) in zip(axes, known, strict=True):
        _panel(axis, shown, i, n)
    ladders = dict.fromkeys(row.ladder or row.rung.ladder for row in shown)
    gpus = dict.fromkeys(m.device for row in shown for m in row.measured)
    where = f" on an {', '.join(gpus)}" if gpus else ""
    plotting.entitle(figure, f"The {' and '.join(ladders)} ladder{where}", _note(shown))
    plotting.describe(figure, " ".join(_in_words(shown, i, n) for i, n in known))
    return figure


def _panel(axis: Any, rows: Sequence[Row], i: int, n: int) -> None:
    """The rungs at one size."""
    names = [row.rung.name for row in rows]
    seeds, ours = [_seed(row, n) for row in rows], [_ours(row, i) for row in rows]
    plotting.horizontal(axis, names)
    series = [
        (f"seed document{_gpus(rows, n)}", "seed", SEED, seeds),
        ("ours", "ours", OURS, ours),
    ]
    series = [each for each in series if any(value is not None for value in each[3])]
    for bar, (label, _, colour, values) in enumerate(series):
        offset = (bar - (len(series) - 1) / 2) * _BAR
        places = [place + offset for place, value in enumerate(values) if value is not None]
        axis.barh(
            places,
            [value for value in values if value is not None],
            _BAR * 0.92,
            color=colour,
            label=label,
        )
    ends = [value for value in (*seeds, *ours) if value is not None]
    axis.set_xlim(0, 1.04 * max(1.0, *ends))
    axis.axvline(1.0, color=plotting.INK, linewidth=1.0)
    axis.set_xlabel("speed / cuBLAS's (1: as fast)")
    axis.set_ylabel("rung")
    plotting.legend_above(axis, f"N = {n}", columns=1)
    plotting.columns(
        axis,
        [
            plotting.Column(
                heading,
                [text.NONE if value is None else plotting.ratio(value) for value in values],
                plotting.QUIET if colour == SEED else colour,
            )
            for _, heading, colour, values in series
        ],
    )


def _ours(row: Row, i: int) -> float | None:
    ours = row.at[i].ours
    return ours.ratio if ours else None


def _seed(row: Row, n: int) -> float | None:
    """The middle of the range that a document gives for the ratio at a size."""
    figure = next((f for f in row.figures if f.n == n and f.ratio is not None), None)
    return sum(figure.ratio) / 2 if figure and figure.ratio else None


def _gpus(rows: Sequence[Row], n: int) -> str:
    """The GPUs on which the documents measured a size: " (T4)"."""
    gpus = dict.fromkeys(
        f.gpu for row in rows for f in row.figures if f.n == n and f.ratio is not None
    )
    return f" ({', '.join(gpus)})" if gpus else ""


def _note(rows: Sequence[Row]) -> str:
    timed = [at.ours for row in rows for at in row.at if at.ours is not None]
    kinds = dict.fromkeys((m.dtype, m.layout) for m in timed)
    dtypes, layouts = (
        " and ".join(dict.fromkeys(of)) for of in (zip(*kinds, strict=True) if kinds else ((), ()))
    )
    operands = f"{dtypes}, {layouts}, burst. " if kinds else ""
    seeds = "A seed document's figure is relative to the cuBLAS that it measured, on its own GPU."
    return f"{operands}{seeds}"


def _in_words(rows: Sequence[Row], i: int, n: int) -> str:
    """The text alternative of one panel."""
    gpus = dict.fromkeys(short_name(m.device) for row in rows for m in row.at[i].timed.values())
    cells = []
    for row in rows:
        known = [
            f"{who} {plotting.ratio(value)}"
            for who, value in (("ours", _ours(row, i)), ("seed document", _seed(row, n)))
            if value is not None
        ]
        cells.append(f"{row.rung.name} {', '.join(known) or 'not measured'}")
    where = f", {', '.join(gpus)}" if gpus else ""
    return f"Speed over cuBLAS's at N = {n}{where}: {'; '.join(cells)}."

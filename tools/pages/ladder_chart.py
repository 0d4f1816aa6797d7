"""The chart of a climb: the ratio to cuBLAS by rung at each size, a seed document's beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outblas.bench import plotting
from tools.pages import drawing
from tools.pages.ladder import OWN, SIZES, Row, rows
from tools.pages.results import Results
from tools.pages.tables import NONE, devices

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, SEED = plotting.PALETTE[0], plotting.BASE_COLOUR
_ROW, _AROUND = 0.36, 1.4  # inches: a rung, and what is above and below the rungs
_BAR = 0.4  # the height of a bar, where rungs are 1 apart


def link(results: Results, argument: str) -> str:
    """The picture of a climb. The argument is the ladder's name and the picture's file."""
    name, _, file = argument.partition(" ")
    return (
        f"![Speed of each rung of the {name} ladder relative to cuBLAS on an "
        f"{devices(results.measurements)}, beside the seed document's figures]({file})\n"
    )


def draw(results: Results, name: str) -> Figure:
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
    figure, axes = plotting.grid(plotting.WIDTH, [(height, (1,) * len(sizes))], extra=0.75)
    for i, (axis, n) in enumerate(zip(axes, sizes, strict=True)):
        _panel(axis, ladder, i, n)
    timed = [at.timed[OWN] for row in ladder for at in row.at if OWN in at.timed]
    measured = [m for row in ladder for at in row.at for m in at.timed.values()]
    dtypes, layouts = (
        " and ".join(dict.fromkeys(words))
        for words in zip(*((m.dtype, m.layout) for m in timed), strict=True)
    )
    note = (
        f"{dtypes}, {layouts}, burst. A seed document's figure is relative to the cuBLAS that it "
        "measured, on its own GPU."
    )
    plotting.entitle(figure, f"The {name} ladder on an {devices(measured)}", note)
    plotting.describe(figure, " ".join(_in_words(ladder, i, n) for i, n in enumerate(sizes)))
    return figure


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

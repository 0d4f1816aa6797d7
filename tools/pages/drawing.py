"""How charts of the pages show series: colours, marks, names at the ends of lines, and figures
beside rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from outblas.bench.plotting import BASE_COLOUR, INK, PALETTE, SMALL

# Marks that tell series apart without colour, in the order of PALETTE.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# Providers that have the same colour in every chart.
_COLOUR_OF = {"cublas": BASE_COLOUR, "outblas": PALETTE[0], "cublaslt-best": PALETTE[1]}
_CHARACTER, _BOLD = 0.62, 0.7  # the width of a character over the size of its font


def styles(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """A colour and a mark for each name, the same mark for a colour wherever it is used. cuBLAS is
    grey, and outblas and the best of cuBLASLt's algorithms look the same in every chart.

    Raises ValueError for more names than there are colours: such a chart is to be split.
    """
    colours = {name: _COLOUR_OF[name] for name in names if name in _COLOUR_OF}
    free = [colour for colour in PALETTE if colour not in colours.values()]
    others = [name for name in dict.fromkeys(names) if name not in colours]
    if len(others) > len(free):
        count = len(colours) + len(others)
        raise ValueError(f"a chart has {count} series, expected at most {len(PALETTE) + 1}")
    colours |= zip(others, free, strict=False)
    marks = dict(zip(PALETTE, MARKERS, strict=True))
    return {name: (colours[name], marks.get(colours[name], "o")) for name in names}


def ratio(value: float) -> str:
    """A ratio as charts write it: three digits after the point, and three digits of a small one."""
    return f"{value:.3f}" if abs(value) >= 0.1 else f"{value:#.3g}"


def horizontal(axis: Any, names: Sequence[str]) -> None:
    """Turns an axis into one of rows that are read like a table, the first name at the top."""
    axis.set_yticks(range(len(names)), list(names))
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.grid(True, axis="x")
    axis.grid(False, axis="y")


@dataclass(frozen=True)
class Column:
    """Figures that stand right of a chart's rows, one for each, in the colour of their series."""

    heading: str
    cells: Sequence[str]
    colour: str = INK


def columns(axis: Any, shown: Sequence[Column], gap: float = 8.0) -> None:
    """Writes columns of text right of an axis of rows, `gap` points apart; cells are aligned on the
    right. Nothing that is drawn inside the axis can run into them.
    """
    right = 0.0
    for column in shown:
        heading = max(map(len, column.heading.split("\n"))) * _BOLD
        right += gap + SMALL * max(heading, *(len(cell) * _CHARACTER for cell in column.cells))
        write = partial(
            axis.annotate,
            textcoords="offset points",
            ha="right",
            fontsize=SMALL,
            color=column.colour,
            annotation_clip=False,
        )
        above = {"xycoords": "axes fraction", "va": "baseline", "linespacing": 1.1}
        write(column.heading, (1, 1), xytext=(right, 6), fontweight="bold", **above)
        beside = {"xycoords": axis.get_yaxis_transform(), "va": "center"}
        for row, cell in enumerate(column.cells):
            write(cell, (1, row), xytext=(right, 0), **beside)


def spread(targets: Sequence[float], gap: float) -> list[float]:
    """Places at least `gap` apart, in the order of the targets and as near to them as that
    allows.
    """
    order = sorted(range(len(targets)), key=lambda i: targets[i])
    groups: list[tuple[float, list[int]]] = []  # the middle of a run, and who is in it
    for i in order:
        groups.append((targets[i], [i]))
        while len(groups) > 1:
            (low, before), (high, after) = groups[-2:]
            if high - low >= gap * (len(before) + len(after)) / 2:
                break
            both = before + after
            groups[-2:] = [(sum(targets[j] for j in both) / len(both), both)]
    places = [0.0] * len(targets)
    for middle, members in groups:
        for rank, i in enumerate(members):
            places[i] = middle + (rank - (len(members) - 1) / 2) * gap
    return places


def label_ends(axis: Any, ends: Iterable[tuple[float, float, str, str]]) -> None:
    """Names lines at their right ends, given as (x, y, name, colour), so that no two names collide.

    The limits of the axis must be those that it will be drawn with.
    """
    names = list(ends)
    axis.figure.canvas.figure.draw_without_rendering()  # lays it out
    points = 72 / axis.figure.dpi
    heights = [axis.transData.transform((x, y))[1] * points for x, y, *_ in names]
    places = spread(heights, 1.25 * SMALL)
    for (x, y, name, colour), height, place in zip(names, heights, places, strict=True):
        axis.annotate(
            name,
            (x, y),
            xytext=(8, place - height),
            textcoords="offset points",
            va="center",
            fontsize=SMALL,
            color=colour,
            annotation_clip=False,
        )

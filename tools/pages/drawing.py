"""How charts of the pages show rows that are read like a table, with figures beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from outblas.bench.plotting import INK, SMALL

_CHARACTER, _BOLD = 0.62, 0.7  # the width of a character over the size of its font


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

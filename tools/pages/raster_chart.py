"""The chart of orders of tiles: which tiles of C run at the same time, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from outblas.base.shapes import to_text
from outblas.bench import plotting
from outblas.device import l2, raster
from tools.pages.raster import MACHINE, MODELS, SMS, TILE, Row, rows
from tools.pages.results import Results
from tools.pages.tables import figure as number

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_ACROSS = 3  # orders side by side
# Inches: the width of a panel, the least and the greatest height of its tiles, what is above and
# below them, the legend, and what is above and below all.
_WIDE, _LOW, _HIGH, _AROUND, _LEGEND, _NOTES = 1.2, 0.3, 1.6, 0.68, 0.3, 0.8
CORNER = 8  # tiles along N, and about as many elements along M, in which the path is shown
# Colours that are the same in the dark, so that the path stays dark on light tiles: of the first
# wave, and of the second to the last one.
FIRST, SHADES = "#f4b446", ("#e3eef8", "#4f8cc0")
_PATH = "#15181b"

ASPECT = TILE[0] / TILE[1]  # the height of a tile over its width, in elements of C
Line = list[tuple[int, int]]
Waves = Sequence[Sequence[tuple[int, int]]]  # the tiles of each wave as (row, column)
Rectangle = tuple[int, int, int, int]  # its first row and column, its rows and columns


def link(results: Results, argument: str) -> str:
    """The picture of orders of tiles. The argument is the size and the picture's file."""
    n, file = argument.split(" ")
    return (
        f"![Tiles of C at {n}³ by the wave in which they run, and the path through them, for each "
        f"order]({file})\n"
    )


def draw(results: Results, n: str) -> Canvas:
    """Two panels for each order: all tiles of C by the wave in which they run, and the path through
    the tiles of a corner. The hit rates of the model and of ncu stand above.
    """
    shape = (int(n), int(n), int(n))
    orders = rows(results, shape)
    whole = l2.grid(shape, TILE, (1, 1))
    corner = (min(whole[0], round(CORNER / ASPECT)), min(whole[1], CORNER))
    sides = [min(max(_WIDE * m / n * ASPECT, _LOW), _HIGH) for m, n in (whole, corner)]
    figure, (legend, *axes) = plotting.grid(
        plotting.WIDTH,
        [
            (_LEGEND, (1,)),
            *[(_AROUND + max(sides), (1,) * 2 * _ACROSS)] * -(-len(orders) // _ACROSS),
        ],
        extra=_NOTES,
    )
    for axis in axes[2 * len(orders) :]:
        axis.remove()
    most = 0
    for i, row in enumerate(orders):
        waves = [
            [divmod(tile, whole[1]) for tile in wave if tile != raster.PAD]
            for wave in row.order.waves(shape)
        ]
        _whole(axes[2 * i], row, waves, whole)
        _corner(axes[2 * i + 1], row, waves, corner)
        most = max(most, len(waves))
    _legend(legend, most)
    conditions = f"{MACHINE.name}, {SMS} SMs, elements of 2 bytes"
    tiles = "×".join(map(str, TILE))
    note = (
        f"A wave: what {SMS} CTAs compute at the same time. Left of each pair: all tiles of C; "
        "right: the first tiles, and the path through them. Hits: the hit rate of L2, by the model "
        f"with {MODELS[-1][0]} and as ncu counts it. {conditions}."
    )
    plotting.entitle(figure, f"Orders of tiles: {to_text(shape)} in tiles {tiles}", note)
    title = f"{MACHINE.name}, {to_text(shape)} in tiles {tiles}, clusters 1×1, {SMS} SMs, elements"
    rates = "; ".join(map(_in_words, orders))
    plotting.describe(
        figure,
        "For each order of tiles, C is coloured by the wave in which a tile runs, and a line shows "
        f"the order in a corner. L2 hit rates at {title} of 2 bytes: {rates}.",
    )
    return figure


def _whole(axis: Any, row: Row, waves: Waves, grid: tuple[int, int]) -> None:
    """All tiles of C by their wave."""
    _tiles(axis, waves, grid)
    axis.set_title(f"{row.order.label}\n", fontsize=plotting.TEXT, pad=4, linespacing=1.15)
    axis.set_xlabel(f"N: all {grid[1]} tiles", fontsize=plotting.SMALL)
    axis.set_ylabel(f"M: {grid[0]} tiles", fontsize=plotting.SMALL)


def _corner(axis: Any, row: Row, waves: Waves, extent: tuple[int, int]) -> None:
    """The tiles in a corner, and a line through those that start one after the other."""
    from matplotlib.collections import LineCollection

    height, width = extent
    _tiles(axis, waves, extent)
    near, far = _moves([tile for tiles in waves for tile in tiles], height, width)
    for lines, thickness in ((near, 1.3), (far, 0.4)):
        axis.add_collection(LineCollection(lines, colors=_PATH, linewidths=thickness))
    m, n = waves[0][0]
    axis.plot([n], [m], "o", color=_PATH, markersize=4, clip_on=False)
    axis.set_title(
        f"hits: model {row.traffic[-1].hit_rate:.1%}\nncu {number(_measured(row), '.1%')}",
        fontsize=plotting.SMALL,
        fontweight="normal",
        pad=4,
        linespacing=1.15,
    )
    axis.set_xlabel(f"N: first {width}", fontsize=plotting.SMALL)
    axis.set_ylabel(f"M: first {height}", fontsize=plotting.SMALL)


def _measured(row: Row) -> float | None:
    return row.profile.l2_hit_rate if row.profile else None


def _in_words(row: Row) -> str:
    measured = _measured(row)
    ncu = f"ncu {measured:.1%}" if measured else "not measured"
    return f"{row.order.label}: model {row.traffic[-1].hit_rate:.1%}, {ncu}"


def _moves(
    path: Sequence[tuple[int, int]], height: int, width: int
) -> tuple[list[Line], list[Line]]:
    """The lines from tile to tile within the first rows and columns, as (column, row): those
    through neighbours, joined, and the others.
    """
    near: list[Line] = []
    far: list[Line] = []
    for (m, n), (p, q) in pairwise(path):
        if max(m, p) >= height or max(n, q) >= width:
            continue
        if abs(m - p) + abs(n - q) > 1:
            far.append([(n, m), (q, p)])
        elif near and near[-1][-1] == (n, m):
            near[-1].append((q, p))
        else:
            near.append([(n, m), (q, p)])
    return near, far


def _tiles(axis: Any, waves: Waves, extent: tuple[int, int]) -> None:
    """Paints the tiles of the first rows and columns, each in the colour of its wave."""
    from matplotlib.collections import PolyCollection

    height, width = extent
    for tiles, colour in zip(waves, colours(len(waves)), strict=True):
        inside = {(m, n) for m, n in tiles if m < height and n < width}
        corners = [
            [
                (n - 0.5, m - 0.5),
                (n + w - 0.5, m - 0.5),
                (n + w - 0.5, m + h - 0.5),
                (n - 0.5, m + h - 0.5),
            ]
            for m, n, h, w in rectangles(inside)
        ]
        if corners:
            axis.add_collection(
                PolyCollection(corners, facecolors=colour, edgecolors=colour, linewidths=0.3)
            )
    axis.set_xlim(-0.5, width - 0.5)
    axis.set_ylim(height - 0.5, -0.5)
    # As long and as wide as the elements of C.
    axis.set_aspect(ASPECT)
    axis.grid(False)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[["left", "bottom"]].set_visible(False)


def rectangles(tiles: Iterable[tuple[int, int]]) -> list[Rectangle]:
    """Disjoint rectangles that cover these tiles and no others: runs along a row, and runs of equal
    columns in neighbouring rows joined.
    """
    runs: list[Rectangle] = []
    for m, n in sorted(tiles):
        if runs and runs[-1][0] == m and runs[-1][1] + runs[-1][3] == n:
            runs[-1] = (m, runs[-1][1], 1, runs[-1][3] + 1)
        else:
            runs.append((m, n, 1, 1))
    joined: list[Rectangle] = []
    open_at: dict[tuple[int, int], int] = {}  # the last rectangle over these columns
    for m, n, _, width in runs:
        last = open_at.get((n, width))
        if last is not None and joined[last][0] + joined[last][2] == m:
            joined[last] = (joined[last][0], n, joined[last][2] + 1, width)
        else:
            open_at[n, width] = len(joined)
            joined.append((m, n, 1, width))
    return joined


def colours(waves: int) -> list[str]:
    """A colour for each wave: one for the first, and shades from light to dark for the others."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    shades = LinearSegmentedColormap.from_list("waves", SHADES)
    return [FIRST] + [to_hex(shades(wave / max(1, waves - 2))) for wave in range(waves - 1)]


def _legend(axis: Any, waves: int) -> None:
    """Makes a legend of an axis: the colours of the first wave, of others and of the last one."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shades = colours(waves)
    named = dict.fromkeys(wave for wave in (0, 1, waves // 2, waves - 1) if wave < waves)
    patches: list[Any] = [Patch(color=shades[wave], label=f"wave {wave + 1}") for wave in named]
    path = Line2D(
        [], [], color=plotting.INK, linewidth=1.3, marker="o", markersize=4, markevery=[0]
    )
    path.set_label("order in which tiles start")
    axis.set_axis_off()
    axis.legend(handles=[*patches, path], loc="center left", ncols=len(patches) + 1, borderpad=0)

"""Orders of tiles: the tables of the model of L2 beside the hit rates that ncu measured, and the
chart of which tiles of C run at the same time, and in which order.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, to_hex
from matplotlib.figure import Figure

from outblas.base import machines
from outblas.base.configs import items
from outblas.base.shapes import Shape, to_text
from outblas.bench import plotting
from outblas.bench.record import BASE
from outblas.device import l2, raster
from tools.pages.results import Profile, Results
from tools.pages.tables import figure, table

PROVIDER = "hopper.persistent"
TILE, SMS = (128, 256), 128  # of a CTA, and how many CTAs run at a time
# The fields of a config beside its order, with the values that these tables are made for.
FIXED = {"sms": "128", "cluster_m": "1", "cluster_n": "1", "tile_m": "128", "tile_n": "256"}
MACHINE = machines.find("H100")
# Models of L2, each its name, bytes and number of halves: one cache, or two halves of which each
# keeps what its own SMs requested (001).
MODELS = (
    (f"{MACHINE.l2_bytes >> 20} MB", MACHINE.l2_bytes, 1),
    (f"2 × {MACHINE.l2_bytes >> 21} MB", MACHINE.l2_bytes // 2, 2),
)
GROUPS = ((2, 2), (4, 4), (8, 8), (16, 8))
SEED = "001's kernel 6, grouped 16x8 83%, 001's cuBLAS 70%"  # hit rates at 4096 on its H100
COLUMNS = (
    "order",
    "requested MB",
    *(f"DRAM MB, {name}" for name, *_ in MODELS),
    *(f"hit rate, {name}" for name, *_ in MODELS),
    "measured hit rate",
    "measured DRAM MB",
)

# ---- of the chart
_ACROSS = 3  # orders side by side
# Inches: the width of a panel, the least and the greatest height of its tiles, what is above and
# below them, and what is above and below all.
_WIDE, _LOW, _HIGH, _AROUND, _NOTES = 1.2, 0.3, 1.6, 0.68, 0.9
CORNER = 8  # tiles along N, and about as many elements along M, in which the path is shown
# Colours that are the same in the dark, so that the path stays dark on light tiles: of the first
# wave, and of the second to the last one.
FIRST, SHADES = "#f4b446", ("#e3eef8", "#4f8cc0")
_PATH = "#15181b"

_TILES = "×".join(map(str, TILE))
ASPECT = TILE[0] / TILE[1]  # the height of a tile over its width, in elements of C
Waves = Sequence[Sequence[tuple[int, int]]]  # the tiles of each wave as (row, column)


@dataclass(frozen=True)
class Order:
    """An order of tiles: a kind of `device.raster`, and as much of a group as the kind has."""

    kind: str
    group: tuple[int, ...] = ()

    @staticmethod
    def of(kind: str, group: tuple[int, int]) -> Order:
        """The order of a kind; serpentine takes the group's rows only, other kinds than grouped no
        group.
        """
        return Order(kind, {"grouped": group, "serpentine": group[:1]}.get(kind, ()))

    @property
    def label(self) -> str:
        """The order as tables name it: "grouped 16x8"."""
        return f"{self.kind} {'x'.join(map(str, self.group))}".strip()

    def waves(self, shape: Shape) -> list[list[int]]:
        """The tiles of each wave, by their index in C."""
        return raster.schedule(self.kind, *l2.grid(shape, TILE, (1, 1)), SMS, *self.group)


@dataclass(frozen=True)
class Row:
    """An order, its traffic under each model of L2, and the profile of a kernel that ran in it."""

    order: Order
    traffic: tuple[l2.Traffic, ...]
    profile: Profile | None

    @property
    def hit_rate(self) -> float | None:
        """The hit rate of L2 as ncu counted it; None where the order was not profiled."""
        return self.profile.l2_hit_rate if self.profile else None

    def cells(self) -> tuple[str, ...]:
        """The cells of the row, in the order of COLUMNS."""
        return (
            self.order.label,
            _mega(self.traffic[0].requested_bytes),
            *(_mega(t.missed_bytes) for t in self.traffic),
            *(figure(t.hit_rate, ".1%") for t in self.traffic),
            figure(self.hit_rate, ".1%"),
            _mega(self.profile.dram_read_bytes if self.profile else None),
        )


def rows(results: Results, shape: Shape) -> list[Row]:
    """Every order, "grouped" with each of GROUPS, and the other orders that were profiled; the
    fewest missed bytes come first.
    """
    profile_of = {order: p for p in results.profiles if (order := _order(p, shape)) is not None}
    orders = [Order.of(kind, GROUPS[-1]) for kind in raster.ORDERS]
    orders += [Order("grouped", group) for group in GROUPS]
    modelled = [
        Row(order, _traffic(order, shape), profile_of.get(order))
        for order in dict.fromkeys((*orders, *profile_of))
    ]

    def missed(row: Row) -> tuple[list[int], str]:
        return [t.missed_bytes for t in reversed(row.traffic)], row.order.label

    return sorted(modelled, key=missed)


def tables(results: Results, n: str) -> str:
    """The orders of tiles of one square GEMM, by the models of L2 and by ncu."""
    shape = (int(n), int(n), int(n))
    orders = rows(results, shape)
    errors = []
    for i, (name, *_) in enumerate(MODELS):
        pairs = [(row.traffic[i].hit_rate, row.hit_rate) for row in orders if row.hit_rate]
        errors.append((statistics.fmean(abs(ours - ncu) for ours, ncu in pairs), name))
    by_error = ", ".join(f"{error:.1%} with {name}" for error, name in sorted(errors))
    once = _mega(orders[0].traffic[0].compulsory_bytes)
    cublas = [p for p in results.profiles if p.provider == BASE and _comparable(p, shape)][-1]
    notes = (
        f"{_setting(shape)}. A and B once are {once} MB. Hit rates at 4096: {SEED}. cuBLAS "
        f"here: hit rate {figure(cublas.l2_hit_rate, '.1%')}, "
        f"{_mega(cublas.dram_read_bytes)} MB read from DRAM. Mean error of the modelled hit rates: "
        f"{by_error}."
    )
    return "\n".join([*table(COLUMNS, (row.cells() for row in orders)), "", notes]) + "\n"


def _traffic(order: Order, shape: Shape) -> tuple[l2.Traffic, ...]:
    waves = order.waves(shape)
    return tuple(
        l2.simulate(waves, shape, TILE, (1, 1), capacity=size, halves=halves)
        for _, size, halves in MODELS
    )


def _setting(shape: Shape) -> str:
    """What the model is of, in words."""
    tiles = f"{to_text(shape)} in tiles {_TILES}"
    return f"{MACHINE.name}, {tiles}, clusters 1×1, {SMS} SMs, elements of 2 bytes"


def _comparable(profile: Profile, shape: Shape) -> bool:
    """Whether a profile is of the model's machine, of the same GEMM, with elements of two bytes and
    B stored N×K.
    """
    operands = profile.layout == "nt" and profile.dtype in ("bfloat16", "float16")
    return operands and (profile.gpu, profile.shape) == (MACHINE.name, shape)


def _order(profile: Profile, shape: Shape) -> Order | None:
    """The order in which a profiled kernel ran; None for another kernel or in another setting."""
    if profile.provider != PROVIDER or not _comparable(profile, shape):
        return None
    config = profile.settings
    changed = {name for name, _ in items(profile.config)} - {"order", "group_m", "group_n"}
    if changed - FIXED.keys() or any(config[name] != value for name, value in FIXED.items()):
        return None
    return Order.of(config["order"], (int(config["group_m"]), int(config["group_n"])))


def _mega(value: float | None) -> str:
    return figure(value, ",.0f", 1e-6)


# ---- the chart
def link(results: Results, argument: str) -> str:
    """The picture of orders of tiles. The argument is the size and the picture's file."""
    n, file = argument.split(" ")
    return (
        f"![Tiles of C at {n}³ by the wave in which they run, and the path through them, for each "
        f"order]({file})\n"
    )


def draw(results: Results, n: str) -> Figure:
    """Two panels for each order: all tiles of C by the wave in which they run, and the path through
    the tiles of a corner. The hit rates of the model and of ncu stand above.
    """
    shape = (int(n), int(n), int(n))
    orders = rows(results, shape)
    whole = l2.grid(shape, TILE, (1, 1))
    corner = (min(whole[0], round(CORNER / ASPECT)), min(whole[1], CORNER))
    side = max(min(max(_WIDE * m / n * ASPECT, _LOW), _HIGH) for m, n in (whole, corner))
    lines = [(_AROUND + side, (1,) * 2 * _ACROSS)] * -(-len(orders) // _ACROSS)
    canvas, axes = plotting.grid(plotting.WIDTH, lines, extra=_NOTES)
    for axis in axes[2 * len(orders) :]:
        axis.remove()
    for i, row in enumerate(orders):
        waves = [
            [divmod(tile, whole[1]) for tile in wave if tile != raster.PAD]
            for wave in row.order.waves(shape)
        ]
        hits = f"hits: model {row.traffic[-1].hit_rate:.1%}\nncu {figure(row.hit_rate, '.1%')}"
        _tiles(axes[2 * i], waves, whole, f"{row.order.label}\n", plotting.TEXT)
        _tiles(axes[2 * i + 1], waves, corner, hits, plotting.SMALL)
        _path(axes[2 * i + 1], waves, corner)
    note = (
        f"A wave: what {SMS} CTAs compute at the same time; yellow: the first, then from light to "
        "dark. Left of each pair: all tiles of C; right: the first tiles, and the path through "
        f"them. Hits: the hit rate of L2, by the model with {MODELS[-1][0]} and as ncu counts it. "
        f"{MACHINE.name}, {SMS} SMs, elements of 2 bytes."
    )
    plotting.entitle(canvas, f"Orders of tiles: {to_text(shape)} in tiles {_TILES}", note)
    rates = "; ".join(map(_in_words, orders))
    plotting.describe(
        canvas,
        "For each order of tiles, C is coloured by the wave in which a tile runs, and a line shows "
        f"the order in a corner. L2 hit rates at {_setting(shape)}: {rates}.",
    )
    return canvas


def _in_words(row: Row) -> str:
    ncu = f"ncu {row.hit_rate:.1%}" if row.hit_rate else "not measured"
    return f"{row.order.label}: model {row.traffic[-1].hit_rate:.1%}, {ncu}"


def _tiles(axis: Any, waves: Waves, extent: tuple[int, int], title: str, size: float) -> None:
    """Paints the tiles of the first rows and columns, each in the colour of its wave."""
    height, width = extent
    wave_of = {tile: number for number, tiles in enumerate(waves) for tile in tiles}
    image = [[wave_of[m, n] for n in range(width)] for m in range(height)]
    shades = LinearSegmentedColormap.from_list("waves", SHADES)
    last = len(waves) - 1
    colours = [FIRST, *(to_hex(shades(wave / max(1, last - 1))) for wave in range(last))]
    # As long and as wide as the elements of C.
    axis.imshow(
        image,
        ListedColormap(colours),
        vmin=0,
        vmax=last,
        aspect=ASPECT,
        interpolation="none",
    )
    axis.grid(False)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[["left", "bottom"]].set_visible(False)
    axis.set_title(title, fontsize=size, fontweight="normal", pad=4, linespacing=1.15)
    axis.set_xlabel(f"N: {width} tiles", fontsize=plotting.SMALL)
    axis.set_ylabel(f"M: {height} tiles", fontsize=plotting.SMALL)


def _path(axis: Any, waves: Waves, extent: tuple[int, int]) -> None:
    """Draws a line through the tiles in a corner that start one after the other; thin where they
    are no neighbours.
    """
    moves = [
        pair
        for pair in pairwise(tile for tiles in waves for tile in tiles)
        if all(m < extent[0] and n < extent[1] for m, n in pair)
    ]
    lines = [[(n, m), (q, p)] for (m, n), (p, q) in moves]
    widths = [1.3 if abs(m - p) + abs(n - q) == 1 else 0.4 for (m, n), (p, q) in moves]
    axis.add_collection(LineCollection(lines, colors=_PATH, linewidths=widths, capstyle="round"))
    m, n = waves[0][0]
    axis.plot([n], [m], "o", color=_PATH, markersize=4, clip_on=False)

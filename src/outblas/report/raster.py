"""Orders of tiles under the model of L2, beside the hit rates that ncu measured of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..autotune.search import rank
from ..bench.record import BASE
from ..core import configs, machines, progress
from ..core.shapes import Shape, to_text
from ..device import l2, raster
from .profiles import Profile, Profiles
from .text import figure

PROVIDER = "hopper.persistent"
DEFAULTS = {
    "order": "grouped",
    "group_m": "16",
    "group_n": "8",
    "sms": "128",
    "cluster_m": "1",
    "cluster_n": "1",
    "tile_m": "128",
    "tile_n": "256",
}
MACHINE = machines.find("H100")


def model_name(model: tuple[int, int]) -> str:
    """The size of L2 in a model: "2 × 25 MB"."""
    size, halves = model
    return f"{size >> 20} MB" if halves == 1 else f"{halves} × {size >> 20} MB"


# Models of L2, each its bytes and the number of halves: one cache, or two halves of which each
# keeps what its own SMs requested (001).
WHOLE, HALVES = (MACHINE.l2_bytes, 1), (MACHINE.l2_bytes // 2, 2)
MODELS = (WHOLE, HALVES)
GROUPS = ((2, 2), (4, 4), (8, 8), (16, 8))
# Hit rates that 001 states, at 4096 on its H100.
SEED = {"001's kernel 6, grouped 16x8": 0.83, "001's cuBLAS": 0.70}
MOST_TILES = 1 << 14  # the model then takes some seconds
FEWEST = 3  # points from which a rank correlation is given
COLUMNS = (
    "order",
    "requested MB",
    *(f"DRAM MB, {model_name(model)}" for model in MODELS),
    *(f"hit rate, {model_name(model)}" for model in MODELS),
    "measured hit rate",
    "measured DRAM MB",
)


@dataclass(frozen=True)
class Setting:
    """A product of `shape` (M, N, K) whose C is computed in clusters of CTAs with a `tile` each,
    `sms` CTAs at a time.
    """

    shape: Shape
    tile: tuple[int, int] = (128, 256)
    cluster: tuple[int, int] = (1, 1)
    sms: int = 128

    @property
    def workers(self) -> int:
        """The clusters that run at a time. Raises ValueError if there is none."""
        size = self.cluster[0] * self.cluster[1]
        if not 0 < size <= self.sms:
            raise ValueError(
                f"sms is {self.sms} and cluster {self.cluster}, expected SMs for one cluster at "
                "least"
            )
        return self.sms // size

    @property
    def grid(self) -> tuple[int, int]:
        """The rows and columns of cluster tiles in C."""
        return l2.grid(self.shape, self.tile, self.cluster)


@dataclass(frozen=True)
class Order:
    """An order of tiles: a kind of `device.raster`, and as much of a group as the kind has."""

    kind: str
    group: tuple[int, ...] = ()

    @classmethod
    def of(cls, kind: str, group: tuple[int, int]) -> Order:
        """The order of a kind; serpentine takes the group's rows only, other kinds than grouped no
        group.
        """
        return cls(kind, {"grouped": group, "serpentine": group[:1]}.get(kind, ()))

    @property
    def label(self) -> str:
        """The order as tables name it: "grouped 16x8"."""
        return f"{self.kind} {'x'.join(map(str, self.group))}".strip()

    def steps(self, setting: Setting) -> list[list[int]]:
        """The tiles of each wave, by their index in C."""
        return raster.schedule(self.kind, *setting.grid, setting.workers, *self.group)


@dataclass(frozen=True)
class Row:
    """An order, its traffic under each model of L2, and the profile of a kernel that ran in this
    order if there is one.
    """

    order: Order
    traffic: tuple[l2.Traffic, ...]
    profile: Profile | None

    def record(self) -> dict[str, Any]:
        """The value as a JSON object."""
        profile = self.profile
        return {
            "order": self.order.kind,
            "group": list(self.order.group),
            "requested_bytes": self.traffic[0].requested_bytes,
            "compulsory_bytes": self.traffic[0].compulsory_bytes,
            "model": [
                {
                    "l2_bytes": size,
                    "halves": halves,
                    "missed_bytes": t.missed_bytes,
                    "hit_rate": t.hit_rate,
                }
                for (size, halves), t in zip(MODELS, self.traffic, strict=True)
            ],
            "measured_hit_rate": profile.l2_hit_rate if profile else None,
            "measured_dram_read_bytes": profile.dram_read_bytes if profile else None,
            "measured_us": profile.us if profile else None,
        }

    def cells(self) -> tuple[str, ...]:
        """The cells of the row, in the order of COLUMNS."""
        profile = self.profile
        return (
            self.order.label,
            _mega(self.traffic[0].requested_bytes),
            *(_mega(t.missed_bytes) for t in self.traffic),
            *(_share(t.hit_rate) for t in self.traffic),
            _share(profile.l2_hit_rate if profile else None),
            _mega(profile.dram_read_bytes if profile else None),
        )


@dataclass(frozen=True)
class Agreement:
    """How well a model of L2 agrees with the profiles of `orders` orders.

    `rank` is Spearman's correlation of hit rates, `error` the mean absolute difference of them;
    `dram_rank` and `dram_error` are the same of DRAM bytes, the difference as a fraction of the
    measured. None: too few points.
    """

    l2: str
    orders: int
    rank: float | None
    error: float | None
    dram_rank: float | None
    dram_error: float | None

    def cells(self) -> tuple[str, ...]:
        """The cells of the row, in the order of AGREEMENT_COLUMNS."""
        figures = (
            figure(self.rank, ".2f"),
            _share(self.error),
            figure(self.dram_rank, ".2f"),
            _share(self.dram_error),
        )
        return (self.l2, str(self.orders), *figures)


AGREEMENT_COLUMNS = (
    "L2",
    "orders",
    "rank, hit rate",
    "mean error, hit rate",
    "rank, DRAM",
    "mean error, DRAM",
)


@dataclass(frozen=True)
class Report:
    """The orders in a setting, and the profile of cuBLAS at the same product if there is one."""

    setting: Setting
    rows: tuple[Row, ...]
    cublas: Profile | None

    @cached_property
    def agreements(self) -> tuple[Agreement, ...]:
        """One agreement for each model of L2."""
        return tuple(_agreement(self.rows, i) for i in range(len(MODELS)))

    @property
    def product(self) -> str:
        """The product and its tiles."""
        s = self.setting
        clusters = f", clusters {_by(s.cluster)}" if s.cluster != (1, 1) else ""
        return f"{to_text(s.shape)} in tiles {_by(s.tile)}{clusters}"

    @property
    def conditions(self) -> str:
        """The GPU, its SMs and the operands."""
        return f"{MACHINE.name}, {self.setting.sms} SMs, elements of 2 bytes"

    @property
    def title(self) -> str:
        """The GPU, the product, its tiles and SMs."""
        s = self.setting
        product = (
            f"{to_text(s.shape)} in tiles {_by(s.tile)}, clusters {_by(s.cluster)}, {s.sms} SMs"
        )
        return f"{MACHINE.name}, {product}, elements of 2 bytes"

    @property
    def better(self) -> str | None:
        """The model whose hit rates are nearer to the measured ones."""
        errors = [(a.error, a.l2) for a in self.agreements if a.error is not None]
        return min(errors)[1] if errors and len({error for error, _ in errors}) > 1 else None

    def record(self) -> dict[str, Any]:
        """The value as a JSON object."""
        s = self.setting
        return {
            "gpu": MACHINE.name,
            "shape": list(s.shape),
            "tile": list(s.tile),
            "cluster": list(s.cluster),
            "sms": s.sms,
            "orders": [row.record() for row in self.rows],
            "agreement": [vars(a) for a in self.agreements],
            "better_model": self.better,
            "seed_hit_rates": SEED,
            "cublas_hit_rate": self.cublas.l2_hit_rate if self.cublas else None,
            "cublas_dram_read_bytes": self.cublas.dram_read_bytes if self.cublas else None,
        }

    def notes(self) -> list[str]:
        """The sentences beneath the table."""
        seed = ", ".join(f"{name} {rate:.0%}" for name, rate in SEED.items())
        lines = [
            f"A and B once are {_mega(self.rows[0].traffic[0].compulsory_bytes)} MB. Hit rates at "
            f"4096: {seed}."
        ]
        if self.cublas is not None:
            read = f", {_mega(self.cublas.dram_read_bytes)} MB read from DRAM"
            lines.append(f"cuBLAS here: hit rate {_share(self.cublas.l2_hit_rate)}{read}.")
        if self.better is not None:
            lines.append(f"The model of {self.better} is nearer to the measured hit rates.")
        if not any(row.profile for row in self.rows):
            lines.append(
                f"No profile of {PROVIDER} in these settings: outblas profile {PROVIDER} --config "
                "order=..."
            )
        return lines


def report(setting: Setting, group: tuple[int, int], profiles: Profiles) -> Report:
    """Every order with this group, "grouped" with each of GROUPS too, and the other orders that
    were profiled in this setting; the fewest missed bytes come first.

    Raises ValueError for sizes below 1, and for more cluster tiles than MOST_TILES.
    """
    rows, columns = setting.grid
    if rows * columns > MOST_TILES:
        raise ValueError(
            f"{to_text(setting.shape)} has {rows * columns} cluster tiles, expected at most "
            f"{MOST_TILES}"
        )
    measured = {order: p for p in profiles if (order := _ran(p, setting)) is not None}
    wanted = [Order.of(kind, group) for kind in raster.ORDERS] + [
        Order("grouped", each) for each in GROUPS
    ]
    found = [
        Row(order, _traffic(order, setting), measured.get(order))
        for order in progress.counted(
            list(dict.fromkeys((*wanted, *measured))), lambda order: order.label
        )
    ]
    found.sort(key=lambda row: ([t.missed_bytes for t in reversed(row.traffic)], row.order.label))
    cublas = [p for p in profiles if p.provider == BASE and _comparable(p, setting)]
    return Report(setting, tuple(found), cublas[-1] if cublas else None)


def _traffic(order: Order, setting: Setting) -> tuple[l2.Traffic, ...]:
    steps = order.steps(setting)
    return tuple(
        l2.simulate(
            steps, setting.shape, setting.tile, setting.cluster, capacity=size, halves=halves
        )
        for size, halves in MODELS
    )


def _comparable(profile: Profile, setting: Setting) -> bool:
    """Whether a profile is of the model's machine, of the same product, with elements of two bytes
    and B stored N×K.
    """
    known = profile.gpu, profile.shape, profile.layout
    return known == (MACHINE.name, setting.shape, "nt") and profile.dtype in ("bfloat16", "float16")


def _ran(profile: Profile, setting: Setting) -> Order | None:
    """The order in which a profiled kernel ran, None if it is another kernel or ran in another
    setting.
    """
    changed = {name for name, _ in configs.items(profile.config)}
    if (
        profile.provider != PROVIDER
        or not _comparable(profile, setting)
        or not changed <= DEFAULTS.keys()
    ):
        return None
    config = DEFAULTS | profile.settings
    try:
        sizes = {name: int(config[name]) for name in DEFAULTS if name != "order"}
    except ValueError:
        return None
    tile, cluster = (sizes["tile_m"], sizes["tile_n"]), (sizes["cluster_m"], sizes["cluster_n"])
    if (
        Setting(setting.shape, tile, cluster, sizes["sms"] or MACHINE.sms) != setting
        or config["order"] not in raster.ORDERS
    ):
        return None
    return Order.of(config["order"], (sizes["group_m"], sizes["group_n"]))


def _agreement(rows: Iterable[Row], model: int) -> Agreement:
    known = [(row.traffic[model], row.profile) for row in rows if row.profile is not None]
    hits = [(t.hit_rate, p.l2_hit_rate) for t, p in known if p.l2_hit_rate is not None]
    dram = [(float(t.missed_bytes), p.dram_read_bytes) for t, p in known if p.dram_read_bytes]
    return Agreement(
        l2=model_name(MODELS[model]),
        orders=len(known),
        rank=spearman(hits),
        error=_mean([abs(model - measured) for model, measured in hits]),
        dram_rank=spearman(dram),
        dram_error=_mean([abs(model - measured) / measured for model, measured in dram]),
    )


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Correlation of ranks, equal values sharing theirs; None for fewer than three pairs or a
    constant side.
    """
    if len(pairs) < FEWEST:
        return None
    first, second = zip(*pairs, strict=True)
    return None if 1 in (len(set(first)), len(set(second))) else rank.spearman(first, second)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _mega(value: float | None) -> str:
    return figure(value, ",.0f", 1e-6)


def _share(value: float | None) -> str:
    return figure(value, ".1%")


def _by(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes))

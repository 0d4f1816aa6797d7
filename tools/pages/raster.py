"""Orders of tiles under the model of L2, beside the hit rates that ncu measured of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from outblas.autotune.search.rank import spearman
from outblas.base import machines
from outblas.base.configs import items
from outblas.base.shapes import Shape, to_text
from outblas.bench.record import BASE
from outblas.device import l2, raster
from tools.pages.results import Profile, Results
from tools.pages.tables import figure, table

PROVIDER = "hopper.persistent"
TILE, SMS = (128, 256), 128  # of a CTA, and how many CTAs run at a time
DEFAULTS = {"order": "grouped", "group_m": "16", "group_n": "8"}
# The other fields that a config may name: with the values that these tables are made for.
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
AGREEMENT_COLUMNS = (
    "L2",
    "orders",
    "rank, hit rate",
    "mean error, hit rate",
    "rank, DRAM",
    "mean error, DRAM",
)


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

    def cells(self) -> tuple[str, ...]:
        """The cells of the row, in the order of COLUMNS."""
        p = self.profile
        return (
            self.order.label,
            _mega(self.traffic[0].requested_bytes),
            *(_mega(t.missed_bytes) for t in self.traffic),
            *(figure(t.hit_rate, ".1%") for t in self.traffic),
            figure(p.l2_hit_rate if p else None, ".1%"),
            _mega(p.dram_read_bytes if p else None),
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
    """The orders of tiles of one square GEMM, and how well the models of L2 agree with ncu."""
    shape = (int(n), int(n), int(n))
    orders = rows(results, shape)
    errors, agreements = [], []
    for i, (name, *_) in enumerate(MODELS):
        pairs = [(row.traffic[i], row.profile) for row in orders if row.profile]
        hits = [(t.hit_rate, p.l2_hit_rate or 0.0) for t, p in pairs]
        dram = [(float(t.missed_bytes), p.dram_read_bytes) for t, p in pairs if p.dram_read_bytes]
        error = statistics.fmean(abs(ours - measured) for ours, measured in hits)
        dram_error = statistics.fmean(abs(ours - theirs) / theirs for ours, theirs in dram)
        errors.append((error, name))
        ranks = (spearman(*zip(*values, strict=True)) for values in (hits, dram))
        hit_rank, dram_rank = (f"{rank:.2f}" for rank in ranks)
        agreements.append(
            (name, str(len(pairs)), hit_rank, f"{error:.1%}", dram_rank, f"{dram_error:.1%}")
        )
    once = _mega(orders[0].traffic[0].compulsory_bytes)
    cublas = [p for p in results.profiles if p.provider == BASE and _comparable(p, shape)][-1]
    notes = (
        f"{MACHINE.name}, {to_text(shape)} in tiles {_by(TILE)}, clusters 1×1, {SMS} SMs, elements "
        f"of 2 bytes. A and B once are {once} MB. Hit rates at 4096: {SEED}. cuBLAS here: hit rate "
        f"{figure(cublas.l2_hit_rate, '.1%')}, {_mega(cublas.dram_read_bytes)} MB read from DRAM. "
        f"The model of {min(errors)[1]} is nearer to the measured hit rates."
    )
    lines = [*table(COLUMNS, (row.cells() for row in orders)), ""]
    return "\n".join([*lines, *table(AGREEMENT_COLUMNS, agreements), "", notes]) + "\n"


def _traffic(order: Order, shape: Shape) -> tuple[l2.Traffic, ...]:
    waves = order.waves(shape)
    return tuple(
        l2.simulate(waves, shape, TILE, (1, 1), capacity=size, halves=halves)
        for _, size, halves in MODELS
    )


def _comparable(profile: Profile, shape: Shape) -> bool:
    """Whether a profile is of the model's machine, of the same GEMM, with elements of two bytes and
    B stored N×K.
    """
    operands = profile.layout == "nt" and profile.dtype in ("bfloat16", "float16")
    return operands and (profile.gpu, profile.shape) == (MACHINE.name, shape)


def _order(profile: Profile, shape: Shape) -> Order | None:
    """The order in which a profiled kernel ran; None for another kernel or in another setting."""
    config = DEFAULTS | FIXED
    changed = {name for name, _ in items(profile.config)}
    if profile.provider != PROVIDER or not _comparable(profile, shape) or changed - config.keys():
        return None
    config |= profile.settings
    if config["sms"] == "0":
        config["sms"] = str(MACHINE.sms)
    if any(config[name] != value for name, value in FIXED.items()):
        return None
    return Order.of(config["order"], (int(config["group_m"]), int(config["group_n"])))


def _mega(value: float | None) -> str:
    return figure(value, ",.0f", 1e-6)


def _by(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes))

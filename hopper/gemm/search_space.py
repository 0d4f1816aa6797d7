"""The search space of `hopper.gemm`."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ...core.machines import Machine
from ...core.problem import Problem
from ...core.space import Footprint, Space
from ..core import tile_order
from ..core.config import HopperConfig, unscheduled
from ..core.search_space import Unsupported, footprint_of
from . import heuristic, operand_copies

# tile_m, consumers, pingpong, in_flight: three consumers keep the tensor cores busy without
_TILES = (
    (64, 1, False, 1),
    (128, 2, False, 1),
    (64, 2, True, 1),
    (128, 2, True, 1),
    (192, 3, False, 0),
    (192, 3, False, 1),
    (256, 2, False, 1),
)
_WIDTHS = (16, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_CLUSTERS = ((1, 1), (2, 1), (1, 2))
# split_k, stream_k, cluster_k
_CUTS = ((1, False, 1), (1, False, 2), (1, False, 4), (1, False, 8), (16, False, 1), (1, True, 1))
_ACCUMULATORS = 200  # registers of a thread; 208 spill where it has 232
_SHORT = 2048**2  # outputs of a call that may be better off with slices of 128 terms
_FEW = 64  # rows or columns that may be better off as columns of the tile


def space(
    gemm: Any, base: HopperConfig, unsupported: Unsupported, problem: Problem, machine: Machine
) -> Space[HopperConfig]:
    """The configs for a problem, its own being the rule's; the GPU's own limits are sm_90's, in
    `invalid_reason`. Slots and buffers are as many as fit, and no axes: they cost nothing else.
    """
    refusal, own = unsupported(problem), heuristic.config(problem, machine.sms, base)

    def invalid_reason(config: HopperConfig) -> str | None:
        if reason := refusal or gemm.invalid_reason(config):
            return reason
        return None if config == own else _hopeless(config, machine, problem)

    return Space(
        own=own,
        axes={},
        also=_Listed(base, problem, machine),
        invalid_reason=invalid_reason,
        footprint=functools.partial(footprint, problem, operand_copies.lines(problem)),
        compiled_as=_compiled_as,
    )


def _compiled_as(config: HopperConfig) -> HopperConfig:
    """For one problem `swap` turns the operands, and `gpc` asks for a table where others
    have none.
    """
    return replace(unscheduled(config), swap=config.swap, gpc=config.gpc)


@dataclass(frozen=True)
class _Listed:
    """The configs, made when they are asked for: whoever looks up one of them needs none."""

    base: HopperConfig
    problem: Problem
    machine: Machine

    def __iter__(self) -> Iterator[HopperConfig]:
        return _configs(self.base, self.problem, self.machine)


def _configs(base: HopperConfig, problem: Problem, machine: Machine) -> Iterator[HopperConfig]:
    few, free = min(problem.M, problem.N) <= _FEW, heuristic.any_column(problem)
    free = free if few else free[:1]
    for tile, cluster, swap, cut in product(_TILES, _CLUSTERS, (False, True), _CUTS):
        M, N = (problem.N, problem.M) if swap else (problem.M, problem.N)
        widths = [(n, False) for n in _WIDTHS if few or not swap or (swap in free and n % 64)]
        widths += [(n, True) for n in _fitting(tile[0], M, N, machine.sms) if swap in free]
        whole = cut == _CUTS[0]
        orders = ("serpentine", "hilbert") if whole else ("serpentine",)
        slices = (64, 128) if problem.M * problem.N <= _SHORT and (whole or cut[2] == 2) else (64,)
        for width, order, tile_k in product(widths, orders, slices):
            if tile_k == 128 and order == "hilbert":
                continue
            c = replace(
                heuristic.shaped(base, *tile[:2], *cluster),
                tile_k=tile_k,
                pingpong=tile[2],
                in_flight=tile[3],
                tile_n=width[0],
                elastic=width[1],
                swap=swap,
                split_k=cut[0],
                stream_k=cut[1],
                cluster_k=cut[2],
                k_serpentine=base.k_serpentine and cut[0] == 1,
                order=order,
            )
            yield heuristic.filled(c)


@functools.lru_cache(maxsize=64)
def _fitting(tile_m: int, M: int, N: int, sms: int) -> list[int]:
    """Elastic widths, the widest first of those whose tiles of so many rows fill waves best."""
    found = []
    for width in range(min(256, _ACCUMULATORS * 256 // tile_m // 8 * 8), 63, -8):
        c = HopperConfig(tile_m=tile_m, tile_n=width, elastic=True)
        rows, columns = tile_order.cluster_tiles(c, M, N)
        waves = -(-rows * columns // sms)
        found.append((waves * N / columns, -width))
    return [-width for _, width in sorted(found)[:3]]


def _hopeless(c: HopperConfig, machine: Machine, problem: Problem) -> str | None:
    """Why a config that can be built cannot be the fastest, or is another one under
    another name.
    """
    M, N = (problem.N, problem.M) if c.swap else (problem.M, problem.N)
    if c.accumulator_registers > _ACCUMULATORS:
        return (
            f"{c.accumulator_registers} accumulators a thread spill, expected at most "
            f"{_ACCUMULATORS}"
        )
    parts = 8 * c.cluster_k if c.cluster_k > 1 else 1  # that a width must have
    if c.tile_m >= M + 64 or any(N <= width < c.tile_n and width % parts == 0 for width in _WIDTHS):
        return f"tile is {c.tile_m}x{c.tile_n}, expected no larger than it takes to cover {M}x{N}"
    if c.slots < 3:
        return f"slots is {c.slots}, expected at least 3: products wait for loads"
    if (c.cluster_m > 1 and c.tile_m >= M) or (c.cluster_n > 1 and c.tile_n >= N):
        return (
            f"a cluster of {c.cluster_m}x{c.cluster_n} for {M} rows and {N} columns, expected "
            "one that is filled"
        )
    rows, columns = tile_order.cluster_tiles(c, M, N)
    tiles, fit = rows * columns, max(1, machine.sms // c.cluster)
    read = (M + N) * problem.K * 2
    if c.order != "serpentine" and (tiles <= fit or read <= machine.l2_bytes // 4):
        return (
            f"order is {c.order!r}, expected 'serpentine': {tiles} tiles of {read} bytes, at "
            "once or held by L2"
        )
    if c.split_k > 1 and (
        tiles * (c.split_k - 1) >= fit or c.split_k > problem.K // (2 * c.tile_k)
    ):
        return (
            f"split_k is {c.split_k}, expected less: {tiles} tiles keep the GPU busy with "
            "fewer "
            "pieces"
        )
    if c.cluster_k > 1 and (
        tiles * (c.cluster_k - 1) >= fit * c.cluster_k or 2 * c.cluster_k * c.tile_k > problem.K
    ):
        return (
            f"cluster_k is {c.cluster_k}, expected less: {tiles} tiles keep the GPU busy with "
            "fewer parts of K"
        )
    if c.stream_k and (tiles <= fit or tiles % fit == 0):
        return f"stream_k is True, expected False: {tiles} tiles make no wave that is partly filled"
    if tiles <= fit and c.pingpong:
        return f"pingpong is True, expected False: {tiles} tiles run at once, and no CTA has two"
    return None


def footprint(problem: Problem, lines: tuple[int, int], c: HopperConfig) -> Footprint:
    across = problem.M if c.swap else problem.N
    f = replace(
        footprint_of(c, c.consumers + 1, persistent=True),
        tile_n=-(-across // tile_order.columns(c, across))
        if c.elastic
        else c.tile_n,  # about the mean
        split_k=c.split_k,
        stream_k=c.stream_k,
        cluster_k=c.cluster_k,
        pingpong=c.pingpong,
        gathered=c.gpc and not c.split,
        lines=lines,
    )
    if not c.swap:
        return f
    return replace(
        f, tile_m=f.tile_n, tile_n=f.tile_m, cluster_m=f.cluster_n, cluster_n=f.cluster_m
    )

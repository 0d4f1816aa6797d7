"""The search space of `hopper.gemm`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from ..machines import Machine
from ..operands import Problem
from ..space import Footprint, Space
from . import schedule
from .config import ACCUMULATOR_LIMIT, SHARED_MEMORY, WARPGROUP, HopperConfig, unscheduled
from .space import Unsupported

# tile_m, consumers, setmaxnreg, pingpong
_TILES = (
    (64, 1, 0, 0, False),
    (128, 1, 0, 0, False),
    (128, 2, 40, 232, False),
    (64, 2, 40, 232, True),
    (128, 2, 40, 232, True),
    (192, 3, 32, 160, False),
    (256, 2, 40, 232, False),
)
_WIDTHS = (16, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_CLUSTERS = ((1, 1), (2, 1), (1, 2))
_PIECES = (1, 2, 3, 4, 6, 8, 16)
_DEEPEST = 16
_FEW = 64  # rows or columns that may be better off as columns of the tile


def space(
    gemm: Any, own: HopperConfig, unsupported: Unsupported, problem: Problem, machine: Machine
) -> Space[HopperConfig]:
    """The configs for a problem; the GPU's own limits are sm_90's, in `invalid_reason`. Slots and buffers are as many
    as fit, and no axes: they cost nothing else.
    """
    made = tuple(_filled(config) for config in _configs(own, problem, machine))
    refusal = unsupported(problem)

    def invalid_reason(config: HopperConfig) -> str | None:
        if reason := refusal or gemm.invalid_reason(config):
            return reason
        return None if config == own else _hopeless(config, machine, problem)

    return Space(
        own=own, axes={}, also=made, invalid_reason=invalid_reason, footprint=footprint, compiled_as=unscheduled
    )


def _configs(own: HopperConfig, problem: Problem, machine: Machine) -> Iterator[HopperConfig]:
    widths = [(n, False) for n in _WIDTHS] + [(n, True) for n in _fitting(problem, machine)]
    swaps = (False, True) if min(problem.M, problem.N) <= _FEW else (False,)
    cuts = [(pieces, False) for pieces in _PIECES] + [(1, True)]
    for tile, width, cluster, swap, cut in product(_TILES, widths, _CLUSTERS, swaps, cuts):
        for order in ("serpentine", "hilbert"):
            yield replace(
                own,
                tile_m=tile[0],
                consumers=tile[1],
                producer_registers=tile[2],
                consumer_registers=tile[3],
                pingpong=tile[4],
                tile_n=width[0],
                elastic=width[1],
                cluster_m=cluster[0],
                cluster_n=cluster[1],
                swap=swap,
                split_k=cut[0],
                stream_k=cut[1],
                k_serpentine=own.k_serpentine and cut[0] == 1,
                order=order,
            )


def _filled(c: HopperConfig) -> HopperConfig:
    """With as many buffers of C as help, and as many slots as fit beside them."""
    c = replace(c, store_buffers=min(2, c.slabs))
    left = SHARED_MEMORY - replace(c, slots=0).shared_memory_bytes
    return replace(c, slots=max(1, min(_DEEPEST, left // c.slot_bytes)))


def _fitting(problem: Problem, machine: Machine) -> list[int]:
    """Elastic widths, the widest first of those whose tiles fill waves best, for tiles of 128 rows."""
    found = []
    for width in range(256, 119, -8):
        c = HopperConfig(tile_m=128, tile_n=width, elastic=True)
        rows, columns = schedule.cluster_tiles(c, problem.M, problem.N)
        waves = -(-rows * columns // machine.sms)
        found.append((waves * problem.N / columns, -width))
    return [-width for _, width in sorted(found)[:3]]


def _hopeless(c: HopperConfig, machine: Machine, problem: Problem) -> str | None:
    """Why a config that can be built cannot be the fastest, or is another one under another name."""
    M, N = (problem.N, problem.M) if c.swap else (problem.M, problem.N)
    if c.accumulator_registers > ACCUMULATOR_LIMIT:
        return f"{c.accumulator_registers} accumulators a thread spill, expected at most {ACCUMULATOR_LIMIT}"
    if c.slots < 3:
        return f"slots is {c.slots}, expected at least 3: products wait for loads"
    if (c.cluster_m > 1 and c.tile_m >= M) or (c.cluster_n > 1 and c.tile_n >= N):
        return f"a cluster of {c.cluster_m}x{c.cluster_n} for {M} rows and {N} columns, expected one that is filled"
    rows, columns = schedule.cluster_tiles(c, M, N)
    tiles, fit = rows * columns, max(1, machine.sms // c.cluster)
    if tiles <= fit and c.order != "serpentine":
        return f"order is {c.order!r}, expected 'serpentine': {tiles} tiles run at once"
    if c.split_k > 1 and (tiles * (c.split_k - 1) >= fit or c.split_k > problem.K // (2 * c.tile_k)):
        return f"split_k is {c.split_k}, expected less: {tiles} tiles keep the GPU busy with fewer pieces"
    if c.stream_k and (tiles <= fit or tiles % fit == 0):
        return f"stream_k is True, expected False: {tiles} tiles make no wave that is partly filled"
    if tiles <= fit and c.pingpong:
        return f"pingpong is True, expected False: {tiles} tiles run at once, and no CTA has two"
    return None


def footprint(c: HopperConfig) -> Footprint:
    width = c.tile_n - 4 if c.elastic else c.tile_n  # about the mean
    return Footprint(
        math="wgmma",
        tile_m=width if c.swap else c.tile_m,
        tile_n=c.tile_m if c.swap else width,
        tile_k=c.tile_k,
        stages=c.slots,
        threads=WARPGROUP * (c.consumers + 1),
        registers=c.accumulator_registers + 40,
        shared_memory=c.shared_memory_bytes,
        groups=c.consumers,
        in_flight=c.in_flight > 0,
        cluster_m=c.cluster_n if c.swap else c.cluster_m,
        cluster_n=c.cluster_m if c.swap else c.cluster_n,
        persistent=True,
        sms=c.sms,
        order=c.order,
        group_m=c.group_m,
        group_n=c.group_n,
        store="staged" if c.store_buffers else "registers",
        split_k=c.split_k,
        stream_k=c.stream_k,
        pingpong=c.pingpong,
    )

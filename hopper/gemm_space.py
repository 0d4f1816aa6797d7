"""The search space of `hopper.gemm`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..machines import Machine
from ..operands import Problem
from ..space import Axes, Footprint, Space
from . import schedule
from .config import MOST_SLOTS, SHARED_MEMORY, WARPGROUP, HopperConfig, unscheduled
from .space import Unsupported

_MANY_ROWS = 2  # tiles of rows below which clusters along M are not tried
_TILES = (
    (64, 1, 0, 0, False),
    (128, 1, 0, 0, False),
    (128, 2, 40, 232, False),
    (128, 2, 40, 232, True),
    (192, 3, 32, 160, False),
    (256, 2, 40, 232, False),
)


def space(
    gemm: Any, own: HopperConfig, unsupported: Unsupported, problem: Problem, machine: Machine
) -> Space[HopperConfig]:
    """The configs for a problem; the GPU's own limits are sm_90's, in `invalid_reason`."""
    skinny = min(problem.M, problem.N) <= 64
    widths = tuple(sorted({16, 32, 48, 64, 96, 128, 160, 192, 224, 256} | set(_fitting(problem, machine))))
    axes: Axes = {
        ("tile_m", "consumers", "producer_registers", "consumer_registers", "pingpong"): _TILES,
        ("tile_n", "elastic"): tuple((n, False) for n in widths if n % 16 == 0)
        + tuple((n, True) for n in _fitting(problem, machine)),
        "slots": tuple(range(2, 33)),
        ("cluster_m", "cluster_n"): ((1, 1), (2, 1), (1, 2)),
        ("order", "group_m"): (("serpentine", 8), ("hilbert", 8)),
        ("swap", "split_k", "stream_k", "k_serpentine"): tuple(
            (swap, pieces, stream, pieces == 1)
            for swap in ((False, True) if skinny else (False,))
            for pieces in (1, 2, 3, 4, 6, 8, 16)
            for stream in ((False, True) if pieces == 1 else (False,))
        ),
    }
    refusal = unsupported(problem)

    def invalid_reason(config: HopperConfig) -> str | None:
        if reason := refusal or gemm.invalid_reason(config):
            return reason
        return None if config == own else _hopeless(config, machine, problem)

    return Space(own=own, axes=axes, invalid_reason=invalid_reason, footprint=footprint, compiled_as=unscheduled)


def _fitting(problem: Problem, machine: Machine) -> list[int]:
    """Elastic widths, the widest first of those whose tiles fill waves best, for tiles of 128 rows."""
    found = []
    for width in range(256, 119, -8):
        c = HopperConfig(tile_m=128, tile_n=width, elastic=True)
        rows, columns = schedule.cluster_tiles(c, problem.M, problem.N)
        waves = -(-rows * columns // machine.sms)
        found.append((waves * width, -width))
    return [-width for _, width in sorted(found)[:2]]


def _hopeless(c: HopperConfig, machine: Machine, problem: Problem) -> str | None:
    """Why a config that can be built cannot be the fastest, or is another one under another name."""
    M, N = (problem.N, problem.M) if c.swap else (problem.M, problem.N)
    deepest = min(MOST_SLOTS, 32, (SHARED_MEMORY - replace(c, slots=0).shared_memory_bytes) // c.slot_bytes)
    if c.slots != min(deepest, 16):
        return f"slots is {c.slots}, expected {min(deepest, 16)}: so many fit, and depth costs nothing else"
    if c.cluster_m > 1 and c.tile_m >= M or c.cluster_n > 1 and c.tile_n >= N:
        return f"a cluster of {c.cluster_m}x{c.cluster_n} for {M} rows and {N} columns, expected one that is filled"
    rows, columns = schedule.cluster_tiles(c, M, N)
    tiles, fit = rows * columns, max(1, machine.sms // c.cluster)
    if tiles <= fit and c.order != "serpentine":
        return f"order is {c.order!r}, expected 'serpentine': {tiles} tiles run at once"
    if c.split_k > 1 and (tiles * (c.split_k - 1) >= fit or c.split_k > problem.K // (2 * c.tile_k)):
        return f"split_k is {c.split_k}, expected less: {tiles} tiles keep the GPU busy with fewer pieces"
    if c.stream_k and (tiles <= fit or tiles % fit == 0):
        return f"stream_k is True, expected False: {tiles} tiles make no wave that is partly filled"
    if tiles <= fit and c.k_serpentine and c.split_k == 1 and c.pingpong:
        return "pingpong is True, expected False: no CTA has two tiles"
    return None


def footprint(c: HopperConfig) -> Footprint:
    return Footprint(
        math="wgmma",
        tile_m=c.tile_m,
        tile_n=c.tile_n,
        tile_k=c.tile_k,
        stages=c.slots,
        threads=WARPGROUP * (c.consumers + 1),
        registers=c.accumulator_registers + 40,
        shared_memory=c.shared_memory_bytes,
        groups=c.consumers,
        in_flight=c.in_flight > 0,
        cluster_m=c.cluster_m,
        cluster_n=c.cluster_n,
        persistent=True,
        sms=c.sms,
        order=c.order,
        group_m=c.group_m,
        group_n=c.group_n,
        store="staged" if c.store_buffers else "registers",
    )

"""The config of `hopper.gemm` where none was tuned: of some tiles, clusters and pieces those whose
waves cost least.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ...core.problem import Problem, with_row_major_output
from ...device import clusters, l2
from ..core import tile_order
from ..core.config import SHARED_MEMORY, SLAB_BYTES, HopperConfig, gated_reason, promoted_reason
from . import operand_copies

# Cycles. START and GATHERED are from short calls' stamps and times (WORKLOG.md); the others are
# estimates.
START = 3500.0  # of a call beside its tiles: the first load 2000, the last store 1500
BETWEEN = 600.0  # two tiles of a CTA
COMBINE = 6000.0  # sums that go through memory, and
COMBINED = 20.0  # bytes of them a cycle
GATHERED = 90.0  # bytes a cycle that reach an SM in a call of one wave, whose GPCs have neighbours,
SPREAD = 60.0  # that it gets from L2 where CTAs have pieces of K instead,
LOADED = 40.0  # and in a longer call
BROKEN = 30.0  # of rows that begin inside of lines: twice the requests, which do not merge
PRODUCTS = 4096.0 * 0.97  # FLOP a cycle of an SM
SHALLOW = 1.05  # times as long for products that three slots feed,
THIRD = 1.03  # and for those of three consumers

# tile_m, consumers, cluster_m, cluster_n, swap, and widths. Pingpong is left to tuning.
_TILES = (
    (64, 1, 1, 1, False, (128, 96, 64, 48)),
    (64, 1, 2, 1, False, (128, 64, 32)),
    (128, 2, 2, 1, False, (256, 192, 128, 64)),
    (128, 2, 1, 1, False, (256, 128, 64)),
    (64, 1, 1, 1, True, (64, 32, 16)),
)
# tile_m, consumers, cluster_m, cluster_n, widths
_ELASTIC = (
    (64, 1, 1, 1, range(256, 87, -8)),
    (128, 2, 2, 1, range(256, 135, -8)),
    (128, 2, 1, 1, range(256, 87, -8)),
    (192, 3, 1, 1, range(192, 87, -8)),
    (192, 3, 1, 2, range(192, 135, -8)),
    (256, 2, 1, 2, range(200, 127, -8)),
)
_REGISTERS = {
    1: (0, 0),
    3: (32, 160),
}  # for setmaxnreg, of consumers that take other than the config's own
_PARTS = (2, 4, 8)  # of K, in a cluster
_FEWEST = 4  # slices of K that a CTA should have
_DEEPEST = 16  # slots
_FEW = 64  # rows or columns that may be better off as columns of the tile


@functools.lru_cache(maxsize=512)
def config(problem: Problem, sms: int, own: HopperConfig) -> HopperConfig:
    """The config for a problem on a GPU of so many SMs. Where rows must not tell M it walks K in
    one order: tiles and their shape, which it chooses by M, leave bits as they are.
    """
    problem = operand_copies.aligned(problem)
    turned = with_row_major_output(problem)[0]
    M, N, lines = turned.M, turned.columns, l2.lines(turned)
    if problem.batch_invariant:
        own = replace(own, k_serpentine=False)
    found = _candidates(problem, M, N, sms, own)
    if problem.epilogue.gated:
        found = (c for c in found if gated_reason(c) is None)
    if "promoted" in problem.formats:
        found = (c for c in found if promoted_reason(c) is None)
    return min(found, key=lambda c: _cycles(c, M, N, problem, sms, lines))


def _candidates(
    problem: Problem, M: int, N: int, sms: int, own: HopperConfig
) -> Iterator[HopperConfig]:
    free = any_column(problem)[:1]
    for tile_m, consumers, cluster_m, cluster_n, swap, widths in _TILES:
        if swap and min(M, N) > _FEW:
            continue
        shape = shaped(own, tile_m, consumers, cluster_m, cluster_n)
        for width in widths:
            c = replace(shape, tile_n=width, swap=swap or (free == [True] and width % 64 > 0))
            yield filled(_deep(c, problem))
            if not problem.batch_invariant:
                yield from _cut(_deep(c, problem), problem, _tiles(c, M, N, problem), sms)
    if M * N * math.prod(problem.batch) > 128**2 * sms // 2:
        for (*tile, wide), swap in product(_ELASTIC, free):
            c = replace(shaped(own, *tile), swap=swap, elastic=True)
            yield from (filled(replace(c, tile_n=width)) for width in wide)


def shaped(
    own: HopperConfig, tile_m: int, consumers: int, cluster_m: int, cluster_n: int
) -> HopperConfig:
    """The config with these fields, and with registers for as many consumers."""
    registers = _REGISTERS.get(consumers, (own.producer_registers, own.consumer_registers))
    return replace(
        own,
        tile_m=tile_m,
        consumers=consumers,
        cluster_m=cluster_m,
        cluster_n=cluster_n,
        producer_registers=registers[0],
        consumer_registers=registers[1],
    )


def any_column(problem: Problem) -> list[bool]:
    """Values of `swap` by which tiles may begin at any column, because B is stored by columns, the
    better one first: where its rows are contiguous, a tile that does not begin at a whole 64 asks
    for twice the lines (1280 nn on an H100: 17.3 µs, in 128 columns 8.8). The transpose of C must
    leave by TMA, which stores 16 bits by columns, no fp32.
    """
    turned = with_row_major_output(problem)[0]
    granules = turned.N % 8 == 0 and turned.out[-2] % 8 == 0 and turned.alignment[2] >= 16
    staged = problem.out_dtype.itemsize == 2 and granules
    return [False] * (turned.b[-2] == 1) + [True] * (turned.a[-1] == 1 and staged)


def _cut(c: HopperConfig, problem: Problem, tiles: int, sms: int) -> Iterator[HopperConfig]:
    """The config with parts of K, where its tiles leave SMs without work."""
    for parts in _PARTS:
        cut = replace(c, cluster_k=parts)
        room = (
            cut.cluster <= 8
            and c.tile_n % (8 * parts) == 0
            and parts * _FEWEST * c.tile_k <= problem.K
        )
        if room and clusters.at_once(sms, cut.cluster) >= tiles:
            yield filled(cut)
    pieces = min(sms // (tiles * c.cluster), problem.K // (8 * c.tile_k), 32)
    if pieces > max(_PARTS):
        yield filled(replace(c, split_k=pieces, k_serpentine=False))


def _deep(c: HopperConfig, problem: Problem) -> HopperConfig:
    """Small tiles take 128 terms a slice, so that loads and barriers are half as many."""
    deep = c.tile_m * c.tile_n < 64 * 128 and c.group == 1 and problem.K >= 8 * 128
    deep = deep and "promoted" not in problem.formats
    return replace(c, tile_k=128) if deep else c


def filled(c: HopperConfig) -> HopperConfig:
    """With as many buffers of C as help, and as many slots as fit beside them: one more of few
    counts for more than a buffer.
    """
    slabs, beside = (
        c.slabs,
        c.shared_memory_bytes - c.slots * c.slot_bytes - c.store_buffers * c.consumers * SLAB_BYTES,
    )

    def made(buffers: int) -> tuple[int, int]:
        room = SHARED_MEMORY - beside - buffers * c.consumers * SLAB_BYTES
        return max(1, min(_DEEPEST, room // c.slot_bytes)), buffers

    two, one = made(min(2, slabs)), made(min(1, slabs))
    slots, buffers = one if one[0] > two[0] and two[0] < 5 else two
    return replace(c, slots=slots, store_buffers=buffers)


def _tiles(c: HopperConfig, M: int, N: int, problem: Problem) -> int:
    """Of clusters."""
    rows, columns = (
        tile_order.cluster_tiles(c, N, M) if c.swap else tile_order.cluster_tiles(c, M, N)
    )
    return rows * columns * math.prod(problem.batch)


def _cycles(
    c: HopperConfig, M: int, N: int, problem: Problem, sms: int, lines: tuple[int, int]
) -> float:
    """`lines`: of A and of B as they are turned, `l2.lines`."""
    waves = -(-_tiles(c, M, N, problem) * c.split_k // clusters.at_once(sms, c.cluster))
    across = M if c.swap else N
    width = across / tile_order.columns(c, across) if c.elastic else c.tile_n
    products = 2 * c.tile_m * max(width, 32) * problem.K / PRODUCTS
    once = waves == 1 and not c.split
    asked = lines[::-1] if c.swap else lines
    sides = (c.tile_m, c.cluster_n, asked[0]), (c.tile_n, c.cluster_m, asked[1])
    apart = SPREAD if waves == 1 else LOADED
    loaded = (
        2
        * problem.K
        * sum(
            rows / shared / BROKEN
            if each > 1
            else rows / GATHERED
            if once
            else rows / shared / apart
            for rows, shared, each in sides
        )
    )
    tile: float = (products**3 + loaded**3) ** (1 / 3) / (c.cluster_k * c.split_k) + BETWEEN
    if c.cluster_k > 1:
        tile += clusters.exchange(c.exchange_bytes)
    if c.split_k > 1:
        tile += COMBINE + c.tile_m * c.tile_n * 4 * c.split_k / COMBINED
    if c.slots < 4:
        tile *= SHALLOW
    if c.consumers == 3:
        tile *= THIRD
    return START + (clusters.TOGETHER if c.cluster > 1 else 0) + waves * tile

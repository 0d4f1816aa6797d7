"""The config of `hopper.gemm` where none was tuned: a few shapes of tile, the one whose waves cost least."""

from dataclasses import dataclass, replace

from ..operands import Problem
from . import schedule
from .config import HopperConfig

START = 2000  # cycles of a call beside its products, and of a tile
BETWEEN = 600


@dataclass(frozen=True)
class Shape:
    """A tile, its cluster and ring, and the share of wgmma's rate that it reaches."""

    m: int
    n: int
    consumers: int
    cluster_m: int
    slots: int
    share: float
    swap: bool = False


SHAPES = (
    Shape(128, 256, 2, 2, 4, 0.95),
    Shape(128, 256, 2, 1, 4, 0.85),
    Shape(128, 128, 2, 2, 6, 0.85),
    Shape(128, 128, 2, 1, 6, 0.75),
    Shape(128, 64, 2, 1, 8, 0.6),
    Shape(64, 128, 1, 2, 8, 0.6),
    Shape(64, 64, 1, 2, 12, 0.55),
    Shape(64, 64, 1, 1, 12, 0.5),
    Shape(64, 48, 1, 1, 12, 0.4),
    Shape(64, 32, 1, 1, 16, 0.25, swap=True),
    Shape(64, 16, 1, 1, 16, 0.125, swap=True),
)


def config(problem: Problem, sms: int, own: HopperConfig) -> HopperConfig:
    """The config for a problem on a GPU of so many SMs. Where rows must not tell M it walks K in one order: tiles and
    their shape, which it chooses by M, leave bits as they are.
    """
    swapped = problem.out[-1] != 1 and problem.N != 1 and (problem.out[-2] == 1 or problem.M == 1)
    M, N = (problem.N, problem.M) if swapped else (problem.M, problem.N)
    made = [_made(shape, own) for shape in SHAPES]
    best = min(made, key=lambda c: _cycles(c, M, N, problem, sms))
    if problem.batch_invariant:
        return replace(best, k_serpentine=False)
    return _cut(best, M, N, problem, sms)


def _made(shape: Shape, own: HopperConfig) -> HopperConfig:
    registers = (own.producer_registers, own.consumer_registers) if shape.consumers > 1 else (0, 0)
    return replace(
        own, tile_m=shape.m, tile_n=shape.n, consumers=shape.consumers, cluster_m=shape.cluster_m, slots=shape.slots,
        producer_registers=registers[0], consumer_registers=registers[1], swap=shape.swap,
        store_buffers=min(2, shape.m // (64 * shape.consumers) * -(-shape.n // 64)),
    )  # fmt: skip


_SHARES = {(s.m, s.n, s.cluster_m): s.share for s in SHAPES}


def _tiles(c: HopperConfig, M: int, N: int, problem: Problem) -> int:
    rows, columns = schedule.cluster_tiles(c, N, M) if c.swap else schedule.cluster_tiles(c, M, N)
    matrices = 1
    for extent in problem.batch:
        matrices *= extent
    return rows * columns * matrices


def _cycles(c: HopperConfig, M: int, N: int, problem: Problem, sms: int) -> float:
    waves = -(-_tiles(c, M, N, problem) // max(1, sms // c.cluster))
    rate = 4096 * _SHARES[c.tile_m, c.tile_n, c.cluster_m]
    return START + waves * (2 * c.tile_m * c.tile_n * problem.K / rate + BETWEEN)


def _cut(c: HopperConfig, M: int, N: int, problem: Problem, sms: int) -> HopperConfig:
    """With K in pieces where the tiles leave most SMs without work."""
    tiles = _tiles(c, M, N, problem) * c.cluster
    pieces = min(sms // tiles, problem.K // (8 * c.tile_k), 32) if tiles else 1
    return replace(c, split_k=pieces, k_serpentine=False) if pieces > 1 else c

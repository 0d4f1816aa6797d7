"""Tiles of a call as launches: how many CTAs, of how many registers a thread, which products of a batch, what needs
64-bit offsets."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

from ..operands import Problem, span

INT32_MAX = 2**31 - 1
MAX_PROGRAMS = 2**31 - 1  # CTAs of a launch
WARP = 32
MAX_THREADS = 1024  # of a CTA
REGISTERS = 65536  # of an SM, on every architecture from sm_75 on


class Tile(Protocol):
    """The part of a kernel's config that a grid follows from."""

    @property
    def block_m(self) -> int: ...
    @property
    def block_n(self) -> int: ...
    @property
    def block_k(self) -> int: ...
    @property
    def group_m(self) -> int: ...


def tiles(config: Tile, problem: Problem) -> int:
    """Tiles of one product of the batch."""
    return -(-problem.M // config.block_m) * -(-problem.N // config.block_n)


def group_m(config: Tile, problem: Problem) -> int:
    """Rows of tiles that are walked together: all there are, where the tiles of so many would not fit 32 bits."""
    rows, columns = -(-problem.M // config.block_m), -(-problem.N // config.block_n)
    return config.group_m if config.group_m * columns <= INT32_MAX else min(config.group_m, rows)


def max_registers(threads: int, ctas: int = 1) -> int:
    """Registers a thread may take where an SM has so many CTAs of so many threads; it gives them out by eights."""
    return min(255, REGISTERS // (ctas * threads) // 8 * 8)


@dataclass(frozen=True)
class Piece:
    """One launch: how far into a, b, c and out it starts, in elements, and its CTAs."""

    offsets: tuple[int, int, int, int]
    programs: int


def needs_int64(problem: Problem, config: Tile) -> bool:
    """Whether an index past the edge, or the offset of an element within one matrix, needs 64 bits."""
    M, N, K = problem.M, problem.N, problem.K
    ahead = 16 * config.block_k  # K is rounded up to the slabs of an iteration, at most eight, and as many more
    reach = max(M + config.block_m, N + config.block_n, K + ahead)
    shapes = [((M, K), problem.a), ((K, N), problem.b), ((M, N), problem.out), ((M, N), problem.c)]
    return max(reach, *(span(shape, strides[-2:]) for shape, strides in shapes if strides is not None)) > INT32_MAX


def kept_dims(problem: Problem) -> list[int]:
    """Batch dimensions that the grid walks: the two largest."""
    largest = sorted(range(len(problem.batch)), key=lambda i: problem.batch[i])[-2:]
    return sorted(largest)


def pieces_of(problem: Problem, config: Tile) -> list[Piece]:
    """Launches of a call: one, unless there are batch dimensions beyond two or the grid would be too large."""
    kept = kept_dims(problem)
    outer, inner = ([1, 1] + [problem.batch[i] for i in kept])[-2:]
    per_product = tiles(config, problem)
    room = MAX_PROGRAMS // per_product  # products of a launch
    rows = min(outer, max(room // inner, 1))
    columns = min(inner, room)
    ranges = [range(size) for size in problem.batch]
    if kept:
        ranges[kept[-1]] = range(0, inner, columns)
    if len(kept) == 2:
        ranges[kept[0]] = range(0, outer, rows)
    pieces = []
    for index in itertools.product(*ranges):
        first_outer, first_inner = ([0, 0] + [index[i] for i in kept])[-2:]
        products = min(rows, outer - first_outer) * min(columns, inner - first_inner)
        a, b, c, out = (
            sum(i * stride for i, stride in zip(index, strides or (), strict=False))
            for strides in (problem.a, problem.b, problem.c, problem.out)
        )
        pieces.append(Piece((a, b, c, out), products * per_product))
    return pieces

"""The tiles of a call as launches: how many CTAs, with how many registers a thread, for which
products of a batch, and whether offsets need 64 bits.
"""

import itertools
from dataclasses import dataclass
from typing import Protocol

from ..core.epilogue import EPILOGUE_ARGS
from ..core.problem import Problem
from ..core.tensor_memory import span

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


def out_columns(config: Tile, problem: Problem) -> int:
    """Columns of the output that a tile of block_n columns of B makes."""
    return config.block_n // (2 if problem.epilogue.gated else 1)


def tiles(config: Tile, problem: Problem) -> int:
    """Tiles of one product of the batch."""
    return -(-problem.M // config.block_m) * -(-problem.N // out_columns(config, problem))


def group_m(config: Tile, problem: Problem) -> int:
    """Rows of tiles that are walked together: all there are, where the tiles of so many would not
    fit 32 bits.
    """
    rows, columns = -(-problem.M // config.block_m), -(-problem.N // out_columns(config, problem))
    return config.group_m if config.group_m * columns <= INT32_MAX else min(config.group_m, rows)


def max_registers(threads: int, ctas: int = 1) -> int:
    """Registers a thread may take where an SM has so many CTAs of so many threads; it gives them
    out by eights.
    """
    return min(255, REGISTERS // (ctas * threads) // 8 * 8)


@dataclass(frozen=True)
class Chunk:
    """One launch of a call that may take several: how far into a, b, c, out, bias, residual and aux
    it starts, in elements, and how many CTAs it has.
    """

    offsets: tuple[int, ...]
    programs: int


def needs_int64(problem: Problem, config: Tile) -> bool:
    """Whether an index past the edge, or the offset of an element within one matrix, needs
    64 bits.
    """
    M, N, K, columns = problem.M, problem.N, problem.K, problem.columns
    # K is rounded up to the k-blocks of an iteration, at most eight, and as many are copied ahead.
    ahead = 16 * config.block_k
    reach = max(M + config.block_m, columns + config.block_n, K + ahead)
    shapes = [
        ((M, K), problem.a),
        ((K, columns), problem.b),
        ((M, N), problem.out),
        ((M, columns), problem.c),
    ]
    for name, view in problem.epilogue.views.items():
        shapes.append(((M, N if name == "residual" else columns), view.strides))
    return (
        max(reach, *(span(shape, strides[-2:]) for shape, strides in shapes if strides is not None))
        > INT32_MAX
    )


def kept_dims(problem: Problem) -> list[int]:
    """Batch dimensions that the grid walks: the two largest."""
    largest = sorted(range(len(problem.batch)), key=lambda i: problem.batch[i])[-2:]
    return sorted(largest)


def chunks_of(problem: Problem, config: Tile) -> list[Chunk]:
    """Launches of a call: one, unless there are batch dimensions beyond two or the grid would be
    too large.
    """
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
    extra = [view and view.strides for view in map(problem.epilogue.views.get, EPILOGUE_ARGS)]
    chunks = []
    for index in itertools.product(*ranges):
        first_outer, first_inner = ([0, 0] + [index[i] for i in kept])[-2:]
        products = min(rows, outer - first_outer) * min(columns, inner - first_inner)
        offsets = tuple(
            sum(i * stride for i, stride in zip(index, strides or (), strict=False))
            for strides in (problem.a, problem.b, problem.c, problem.out, *extra)
        )
        chunks.append(Chunk(offsets, products * per_product))
    return chunks

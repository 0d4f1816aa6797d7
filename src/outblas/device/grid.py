"""Splits a call into launches: the CTAs of each, its products of the batch, registers per thread,
and whether offsets need 64 bits.
"""

import itertools
from dataclasses import dataclass
from typing import Protocol

from outblas.call.epilogue import EPILOGUE_ARGS
from outblas.call.problem import Problem
from outblas.call.tensor_memory import span

INT32_MAX = 2**31 - 1
MAX_PROGRAMS = 2**31 - 1  # CTAs per launch
WARP = 32
MAX_THREADS = 1024  # threads per CTA
REGISTERS = 65536  # registers per SM, the same on every architecture from sm_75 on


class Tile(Protocol):
    """The fields of a kernel's config that determine a grid."""

    @property
    def block_m(self) -> int: ...
    @property
    def block_n(self) -> int: ...
    @property
    def block_k(self) -> int: ...
    @property
    def group_m(self) -> int: ...


def out_columns(config: Tile, problem: Problem) -> int:
    """Returns the number of output columns of a tile of block_n columns of B."""
    return config.block_n // (2 if problem.epilogue.gated else 1)


def tiles(config: Tile, problem: Problem) -> int:
    """Returns the number of tiles in one product of the batch."""
    return -(-problem.M // config.block_m) * -(-problem.N // out_columns(config, problem))


def group_m(config: Tile, problem: Problem) -> int:
    """Returns the number of tile rows in a group of the tile order: that of the config, or all tile
    rows where the tiles of one group would overflow 32 bits.
    """
    rows, columns = -(-problem.M // config.block_m), -(-problem.N // out_columns(config, problem))
    return config.group_m if config.group_m * columns <= INT32_MAX else min(config.group_m, rows)


def max_registers(threads: int, ctas: int = 1) -> int:
    """Returns the most registers per thread with which an SM can hold `ctas` CTAs of `threads`
    threads. An SM allocates registers in units of eight per thread.
    """
    return min(255, REGISTERS // (ctas * threads) // 8 * 8)


@dataclass(frozen=True)
class Chunk:
    """One launch of a call that may need several: where it starts in a, b, c, out, bias, residual
    and aux, in elements, and its number of CTAs.
    """

    offsets: tuple[int, ...]
    programs: int


def needs_int64(problem: Problem, config: Tile) -> bool:
    """Returns whether 64 bits are needed for an index beyond the edge, or for the offset of an
    element within one matrix.
    """
    M, N, K, columns = problem.M, problem.N, problem.K, problem.columns
    # K is rounded up to the k-blocks of an iteration (at most eight), and as many are prefetched.
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
    """Returns the batch dimensions that the grid covers: the two largest."""
    largest = sorted(range(len(problem.batch)), key=lambda i: problem.batch[i])[-2:]
    return sorted(largest)


def chunks_of(problem: Problem, config: Tile) -> list[Chunk]:
    """Returns the launches of a call: a single one, unless there are more than two batch dimensions
    or the grid would be too large.
    """
    kept = kept_dims(problem)
    outer, inner = ([1, 1] + [problem.batch[i] for i in kept])[-2:]
    per_product = tiles(config, problem)
    room = MAX_PROGRAMS // per_product  # products per launch
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

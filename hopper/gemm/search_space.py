"""The search space of `hopper.gemm`."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from outblas.base.machines import Machine
from outblas.base.space import Footprint, LazySpace, Space
from outblas.call.problem import Problem, with_row_major_output
from outblas.call.tensor_memory import LINE
from outblas.hopper.gemm import heuristic, operand_copies, rule_tiles
from outblas.hopper.gemm.config import Config
from outblas.hopper.gemm.config import invalid_reason as unbuildable_reason
from outblas.hopper.gemm.host import unsupported
from outblas.hopper.gemm.rule_cycles import FEW
from outblas.hopper.parts import tile_order
from outblas.hopper.parts.config import HopperConfig, compile_key
from outblas.hopper.parts.config_limits import gated_reason
from outblas.hopper.parts.search_space import footprint_of

# tile_m, consumers, pingpong, in_flight. Three consumers keep the tensor cores busy without groups
# in flight, too.
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
_PARTITIONS = (
    (1, False, 1),
    (1, False, 2),
    (1, False, 4),
    (1, False, 8),
    (16, False, 1),
    (1, True, 1),
)
_WHOLE_TILES = _PARTITIONS[0]
_MOST_ACCUMULATORS = 200  # registers per thread; 208 spill where a thread has 232
_MOST_REMEMBERED = 4096  # configs
_FEW_OUTPUTS = 2048**2  # a call with this few outputs may be faster with k tiles of 128 terms


def space(problem: Problem, machine: Machine) -> Space[HopperConfig]:
    """Returns the configs for a problem; the default is the heuristic's. The limits of the GPU are
    those of sm_90, in `invalid_reason`. Stages and epilogue stages are no axes: as many as fit are
    used, because they cost nothing but shared memory.
    """
    unsupported_reason, buildable_reason = unsupported(problem), _remembered(unbuildable_reason)
    footprints = Footprints(problem)

    def invalid_reason(config: HopperConfig) -> str | None:
        if reason := unsupported_reason or buildable_reason(config):
            return reason
        if problem.epilogue.gated and (
            reason := gated_reason(config, heuristic.sums_halves(problem))
        ):
            return reason
        reason = pruned_reason(config, machine, problem)
        return None if reason is None or is_own(config) else reason

    def is_own(config: HopperConfig) -> bool:
        own = found.own  # the comparison of all fields takes longer than the reasons
        return config.tile_n == own.tile_n and config == own

    found = LazySpace(
        functools.partial(heuristic.config, problem, heuristic.rates(machine)),
        axes={},
        also=_Listed(problem, machine),
        invalid_reason=invalid_reason,
        footprint=footprints.of,
        compile_key=_compile_key,
        footprint_key=footprints.key,
    )
    return found


class _Remembered:
    """A function of configs that remembers its results by the identity of the config: those of
    tables come back at every shape, and hashing one takes longer than pruning it.
    """

    def __init__(self, function: Callable[[HopperConfig], str | None]) -> None:
        self._function = function
        self._results: dict[int, tuple[HopperConfig, str | None]] = {}

    def __call__(self, config: HopperConfig) -> str | None:
        found = self._results.get(id(config))
        if found is None:  # what is remembered is kept alive, so that no other config has its id
            if len(self._results) >= _MOST_REMEMBERED:
                self._results.clear()
            found = self._results[id(config)] = config, self._function(config)
        return found[1]


_remembered = functools.cache(_Remembered)


def _compile_key(config: HopperConfig) -> HopperConfig:
    """Returns the `compile_key` for configs of one problem. Here `swap_ab` transposes the product,
    `gpc_local` uses a table where others have none, and `stagger` changes the traits.
    """
    return replace(
        compile_key(config),
        swap_ab=config.swap_ab,
        gpc_local=config.gpc_local,
        stagger=config.stagger,
    )


@dataclass(frozen=True)
class _Listed:
    """The configs, made lazily during iteration, because looking up a single config needs none of
    them.
    """

    problem: Problem
    machine: Machine

    def __iter__(self) -> Iterator[HopperConfig]:
        return _configs(self.problem, self.machine)


def _configs(problem: Problem, machine: Machine) -> Iterator[HopperConfig]:
    base, few = Config(), min(problem.M, problem.N) <= FEW
    any_column = heuristic.swaps_of_any_column(problem)
    if not few:
        any_column = any_column[:1]
    for tile, cluster, swap, partition in product(_TILES, _CLUSTERS, (False, True), _PARTITIONS):
        tile_m, consumers, pingpong, in_flight = tile
        split_k, stream_k, cluster_k = partition
        shape = replace(
            rule_tiles.shaped(base, tile_m, consumers, *cluster),
            pingpong=pingpong,
            in_flight=in_flight,
            swap_ab=swap,
            split_k=split_k,
            stream_k=stream_k,
            cluster_k=cluster_k,
            k_serpentine=base.k_serpentine and split_k == 1,
        )
        M, N = (problem.N, problem.M) if swap else (problem.M, problem.N)
        widths = [(n, False) for n in _WIDTHS if few or not swap or (swap in any_column and n % 64)]
        widths += [(n, False) for n in _whole_width(problem, swap) if (n, False) not in widths]
        if swap in any_column:
            widths += [(n, True) for n in _variable_widths(tile_m, M, N, machine.sms)]
        orders = ("serpentine", "hilbert") if partition == _WHOLE_TILES else ("serpentine",)
        for (tile_n, variable), order, tile_k in product(
            widths, orders, _k_tiles(problem, partition)
        ):
            if tile_k == 128 and order == "hilbert":
                continue
            yield rule_tiles.filled(
                replace(shape, tile_n=tile_n, variable_tile_n=variable, order=order, tile_k=tile_k)
            )


def _whole_width(problem: Problem, swap: bool) -> list[int]:
    """Returns the width of a tile that has all of 65 to 256 rows or columns, so that every weight
    is read by one CTA alone; none where they are the rows of the tile. Fewer have their own widths.
    """
    M, N = problem.M, problem.columns
    extent = min(M, N)
    if not FEW < extent <= _WIDTHS[-1] or swap != (M <= N):
        return []
    return [-(-extent // 16) * 16]


def _k_tiles(problem: Problem, partition: tuple[int, bool, int]) -> tuple[int, ...]:
    """Returns the terms per k tile that are worth trying."""
    few_outputs = problem.M * problem.N <= _FEW_OUTPUTS
    cluster_k = partition[2]
    return (64, 128) if few_outputs and (partition == _WHOLE_TILES or cluster_k == 2) else (64,)


@functools.lru_cache(maxsize=64)
def _variable_widths(tile_m: int, M: int, N: int, sms: int) -> list[int]:
    """Returns the widths to try for tiles of variable width: those whose tiles, with tile_m rows,
    fill waves best, the widest first.
    """
    widest = min(256, _MOST_ACCUMULATORS * 256 // tile_m // 8 * 8)
    found = []
    for width in range(widest, 63, -8):
        c = HopperConfig(tile_m=tile_m, tile_n=width, variable_tile_n=True)
        rows, columns = tile_order.cluster_tiles(c, M, N)
        waves = -(-rows * columns // sms)
        found.append((waves * N / columns, -width))
    return [-width for _, width in sorted(found)[:3]]


def pruned_reason(c: HopperConfig, machine: Machine, problem: Problem) -> str | None:
    """Returns why a config that can be built cannot be the fastest, or is equivalent to another
    config; else None.
    """
    M, N = (problem.N, problem.M) if c.swap_ab else (problem.M, problem.N)
    return _pruned_tile(c, M, N) or _pruned_schedule(c, machine, problem, M, N)


def _pruned_tile(c: HopperConfig, M: int, N: int) -> str | None:
    """Returns why the tile, pipeline or cluster of a config cannot be the best for M rows and N
    columns, or None.
    """
    if c.accumulator_registers > _MOST_ACCUMULATORS:
        return (
            f"{c.accumulator_registers} accumulators per thread spill, expected at most "
            f"{_MOST_ACCUMULATORS}"
        )
    if c.tile_m >= M + 64 or _next_narrower(c.tile_n, c.cluster_k) >= N:
        return (
            f"tile is {c.tile_m}x{c.tile_n}, expected a tile no larger than needed to cover {M}x{N}"
        )
    if c.stages < 3:
        return f"stages is {c.stages}, expected at least 3: products would wait for loads"
    if (c.cluster_m > 1 and c.tile_m >= M) or (c.cluster_n > 1 and c.tile_n >= N):
        return (
            f"a cluster of {c.cluster_m}x{c.cluster_n} for {M} rows and {N} columns, expected "
            "a cluster without empty CTAs"
        )
    return None


@functools.cache
def _next_narrower(tile_n: int, cluster_k: int) -> int:
    """Returns the largest of `_WIDTHS` below a width that can be divided as well; 0 where there is
    none.
    """
    granule = 8 * cluster_k if cluster_k > 1 else 1
    return max((w for w in _WIDTHS if w < tile_n and w % granule == 0), default=0)


def _pruned_schedule(
    c: HopperConfig, machine: Machine, problem: Problem, M: int, N: int
) -> str | None:
    """Returns why the order of tiles, or the partitions of K, cannot be the best, or None."""
    rows, columns = tile_order.cluster_tiles(c, M, N)
    tiles, resident = rows * columns, max(1, machine.sms // c.cluster)
    operand_bytes = (M + N) * problem.K * 2
    if c.order != "serpentine" and (tiles <= resident or operand_bytes <= machine.l2_bytes // 4):
        return (
            f"order is {c.order!r}, expected 'serpentine': {tiles} tiles of {operand_bytes} bytes "
            "run at once or fit in L2"
        )
    if c.split_k > 1 and (
        tiles * (c.split_k - 1) >= resident or c.split_k > problem.K // (2 * c.tile_k)
    ):
        return (
            f"split_k is {c.split_k}, expected less: {tiles} tiles keep the GPU busy with fewer "
            "partitions of K"
        )
    if c.cluster_k > 1 and (
        tiles * (c.cluster_k - 1) >= resident * c.cluster_k
        or 2 * c.cluster_k * c.tile_k > problem.K
    ):
        return (
            f"cluster_k is {c.cluster_k}, expected less: {tiles} tiles keep the GPU busy with "
            "fewer partitions of K"
        )
    if c.stream_k and (tiles <= resident or tiles % resident == 0):
        return f"stream_k is True, expected False: {tiles} tiles leave no partly filled wave"
    if tiles <= resident and c.pingpong:
        return f"pingpong is True, expected False: {tiles} tiles run at once, and no CTA has two"
    return None


class _OfProblem(NamedTuple):
    """What the footprint of a config depends on besides the config.

    Attributes:
        mean_tile_n: the mean width of tiles of variable width, else 0.
        cache_lines: the cache lines that loads request per 128 contiguous bytes of A, and of B.
        straddles_lines: whether tiles begin inside cache lines.
    """

    mean_tile_n: int
    cache_lines: tuple[int, int]
    straddles_lines: bool


class Footprints:
    """The footprints of configs for a problem, in its rows and columns."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._row_major = with_row_major_output(problem)[0]
        self._cache_lines = operand_copies.cache_lines_per_row(problem)
        self._contiguous = operand_copies.contiguous_columns(problem)
        self._usual = _OfProblem(0, self._cache_lines, False)

    def key(self, c: HopperConfig) -> _OfProblem:
        """Returns what the footprint of a config depends on besides the config."""
        mean_tile_n = 0
        if c.variable_tile_n:
            N = self._problem.M if c.swap_ab else self._problem.N
            mean_tile_n = -(-N // tile_order.columns(c, N))
        elif not self._contiguous[c.swap_ab]:
            return self._usual
        return _OfProblem(mean_tile_n, self._requested_lines(c), self._straddles_lines(c))

    def of(self, c: HopperConfig) -> Footprint:
        """Describes the resources that a config uses on a GPU."""
        key = self.key(c)
        as_computed = replace(
            footprint_of(c, c.consumers + 1, persistent=True),
            tile_n=key.mean_tile_n or c.tile_n,
            split_k=c.split_k,
            stream_k=c.stream_k,
            cluster_k=c.cluster_k,
            pingpong=c.pingpong,
            gpc_local=c.gpc_local and not c.split,
            cache_lines=key.cache_lines,
            straddles_lines=key.straddles_lines,
        )
        if not c.swap_ab:
            return as_computed
        return replace(
            as_computed,
            tile_m=as_computed.tile_n,
            tile_n=as_computed.tile_m,
            cluster_m=as_computed.cluster_n,
            cluster_n=as_computed.cluster_m,
        )

    def _straddles_lines(self, c: HopperConfig) -> bool:
        """Returns whether tiles begin inside cache lines: their columns are contiguous in memory,
        and their width is no multiple of a line.
        """
        N = self._row_major.M if c.swap_ab else self._row_major.columns
        if not self._contiguous[c.swap_ab] or tile_order.columns(c, N) == 1:
            return False
        itemsize = self._problem.dtype.itemsize
        return any(width * itemsize % LINE for width in tile_order.widths(c, N))

    def _requested_lines(self, c: HopperConfig) -> tuple[int, int]:
        """Returns the cache lines that loads request per 128 contiguous bytes of A, and of B."""
        if not self._contiguous[c.swap_ab]:
            return self._cache_lines
        lines_a, lines_b = self._cache_lines
        lines = operand_copies.lines_of_columns(c)
        return (max(lines_a, lines), lines_b) if c.swap_ab else (lines_a, max(lines_b, lines))

"""The limits of 32-bit integers. Kernels in the CuTe DSL use Int32 for sizes, coordinates and
counters; strides and addresses have 64 bits.

These numbers must fit into 32 bits (the modules in parentheses compute them):

- extents of A, B and C, their longest batch dimension, and coordinates up to the end of the last
  cluster tile, which may overhang; for tiles of variable width the larger width counts
  (`gemm.kernel`, `gemm.tile_scheduler`);
- the tiles of all matrices of a launch, times the partitions of K, plus one more round of clusters
  (`gemm.tile_scheduler`);
- k tiles: times a CTA's rank with `cluster_k`, times the partitions with `split_k`, times the
  clusters, twice, with `stream_k` (`gemm.tile_scheduler`);
- partial sums of all partitions (`gemm.splitk_reduce`); with `stream_k` they are two tiles per CTA,
  and always fit.
"""

from outblas.call.problem import Problem
from outblas.hopper.parts import tile_order
from outblas.hopper.parts.config import HopperConfig

INT32 = 1 << 31
# limit of numbers that are rounded up to cluster tiles, or to a round of clusters
LARGEST = INT32 - 2048
CLUSTERS = 132  # of the largest sm_90 GPU, with a margin
MOST_K_TILES = INT32 // CLUSTERS**2 // 2  # with stream_k
MOST_SUMS = INT32  # fp32 partial sums over all partitions


def extents(problem: Problem) -> str | None:
    """Returns why no kernel supports these sizes, or None. K must not be 0, because consumers would
    wait for ever for a k tile.
    """
    if problem.K < 1:
        return f"it needs K of at least 1, but was given K = {problem.K}"
    if max(problem.M, problem.columns, problem.K) > LARGEST:
        return (
            f"it supports extents up to {LARGEST}, but was given "
            f"{problem.M}x{problem.columns}x{problem.K}"
        )
    if matrices(problem) > LARGEST:
        return f"it supports batches of up to {LARGEST} matrices, but was given {matrices(problem)}"
    return None


def matrices(problem: Problem) -> int:
    """Returns the number of matrices in one launch: the longest batch dimension. The host loops
    over the others.
    """
    return max(problem.batch, default=1)


def tiles(problem: Problem, config: HopperConfig) -> str | None:
    """Returns why a kernel cannot count the tiles of this config, or None. `problem` is the problem
    that the kernel computes, after any swap of operands.
    """
    rows, columns = tile_order.cluster_tiles(config, problem.M, problem.columns)
    k_tiles = -(-problem.K // config.tile_k)
    partitions = min(config.split_k, k_tiles)
    ends = rows * config.cluster_m * config.tile_m, columns * config.cluster_n * config.tile_n
    if max(ends) >= INT32:
        return (
            f"its tiles may reach row and column {INT32 - 1}, but would reach {ends[0]} "
            f"and {ends[1]}"
        )
    if config.stream_k and k_tiles > MOST_K_TILES:
        return f"stream_k supports up to {MOST_K_TILES} k tiles, but was given K = {problem.K}"
    if config.split_k > 1:
        ctas = rows * columns * config.cluster * matrices(problem)
        sums = ctas * partitions * config.tile_m * config.tile_n
        if sums >= MOST_SUMS or partitions * k_tiles >= INT32:
            return (
                f"split_k supports up to {MOST_SUMS} partial sums and 32-bit k tiles, but "
                f"was given {sums} partial sums"
            )
    if (count := rows * columns * matrices(problem) * partitions) > LARGEST:
        return f"it supports up to {LARGEST} cluster tiles, but was given {count}"
    if config.cluster_k * k_tiles >= INT32:
        return (
            f"cluster_k supports up to {INT32 // config.cluster_k} k tiles, but was given K = "
            f"{problem.K}"
        )
    return None

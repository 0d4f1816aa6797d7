"""The limits of 32 bits: kernels of CuTe DSL have Int32 for sizes, coordinates, and whatever they
count. Strides and addresses have 64.

The numbers that must fit, and where the production kernel makes them:

- extents of A, B and C, their longest batch dimension, and coordinates up to the end of the last
  cluster tile, which may overhang; tiles of variable width count as if all were of the larger
  (`gemm.kernel`, `gemm.tile_scheduler`);
- tiles of all matrices of a launch, times the partitions of K, and one more round of clusters
  (`gemm.tile_scheduler`);
- k tiles: times a CTA's rank with `cluster_k`, times the partitions with `split_k`, times the
  clusters, twice, with `stream_k` (`gemm.tile_scheduler`);
- partial sums of all partitions (`gemm.splitk_reduce`); with `stream_k` they are two tiles for each
  CTA, and always fit.
"""

from ...core.problem import Problem
from . import tile_order
from .config import HopperConfig

INT32 = 1 << 31
LARGEST = INT32 - 2048  # of what is rounded up to cluster tiles, or to a round of clusters
CLUSTERS = 132  # of the largest sm_90, with room for a few more
MOST_K_TILES = INT32 // CLUSTERS**2 // 2  # in stream_k
MOST_SUMS = INT32  # fp32 of all partitions


def extents(problem: Problem) -> str | None:
    """Why no kernel can take these sizes. Without a k tile consumers would wait for one for
    ever.
    """
    if problem.K < 1:
        return f"it takes K from 1 on, but was given K = {problem.K}"
    if max(problem.M, problem.columns, problem.K) > LARGEST:
        return (
            f"it takes extents up to {LARGEST}, but was given "
            f"{problem.M}x{problem.columns}x{problem.K}"
        )
    if matrices(problem) > LARGEST:
        return f"it takes batches of up to {LARGEST} matrices, but was given {matrices(problem)}"
    return None


def matrices(problem: Problem) -> int:
    """The matrices of one launch: those of the longest batch dimension. The host loops over the
    others.
    """
    return max(problem.batch, default=1)


def tiles(problem: Problem, config: HopperConfig) -> str | None:
    """Why a kernel cannot count the tiles of this config, of a problem as the kernel computes
    it."""
    rows, columns = tile_order.cluster_tiles(config, problem.M, problem.columns)
    k_tiles = -(-problem.K // config.tile_k)
    partitions = min(config.split_k, k_tiles)
    ends = rows * config.cluster_m * config.tile_m, columns * config.cluster_n * config.tile_n
    if max(ends) >= INT32:
        return (
            f"its tiles may end {INT32 - 1} rows and columns from the first, and would "
            f"{ends[0]} and {ends[1]}"
        )
    if config.stream_k and k_tiles > MOST_K_TILES:
        return f"stream_k takes up to {MOST_K_TILES} k tiles, but was given K = {problem.K}"
    if config.split_k > 1:
        ctas = rows * columns * config.cluster * matrices(problem)
        sums = ctas * partitions * config.tile_m * config.tile_n
        if sums >= MOST_SUMS or partitions * k_tiles >= INT32:
            return (
                f"split_k takes up to {MOST_SUMS} partial sums of K, and k tiles in 32 bits, and "
                f"was given {sums}"
            )
    if (count := rows * columns * matrices(problem) * partitions) > LARGEST:
        return f"it takes up to {LARGEST} cluster tiles, but was given {count}"
    if config.cluster_k * k_tiles >= INT32:
        return (
            f"cluster_k takes up to {INT32 // config.cluster_k} k tiles, but was given K = "
            f"{problem.K}"
        )
    return None

"""The form in which hopper.gemm computes a problem: which product, which batch dimension, which
strides; and how many clusters are launched for it, with which memory for partial sums.
"""

from dataclasses import replace

import pytest
import torch
from support.gemm_problems import (
    BF16,
    OWN_CONFIG,
    SMALL_TILE,
    gemm_config,
    problem_of,
    product,
    strided,
    variant_of,
)

from outblas.call.problem import Problem, problem, transposed
from outblas.hopper.gemm import canonical, schedule
from outblas.hopper.parts import tile_order


@pytest.mark.parametrize("swap_ab", [False, True], ids=["own order", "swapped"])
@pytest.mark.parametrize("c_by_columns", [False, True], ids=["C by rows", "C by columns"])
def test_the_transposed_product_is_computed_for_one_of_two_reasons(
    c_by_columns: bool, swap_ab: bool
) -> None:
    """C^T = B^T A^T is computed where C lies by columns, and where the config swaps the operands;
    the two undo each other.
    """
    out = torch.empty(128, 64, dtype=BF16, device="meta").t() if c_by_columns else None
    given = problem_of(strided((64, 256), (256, 1)), strided((256, 128), (1, 256)), out)
    config = replace(OWN_CONFIG, swap_ab=swap_ab)

    product, is_transposed = canonical.orient(given, config)
    traits = variant_of(given, config).traits

    assert is_transposed == (swap_ab != c_by_columns)
    assert product == (transposed(given) if is_transposed else given)
    assert (traits.by_columns, traits.staged, traits.width) == (swap_ab, True, 8)


# ---- batches: a launch walks the longest dimension, and starts where the others say
THREE_BATCH_DIMENSIONS = replace(
    product(64, 64, 64),
    batch=(2, 7, 3),
    a=(9, 8, 0, 64, 1),
    b=(0, 24, 7, 1, 64),
    out=(1, 2, 3, 64, 1),
)


def test_a_launch_walks_the_longest_batch_dimension() -> None:
    given = THREE_BATCH_DIMENSIONS
    launch, batch_dim = canonical.single_batch(given)

    assert (batch_dim, launch.batch) == (1, (7,))
    assert (launch.a, launch.b, launch.out) == ((8, 64, 1), (24, 1, 64), (2, 64, 1))
    offsets = [canonical.batch_offset(t, (1, 2), batch_dim) for t in (given.a, given.b, given.out)]
    assert offsets == [9 + 2 * 0, 2 * 7, 1 + 2 * 3]


def test_every_launch_of_a_batch_has_the_alignment_that_is_promised() -> None:
    """The stride that is walked launch by launch, 20481 elements, leaves C at odd addresses."""
    a = torch.empty(2, 1, 64, 64, dtype=BF16)
    b = torch.empty(1, 5, 64, 64, dtype=BF16)
    out = strided((2, 5, 64, 64), (20481, 4096, 64, 1))

    launch, batch_dim = canonical.single_batch(problem(a, b, out))

    assert (batch_dim, launch.batch) == (1, (5,))
    assert launch.alignment[2] == 2


# ---- the launch
@pytest.mark.parametrize(
    ("M", "N", "grid"),
    [(1, 1, (1, 1)), (256, 64, (1, 1)), (257, 64, (2, 1)), (511, 65, (2, 2)), (513, 129, (3, 3))],
)
def test_the_grid_of_cluster_tiles_covers_c_and_no_more(
    M: int, N: int, grid: tuple[int, int]
) -> None:
    config = replace(OWN_CONFIG, tile_m=128, tile_n=64, cluster_m=2, cluster_n=1)

    assert tile_order.cluster_tiles(config, M, N) == grid


TILE, SMALL = 64 * 16, f"{SMALL_TILE},tile_n=16"  # outputs
TWELVE = product(4 * 64, 3 * 16, 4096)  # tiles of 64 k tiles
# A problem, a config, the clusters of its launch, and its fp32 sums and counters.
LAUNCHES: dict[str, tuple[Problem, str, int, tuple[int, int] | None]] = {
    "whole tiles": (product(64, 64, 4096), SMALL, 4, None),
    # Each tile has 4 partitions of K, each of them a cluster.
    "split-K": (TWELVE, f"{SMALL},split_k=4,k_serpentine=False", 48, (48 * TILE, 12)),
    # They are fewer than the clusters, so all of them are cut.
    "stream-K": (
        TWELVE,
        f"{SMALL},stream_k=True,k_serpentine=False",
        132,
        ((132 + 12) * TILE, 12),
    ),
    # Each warpgroup of a cluster has counters and sums of its own: of two consumers of two CTAs.
    "clusters": (
        product(512, 128, 4096),
        "tile_n=64,cluster_m=2,split_k=4,k_serpentine=False",
        16,
        (4 * 4 * 256 * 64, 4 * 4),
    ),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launch_has_room_for_the_partial_sums_of_its_clusters(name: str) -> None:
    """A CTA's sums for each partition, and a counter for each tile that has several."""
    given, text, clusters, room = LAUNCHES[name]
    config = gemm_config(text)
    grid = schedule.tile_grid(given, config)

    launched = schedule.launched_clusters(given, config, grid, resident=132)
    workspace = schedule.workspace_size(config, grid, launched)

    assert (launched, workspace) == (clusters, room)

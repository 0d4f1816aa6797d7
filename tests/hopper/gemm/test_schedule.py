"""How many clusters of hopper.gemm are launched, and the room that they have for partial sums."""

from typing import NamedTuple

import pytest
from support.gemm_problems import SMALL_TILE, gemm_config, product

from outblas.core.problem import Problem
from outblas.hopper.gemm import schedule

TILE = 64 * 16  # outputs


class Launch(NamedTuple):
    """A problem and the partitions of its K, with the launch that they need on a GPU of 132
    clusters.
    """

    problem: Problem
    partitions: str
    clusters: int
    workspace: tuple[int, int] | None  # fp32 sums and counters


LAUNCHES = {
    "whole tiles": Launch(product(64, 64, 4096), "", 4, None),
    # Each of the 4 x 3 tiles has 4 partitions of K, each of them a cluster.
    "split-K": Launch(
        product(4 * 64, 3 * 16, 4096), "split_k=4,k_serpentine=False", 48, (48 * TILE, 12)
    ),
    # 12 tiles of 64 k tiles are fewer than the clusters, so all of them are cut.
    "stream-K": Launch(
        product(4 * 64, 3 * 16, 4096),
        "stream_k=True,k_serpentine=False",
        132,
        ((132 + 12) * TILE, 12),
    ),
}


@pytest.mark.parametrize("case", LAUNCHES.values(), ids=LAUNCHES)
def test_a_launch_has_room_for_the_partial_sums_of_its_clusters(case: Launch) -> None:
    """A CTA's sums for each partition, and a counter for each tile that has several."""
    config = gemm_config(f"{SMALL_TILE},tile_n=16,{case.partitions}")
    grid = schedule.tile_grid(case.problem, config)

    clusters = schedule.launched_clusters(case.problem, config, grid, resident=132)
    workspace = schedule.workspace_size(config, grid, clusters)

    assert clusters == case.clusters
    assert workspace == case.workspace

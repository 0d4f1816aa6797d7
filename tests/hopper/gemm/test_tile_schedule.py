"""How the host shares out the tiles of a launch: the grid, and the memory for partial sums."""

from dataclasses import replace

import pytest
import torch

from outblas.core.artifact import example
from outblas.hopper import gemm
from outblas.hopper.gemm import schedule
from outblas.hopper.parts import tile_order

CONFIG = replace(gemm.Config(), tile_m=128, tile_n=64, cluster_m=2, cluster_n=1)


@pytest.mark.parametrize(
    ("M", "N", "grid"),
    [
        (1, 1, (1, 1)),
        (256, 64, (1, 1)),
        (257, 64, (2, 1)),
        (511, 65, (2, 2)),
        (513, 129, (3, 3)),
    ],
)
def test_the_grid_of_cluster_tiles_covers_c_and_no_more(M: int, N: int, grid) -> None:
    """Cluster tiles of 256x64 outputs."""
    assert tile_order.cluster_tiles(CONFIG, M, N) == grid


def test_each_warpgroup_of_a_cluster_has_counters_and_sums_of_its_own() -> None:
    config = replace(CONFIG, consumers=2, split_k=4)
    problem = example(torch.bfloat16, None, "nt", (512, 128, 4096))
    tiles = 2 * 2
    warpgroups = 2 * 2  # CTAs of a cluster, and consumers that share the tile of each

    size = schedule.workspace_size(config, schedule.tile_grid(problem, config), launched=16)

    assert size.counters == tiles * warpgroups
    assert size.floats == tiles * 4 * 256 * 64

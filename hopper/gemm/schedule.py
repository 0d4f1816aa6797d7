"""The schedule of a `hopper.gemm` launch: how many tiles there are, how many clusters are launched
for them, and in which order the clusters compute them.
"""

import math
from typing import NamedTuple

import torch

from outblas.call.problem import Problem
from outblas.hopper.gemm import gpc_placement
from outblas.hopper.gemm.traits import KernelTraits
from outblas.hopper.parts import tile_order
from outblas.hopper.parts.config import WARPGROUP, HopperConfig


class TileGrid(NamedTuple):
    """The cluster tiles of a launch: `rows` × `columns` for each of `matrices`. Each tile is split
    along K into `partitions`, according to split_k.
    """

    rows: int
    columns: int
    matrices: int
    partitions: int

    @property
    def tiles_of_matrix(self) -> int:
        return self.rows * self.columns

    @property
    def tiles(self) -> int:
        return self.tiles_of_matrix * self.matrices

    @property
    def work_tiles(self) -> int:
        """The partitions of all tiles, which clusters process one after the other."""
        return self.tiles * self.partitions


class TileSchedule(NamedTuple):
    """The schedule with which a grid is launched.

    clusters: how many are launched.
    workspace: the fp32 sums and int32 counters that they need for partial sums of K, None where
        each tile is computed by one CTA.
    table: the order of the tiles on the GPU, int32, None where CTAs compute it themselves.
    placement: may provide a better table later (`gpc_placement`), None where `table` is final.
    """

    grid: TileGrid
    clusters: int
    workspace: tuple[int, int] | None
    table: torch.Tensor | None
    placement: gpc_placement.Placement | None = None


def tile_grid(problem: Problem, config: HopperConfig) -> TileGrid:
    """Returns the grid of a launch's problem (`CanonicalProblem.launch`)."""
    rows, columns = tile_order.cluster_tiles(config, problem.M, problem.columns)
    k_tiles = -(-problem.K // config.tile_k)
    return TileGrid(rows, columns, math.prod(problem.batch), min(config.split_k, k_tiles))


def tile_schedule(
    problem: Problem,
    config: HopperConfig,
    grid: TileGrid,
    traits: KernelTraits,
    resident: int,
) -> TileSchedule:
    """Returns the schedule of a launch's problem; makes its table on the GPU. `resident`: how many
    clusters run at the same time (`tile_order.clusters`).
    """
    launched = launched_clusters(problem, config, grid, resident)
    workspace = workspace_size(config, grid, launched)
    if not traits.ordered:
        return TileSchedule(grid, launched, workspace, None)
    if traits.single_wave:
        placement = gpc_placement.Placement(
            config, grid.rows * grid.matrices, grid.columns, problem.device
        )
        return TileSchedule(grid, launched, workspace, placement.table, placement)
    # The table of "consecutive" depends on the number of clusters. With the other orders only the
    # ends of the table's rows depend on it, so one table for all resident clusters serves every
    # launch.
    width = launched if config.order == "consecutive" else resident
    table = tile_order.tiles(config, grid.rows, grid.columns, width, problem.device)
    return TileSchedule(grid, launched, workspace, table)


def launched_clusters(problem: Problem, config: HopperConfig, grid: TileGrid, resident: int) -> int:
    """Returns how many clusters are launched: no more than have work."""
    k_tiles = -(-problem.K // config.tile_k)
    work = grid.tiles * k_tiles if config.stream_k else grid.work_tiles
    launched = min(resident, work)
    return launched if config.split else tile_order.balance_waves(launched, grid.tiles)


def workspace_size(config: HopperConfig, grid: TileGrid, launched: int) -> tuple[int, int] | None:
    """Returns `TileSchedule.workspace`. With stream_k only the tiles of the last wave are split."""
    if not config.split:
        return None
    cut_tiles = grid.tiles % launched if config.stream_k else grid.tiles
    places = launched + cut_tiles if config.stream_k else grid.work_tiles
    warpgroups = config.cluster * config.warpgroups_per_tile
    floats = places * warpgroups * config.accumulator_registers * WARPGROUP
    return floats, max(cut_tiles, 1) * warpgroups

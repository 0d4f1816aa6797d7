"""The scheduler and the loader of groups, with which a `Gemm` computes the product of each group.
Roles, barriers and timelines are those of `kernel.Gemm`.

Ragged rows: C[m, :] = A[m, :] B[g] for the rows m of each group g. A tile that ends before its
group does is stored by TMA. Of the last tile of a group, and of every tile where rows are
scattered, the threads of a consumer copy single rows from its buffers (`gemm.row_stores`), between
the same waits and barriers; x, which is not scattered, is stored as C is otherwise. Rows of the
residual that are the next group's are loaded and not used.

Ragged columns are the ragged rows of the transposed product, whose columns are contiguous: they
begin at any address, and each thread stores its registers up to the end of the group.

Ragged terms: C[g] = A[:, k] B[k, :] over the terms k of each group g. The k tile in which a group
ends is loaded first, and the consumers clear what is not the group's (`gemm.term_mask`): all of
them wait for its stage, write zeros, fence, and synchronise at ALL_CONSUMERS before they multiply.

Where clusters turn, a CTA takes for each work tile either its own rows of A and a part of B for
both, or a part of A for both and its own columns of B. Each CTA's stages are written by both in
either case, as many bytes, so arrivals and waits are the same.

Rows that an index chooses are copied by two more warps, as `gather` describes.

fp8 operands have scales that vary along K (`gemm.block_scales`), of which each work tile reads its
group's. Their groups of terms have whole k tiles, whose 128 terms share scales, so that nothing is
cleared; a group without terms has no k tile, and its sums stay zero.

The arguments of a launch. `table` holds the ends of groups, int32 (groups), or the numbers of their
rows where M / groups rows have room in each. Ragged rows: a (M, K), b (groups, K, N), c (M, N).
Ragged terms: a (M, K), b (K, N), c (groups, M, N). bias is (groups, N), residual and aux are as c;
for gated pairs b, bias and aux have twice as many columns. With an `a_index` a may have any number
of rows. scale_a is fp32 (M, blocks of K), or (groups, rows, blocks of K) where groups have places
of their own; scale_b is fp32 (groups, blocks of K, blocks of columns), or with ragged terms (blocks
of K, columns).
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from outblas.hopper.gemm import gather, group_scheduler
from outblas.hopper.gemm.config import grouped_reason
from outblas.hopper.gemm.group_scheduler import GroupedParams, GroupedScheduler, GroupedWorkTile
from outblas.hopper.gemm.kernel import Gemm
from outblas.hopper.gemm.pipeline import GroupPipeline
from outblas.hopper.gemm.records import ClusterCoord, Cta, TmaTensor
from outblas.hopper.gemm.tma_load import (
    DenseTiles,
    WorkTileLoad,
    load_of_columns,
    multicast_operations,
    partition,
    smem_tensor,
)
from outblas.hopper.gemm.traits import KernelTraits
from outblas.hopper.parts.config import WARPGROUP, HopperConfig
from outblas.hopper.parts.records import WarpContext, WarpRole


@dataclass(frozen=True)
class GroupedLoads:
    """The loads of A and B by the CTA. Tiles of both begin at any row or column, so both are
    partitioned for each work tile. The names are those of `gemm.records.OperandLoads`. `stages`
    points to the memory of all stages.
    """

    operand_a: TmaTensor
    operand_b: TmaTensor
    sA: Any
    sB: Any
    multicast_a: int
    multicast_b: int
    stages: Any


@dataclass(frozen=True)
class GroupedTiles:
    """The scheduler and the loader of groups, in the place of `tma_load.DenseTiles`.

    Before the CTA synchronises, the schedule is written to shared memory; no warp reads it earlier,
    and nobody writes it again.
    """

    config: HopperConfig
    traits: KernelTraits

    writes_schedule = True

    def __post_init__(self) -> None:
        if reason := grouped_reason(self.config):
            raise ValueError(f"config: {reason}")

    @property
    def pipeline_type(self) -> type[GroupPipeline]:
        dense = DenseTiles(self.config, self.traits)
        return gather.GatherPipeline if self.traits.gathers else dense.pipeline_type

    @property
    def announced_bytes(self) -> int:
        if self.traits.gathers:  # TMA loads B alone
            return self.config.stage_n * self.config.tile_k * 2
        return self.config.stage_bytes

    @cute.jit
    def make_schedule(
        self, a, b, c, majors: cutlass.Constexpr, offs, a_index, partitions, clusters
    ):
        """Host: returns the schedule for A (M, K) and C (M, N[, groups])."""
        config, traits = self.config, self.traits
        stored = config.epilogue_config(traits.gated)
        rows = cute.ceil_div(c.shape[0], config.tile_m * config.cluster_m)
        columns = cute.ceil_div(c.shape[1], stored.tile_n * config.cluster_n)
        by_columns, by_matrix, by_band = (
            cute.fast_divmod_create_divisor_v2(divisor)
            for divisor in (columns, rows * columns, columns * group_scheduler.band(config))
        )
        extent = a.shape[0]
        if cutlass.const_expr(traits.divides_terms):
            extent = a.shape[1] * (2 if traits.formats else 1)
        if cutlass.const_expr(traits.gathers):
            extent = a_index.shape[0]
        return GroupedParams(
            offs,
            extent,
            rows,
            columns,
            by_columns,
            by_matrix,
            by_band,
            cute.ceil_div(a.shape[1], config.tile_k),
            clusters,
            a if traits.gathers else None,
            a_index,
            extent // offs.shape[0] if traits.masked else None,
            turned(config, traits).load_operands(a, b, *majors) if traits.turns else None,
            None,
        )

    @cute.jit
    def begin_schedule(self, smem, params: GroupedParams, context: WarpContext):
        """Makes the schedule in shared memory."""
        config, traits = self.config, self.traits
        if cutlass.const_expr(traits.turns):
            prefetch_descriptors(params.turned, context)
        table = cute.make_tensor(smem.allocate_array(Int32, traits.capacity), traits.capacity)
        params = params._replace(table=table)
        if cutlass.const_expr(traits.divides_terms):
            threads = WARPGROUP * (1 + config.consumers)
            group_scheduler.make_order(params, context.thread, threads, traits.capacity)
        elif context.warp == WarpRole.MMA:
            group_scheduler.make_tile_counts(params, config, traits)
        return params

    def make_scheduler(self, params, cluster, coord: ClusterCoord, table_entry) -> GroupedScheduler:
        return GroupedScheduler(params, cluster, coord, self.traits)

    def make_loads(self, operand_a, operand_b, stages, dtype, coord: ClusterCoord) -> GroupedLoads:
        (_, multicast_a), (_, multicast_b) = multicast_operations(self.config)
        bytes_a = cute.size_in_bytes(dtype, operand_a.layout)
        return GroupedLoads(
            TmaTensor(operand_a.atom, operand_a.tensor),
            TmaTensor(operand_b.atom, operand_b.tensor),
            smem_tensor(stages, dtype, operand_a.layout),
            smem_tensor(stages + bytes_a, dtype, operand_b.layout),
            multicast_a,
            multicast_b,
            stages,
        )

    def load_of_a(self, cta: Cta, work: GroupedWorkTile) -> WorkTileLoad:
        if self.traits.gathers:
            return WorkTileLoad(None, (), None)  # others copy A
        return self.turning_load(cta, work, load_of_a)

    def load_of_b(self, cta: Cta, work: GroupedWorkTile) -> WorkTileLoad:
        return self.turning_load(cta, work, load_of_b)

    def turning_load(self, cta: Cta, work: GroupedWorkTile, load_of: Any) -> WorkTileLoad:
        """Returns the load of an operand, and where clusters turn that of a turned one with it."""
        load: WorkTileLoad = load_of(cta, work)
        if not self.traits.turns:
            return load
        across = load_of(turned_cta(cta, self.traits), work)
        return load._replace(across=across, turned=work.turned)


def turned(config: HopperConfig, traits: KernelTraits) -> Gemm:
    """Returns the kernel whose clusters of 1×2 load what a cluster of 2×1 does when it turns."""
    config, traits = replace(config, cluster_m=1, cluster_n=2), replace(traits, turns=False)
    return Gemm(config, traits, GroupedTiles(config, traits))


def turned_cta(cta: Cta, traits: KernelTraits) -> Cta:
    """Returns the CTA as one of a cluster that is turned."""
    kernel = turned(cta.config, traits)
    (_, multicast_a), (_, multicast_b) = multicast_operations(kernel.config)
    operand_a, operand_b = (
        TmaTensor(operand.atom, operand.tensor) for operand in cta.scheduler.params.turned
    )
    loads = replace(
        cta.loads,
        operand_a=operand_a,
        operand_b=operand_b,
        multicast_a=multicast_a,
        multicast_b=multicast_b,
    )
    return replace(cta, coord=kernel.cluster_coord(cta.context), loads=loads)


@cute.jit
def prefetch_descriptors(operands, context: WarpContext):
    """One warp fetches the TMA descriptors of operands."""
    if context.warp == WarpRole.MMA:
        for operand in cutlass.range_constexpr(len(operands)):
            cpasync.prefetch_descriptor(operands[operand].atom)


def load_of_a(cta: Cta, work: GroupedWorkTile) -> WorkTileLoad:
    """Returns the load of A by a CTA at its place in the cluster."""
    loads, config, coord = cta.loads, cta.config, cta.coord
    parts = partition(
        loads.operand_a,
        loads.sA,
        (config.tile_m, config.tile_k),
        (work.row, work.first_term),
        coord.cta_n_in_cluster,
        loads.multicast_a,
    )
    return WorkTileLoad(loads.operand_a.atom, (parts,), coord.mask_a)


def load_of_b(cta: Cta, work: GroupedWorkTile) -> WorkTileLoad:
    """Returns the load of B by a CTA at its place in the cluster."""
    has_matrices = not cta.scheduler.traits.divides_terms
    return load_of_columns(cta, (work.column, work.first_term), (work.matrix,) * has_matrices)

"""Loads k tiles into the pipeline. One warp loads A and another B, because each TMA load keeps a
warp busy for 150 cycles.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from outblas.hopper.gemm import scale_loads
from outblas.hopper.gemm.pipeline import GroupPipeline
from outblas.hopper.gemm.records import ClusterCoord, Cta, OperandLoads, TmaTensor
from outblas.hopper.gemm.tile_scheduler import (
    FastDivmods,
    ScheduleParams,
    TileScheduler,
    WorkTile,
)
from outblas.hopper.gemm.traits import KernelTraits
from outblas.hopper.parts.config import HopperConfig
from outblas.hopper.parts.pipeline import PipelineState
from outblas.hopper.parts.records import WarpContext


class WorkTileLoad(NamedTuple):
    """An operand of one work tile: its TMA atom; for each part of its k tiles the shared tensor
    (TMA, STAGE) and the global tensor (TMA, RestK); the mask of the CTAs that receive it.

    across: where clusters may turn (`hopper.grouped`), the WorkTileLoad of a turned one; else None.
    turned: 1 where the cluster is turned.
    """

    atom: Any
    parts: Any
    mask: Any
    across: Any = None
    turned: Any = None


def multicast_operations(config: HopperConfig):
    """Returns the TMA operations that load A and B, each with the number of CTAs that load a part
    of the same tile: those of a row of the cluster for A, of a column for B.
    """
    one, many = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileG2SMulticastOp()
    return tuple((many if n > 1 else one, n) for n in (config.cluster_n, config.cluster_m))


@dataclass(frozen=True)
class DenseTiles:
    """The scheduler and the loader of a product that is not divided among groups. What a `Gemm`
    asks of them, those of groups (`group_kernel.GroupedTiles`) answer as well.
    """

    config: HopperConfig
    traits: KernelTraits

    writes_schedule = False  # to shared memory

    @property
    def pipeline_type(self) -> type[GroupPipeline]:
        """The pipeline over the stages."""
        if not self.traits.block_scaled:
            return GroupPipeline
        kinds = scale_loads.CopiedScalesPipeline, scale_loads.ScaledPipeline
        return kinds[self.traits.wide_scales]

    @property
    def announced_bytes(self) -> int:
        """The bytes that TMA loads for a stage."""
        return self.config.stage_bytes

    @cute.jit
    def make_schedule(
        self, a, b, c, majors: cutlass.Constexpr, table, a_index, partitions, clusters
    ):
        """Host: returns the schedule for A (M, K[, L]) and C (M, N[, L])."""
        config, traits = self.config, self.traits
        tiles_m = cute.ceil_div(c.shape[0], config.tile_m * config.cluster_m)
        wide, columns = (
            Int32(0),
            cute.ceil_div(c.shape[1] * (2 if traits.gated else 1), config.tile_n),
        )
        if cutlass.const_expr(config.variable_tile_n):
            columns = c.shape[1] // (config.tile_n - 8)
            columns += 1 if columns * config.tile_n < c.shape[1] else 0
            wide = cutlass.min(
                cute.ceil_div(cutlass.max(c.shape[1] - columns * (config.tile_n - 8), 0), 8),
                columns,
            )
        tiles_n = cute.ceil_div(columns, config.cluster_n)
        matrices = c.shape[2] if cutlass.const_expr(traits.batched) else Int32(1)
        tiles = tiles_m * tiles_n * matrices
        k_tiles = cute.ceil_div(a.shape[1], config.tile_k)
        line = tiles_n if cutlass.const_expr(traits.ordered) else tiles_m
        divmods = FastDivmods(
            *(
                cute.fast_divmod_create_divisor_v2(divisor)
                for divisor in (line, tiles_m * tiles_n, clusters, partitions)
            )
        )
        return ScheduleParams(divmods, tiles, wide, k_tiles, table, partitions, clusters)

    def begin_schedule(self, smem, schedule: ScheduleParams, context: WarpContext):
        """Prepares the schedule before the CTA synchronises; this one is as the host made it."""
        return schedule

    def make_scheduler(self, params, cluster, coord: ClusterCoord, table_entry) -> TileScheduler:
        """Returns the scheduler of this CTA's work."""
        return TileScheduler(
            params,
            cluster,
            coord,
            table_entry,
            columns=self.config.tile_n // (2 if self.traits.gated else 1),
            batched=self.traits.batched,
            single_wave=self.traits.single_wave,
        )

    def make_loads(self, operand_a, operand_b, stages, dtype, coord: ClusterCoord) -> OperandLoads:
        """Returns the loads of the CTA. A is partitioned here, B for each work tile."""
        config = self.config
        (_, multicast_a), (_, multicast_b) = multicast_operations(config)
        sA = smem_tensor(stages, dtype, operand_a.layout)
        bytes_a = cute.size_in_bytes(dtype, operand_a.layout)
        sB = smem_tensor(stages + bytes_a, dtype, operand_b.layout)
        gA = cute.local_tile(
            operand_a.tensor,
            (config.tile_m, config.tile_k),
            (None,) * cute.rank(operand_a.tensor),
        )  # (bM, bK, RestM, RestK[, L])
        tAsA, tAgA = cpasync.tma_partition(
            operand_a.atom,
            coord.cta_n_in_cluster,
            cute.make_layout(multicast_a),
            cute.group_modes(sA, 0, 2),
            cute.group_modes(gA, 0, 2),
        )
        target = TmaTensor(operand_b.atom, operand_b.tensor)
        return OperandLoads(operand_a.atom, tAsA, tAgA, target, sB, multicast_b)

    def load_of_a(self, cta: Cta, work: WorkTile) -> WorkTileLoad:
        """Returns the load of this CTA's rows of A for a work tile."""
        loads = cta.loads
        source = (
            loads.tAgA[None, work.m, None, work.matrix]
            if self.traits.batched
            else loads.tAgA[None, work.m, None]
        )
        return WorkTileLoad(loads.atom_a, ((loads.tAsA, source),), cta.coord.mask_a)

    def load_of_b(self, cta: Cta, work: WorkTile) -> WorkTileLoad:
        """Returns the load of this CTA's columns of B for a work tile; for gated pairs, of columns
        in both halves.
        """
        return load_of_columns(cta, (work.column, 0), (work.matrix,) * self.traits.batched)


def load_of_columns(cta: Cta, begin: tuple[Any, Any], matrix: tuple[Any, ...]) -> WorkTileLoad:
    """Returns the load of columns of B. `begin`: the first column and the first term. `matrix`: the
    index of the matrix, () where there is one. Gated pairs have one part per half.
    """
    loads, parts = cta.loads, 2 if cta.traits.gated else 1
    return WorkTileLoad(
        loads.operand_b.atom,
        tuple(
            partition(
                loads.operand_b,
                loads.sB,
                (cta.config.stage_n // parts, cta.config.tile_k),
                (*begin, *((part,) * (parts - 1)), *matrix),
                cta.coord.cta_m_in_cluster,
                loads.multicast_b,
                part,
            )
            for part in range(parts)
        ),
        cta.coord.mask_b,
    )


def partition(
    operand: TmaTensor,
    shared,
    box: tuple[int, int],
    at,
    cta_in_cluster,
    multicast: int,
    half: int = 0,
):
    """Returns an operand's k tiles in shared and in global memory, from `tma_partition`. `at`: the
    first row, or column, the first term, then the half of gated pairs and the matrix where the
    operand has several. `half`: the part of a stage that holds them.
    """
    first, term, *rest = at
    begins = cute.domain_offset((first, term, *(0 for _ in rest)), operand.tensor)
    return cpasync.tma_partition(
        operand.atom,
        cta_in_cluster,
        cute.make_layout(multicast),
        cute.group_modes(cute.local_tile(shared, box, (half, 0, None)), 0, 2),
        cute.group_modes(cute.local_tile(begins, box, (0, None, *rest)), 0, 2),
    )


@cute.jit
def load_k_tiles(
    load: WorkTileLoad,
    pipeline: GroupPipeline,
    state: PipelineState,
    begin: Int32,
    count: Int32,
    backwards,
    announces: cutlass.Constexpr,
    scales: scale_loads.TileScales | None = None,
):
    """One warp: loads `count` k tiles of an operand from k tile `begin` on, in reverse order where
    `backwards` is 1. Returns the state after the last. `announces`: this warp announces how many
    bytes of both operands will arrive in a stage. `scales`: those that it loads as well.
    """
    for i in cutlass.range(count, unroll=1):
        pipeline.producer_acquire(state)
        if cutlass.const_expr(announces and scales is None):
            pipeline.arrive_and_expect_tx(state)
        k_tile = begin + i + backwards * (count - 1 - 2 * i)
        if cutlass.const_expr(scales is not None):
            scale_loads.load_scales(scales, pipeline, state, k_tile)
        barrier = pipeline.producer_get_barrier(state)
        if cutlass.const_expr(load.across is None):
            load_parts(load, k_tile, state.index, barrier)
        elif load.turned == 1:
            load_parts(load.across, k_tile, state.index, barrier)
        else:
            load_parts(load, k_tile, state.index, barrier)
        state = pipeline.advance(state)
    return state


@cute.jit
def load_parts(load: WorkTileLoad, k_tile, stage, barrier):
    """Loads all parts of a k tile into a stage."""
    for part in cutlass.range_constexpr(len(load.parts)):
        target, source = load.parts[part]
        cute.copy(
            load.atom,
            source[None, k_tile],
            target[None, stage],
            tma_bar_ptr=barrier,
            mcast_mask=load.mask,
        )


def smem_tensor(pointer, dtype, layout):
    """Returns a swizzled tensor in shared memory."""
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype), layout.outer)

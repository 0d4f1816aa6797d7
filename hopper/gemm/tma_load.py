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
from outblas.hopper.gemm.tile_scheduler import ScheduleParams, TileScheduler, WorkTile
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
        return WorkTileLoad(
            cta.loads.operand_b.atom,
            partition_columns(cta, work.column, work.matrix),
            cta.coord.mask_b,
        )


def partition_columns(cta: Cta, column, matrix):
    """Returns B's k tiles from `column` on, in shared and in global memory, from `tma_partition`;
    for gated pairs one pair of tensors per half.
    """
    loads, parts = cta.loads, 2 if cta.traits.gated else 1
    box = (cta.config.stage_n // parts, cta.config.tile_k)
    layout = cute.make_layout(loads.multicast_b)
    partitions = []
    for part in range(parts):
        rest = (part,) * (parts - 1) + (matrix,) * cta.traits.batched
        from_column = cute.domain_offset((column, 0, *(0 for _ in rest)), loads.operand_b.tensor)
        gB = cute.local_tile(from_column, box, (0, None, *rest))
        sB = cute.local_tile(loads.sB, box, (part, 0, None))
        partitions.append(
            cpasync.tma_partition(
                loads.operand_b.atom,
                cta.coord.cta_m_in_cluster,
                layout,
                cute.group_modes(sB, 0, 2),
                cute.group_modes(gB, 0, 2),
            )
        )
    return partitions


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

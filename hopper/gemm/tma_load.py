"""Loads k tiles into the pipeline. One warp loads A and another B, because each TMA load keeps a
warp busy for 150 cycles.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from ..parts.pipeline import PipelineState
from . import scale_loads
from .pipeline import GroupPipeline
from .records import Cta
from .tile_scheduler import WorkTile


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


def work_tile_load_a(cta: Cta, work: WorkTile) -> WorkTileLoad:
    """Returns the load of this CTA's rows of A for a work tile."""
    loads = cta.loads
    source = (
        loads.tAgA[None, work.m, None, work.matrix]
        if cta.traits.batched
        else loads.tAgA[None, work.m, None]
    )
    return WorkTileLoad(loads.atom_a, ((loads.tAsA, source),), cta.coord.mask_a)


def work_tile_load_b(cta: Cta, work: WorkTile) -> WorkTileLoad:
    """Returns the load of this CTA's columns of B for a work tile; for gated pairs, of columns in
    both halves.
    """
    return WorkTileLoad(
        cta.loads.operand_b.atom, partition_columns(cta, work.column, work.matrix), cta.coord.mask_b
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

"""The source of the epilogue: an addend or a residual with C's layout is loaded by TMA, in
`subtiles`, into stages of the pipeline, after a tile's last k tiles.

It is loaded while the products run, and occupies memory only until it is read. A stage holds as
many subtiles, per consumer that shares the tile, as fit in its part of A and in its part of B.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from outblas.hopper.gemm.pipeline import GroupPipeline
from outblas.hopper.gemm.records import Consumer, EpilogueSource
from outblas.hopper.gemm.subtiles import (
    stages_per_tile,
    subtile_bytes,
    subtile_columns,
    subtiles,
    subtiles_per_stage,
)
from outblas.hopper.gemm.tile_scheduler import WorkTile
from outblas.hopper.gemm.views import tile_of
from outblas.hopper.parts.config import WARPGROUP
from outblas.hopper.parts.pipeline import PipelineState
from outblas.hopper.parts.records import NamedBarrier
from outblas.hopper.parts.roles import sync_consumer


def subtile_pointer(source: EpilogueSource, index, number: int):
    """Returns the address of subtile `number` in stage `index`."""
    config, size = source.config, subtile_bytes(source.epilogue_config, source.size)
    bytes_a, bytes_b = (extent * config.tile_k * 2 for extent in (config.tile_m, config.stage_n))
    in_a = bytes_a // size
    if number < in_a:
        return source.stages + (index * bytes_a + number * size)
    return source.stages + (config.stages * bytes_a + index * bytes_b + (number - in_a) * size)


# ---- the warps that load
@cute.jit
def load(
    source: EpilogueSource,
    pipeline: GroupPipeline,
    state: PipelineState,
    work: WorkTile,
    issues: cutlass.Constexpr,
):
    """One of the two loading warps, after a tile's k tiles. Returns the state after the last stage.
    `issues`: whether this warp loads the source.

    The other warp must not wait until these stages are empty. Nothing waits for that warp, so the
    stages may be filled, read and released before it looks, and it would wait for a phase that has
    already passed. It must not continue without knowing that they were empty either: by its parity
    it would mistake the previous phase for the one that it waits for next. Therefore the two warps
    synchronise.
    """
    config, epilogue_config = source.config, source.epilogue_config
    stages = stages_per_tile(config, epilogue_config, source.size)
    for number in cutlass.range_constexpr(stages):
        if cutlass.const_expr(issues):
            pipeline.producer_acquire(state)
            if cutlass.const_expr(config.variable_tile_n):
                if work.narrow == 0:
                    fill_stage(source, pipeline, state, work, config.tile_n, number)
                else:
                    fill_stage(source, pipeline, state, work, config.tile_n - 8, number)
            else:
                fill_stage(source, pipeline, state, work, epilogue_config.tile_n, number)
        state = pipeline.advance(state)
    # Not `cute.arch.barrier`, which is `bar.sync`: compute-sanitizer's synccheck reports divergent
    # threads where two warps synchronise at different `bar.sync` instructions. It reports nothing
    # for `barrier.sync`.
    cute.arch.inline_ptx(f"barrier.sync {int(NamedBarrier.LOAD_WARPS)}, {2 * 32};")
    return state


@cute.jit
def fill_stage(
    source: EpilogueSource,
    pipeline: GroupPipeline,
    state: PipelineState,
    work: WorkTile,
    width: cutlass.Constexpr,
    number: cutlass.Constexpr,
):
    """Loads the subtiles of all consumers into the stage `number` of a tile's source."""
    epilogue_config, size = source.epilogue_config, source.size
    per = subtiles_per_stage(source.config, epilogue_config, size)
    columns = subtile_columns(epilogue_config, size)
    batch = subtiles(epilogue_config, size, width)[number * per :][:per]
    consumers = source.config.warpgroups_per_tile
    pipeline.arrive_and_expect_tx(
        state, len(batch) * consumers * subtile_bytes(epilogue_config, size)
    )
    for consumer in cutlass.range_constexpr(consumers):
        for n in cutlass.range_constexpr(len(batch)):
            i, start = batch[n]
            sC = subtile_tensor(source, subtile_pointer(source, state.index, consumer * per + n))
            row = (
                work.first_row(epilogue_config.tile_m)
                + (i * epilogue_config.warpgroups_per_tile + consumer) * 64
            )
            gC = tile_of(
                source.tma.tensor,
                source.batched,
                row,
                work.column + start,
                work.matrix,
                (64, columns),
            )
            sC, gC = cute.group_modes(sC, 0, 2), cute.group_modes(gC, 0, 2)
            target, origin = cpasync.tma_partition(source.tma.atom, 0, cute.make_layout(1), sC, gC)
            cute.copy(
                source.tma.atom, origin, target, tma_bar_ptr=pipeline.producer_get_barrier(state)
            )


def subtile_tensor(source: EpilogueSource, pointer):
    """Returns the tensor of a subtile in shared memory, (64, columns)."""
    layout = source.subtile_layout
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, source.dtype), layout.outer)


# ---- a consumer
def stage_states(source: EpilogueSource, pipeline: GroupPipeline, state: PipelineState):
    """Returns the pipeline states of the stages that hold a tile's source, in order; `state` is the
    first.
    """
    states = [state]
    while len(states) < stages_per_tile(source.config, source.epilogue_config, source.size):
        states.append(pipeline.advance(states[-1]))
    return states


@cute.jit
def await_all(source: EpilogueSource, pipeline: GroupPipeline, state: PipelineState):
    """One pingpong consumer, before the other multiplies: waits until its tile's source has arrived
    completely.

    The other consumer's k tiles use these stages next. While one of the stages is not full, its
    barrier is still in the previous phase, and by parity the other consumer would mistake that for
    the phase that it waits for.
    """
    for each in stage_states(source, pipeline, state):
        pipeline.consumer_wait(each)


@cute.jit
def read_subtile(
    source: EpilogueSource,
    consumer: Consumer,
    pipeline: GroupPipeline,
    states,
    number: cutlass.Constexpr,
    subtiles: cutlass.Constexpr,
):
    """One consumer: returns this thread's values of subtile `number`. C may have the addend's
    memory, so the next subtile must have arrived before this one is stored if both share columns.
    """
    per = subtiles_per_stage(source.config, source.epilogue_config, source.size)
    state = states[number // per]
    if cutlass.const_expr(number % per == 0):
        pipeline.consumer_wait(state)
    ends = number + 1 == len(subtiles)
    if cutlass.const_expr((number + 1) % per == 0 and not ends):
        (i, start), (next_i, next_start) = subtiles[number : number + 2]
        columns = subtile_columns(source.epilogue_config, source.size)
        if cutlass.const_expr(i == next_i and next_start < start + columns):
            pipeline.consumer_wait(states[(number + 1) // per])

    values = copy_subtile(source, consumer, state.index, number % per, per)
    if cutlass.const_expr((number + 1) % per == 0 or ends):
        release_stage(consumer, pipeline, state)
    return values


@cute.jit
def copy_subtile(
    source: EpilogueSource,
    consumer: Consumer,
    index,
    number: cutlass.Constexpr,
    per: cutlass.Constexpr,
):
    """Returns this thread's values of its consumer's subtile `number` in stage `index`, which holds
    `per` subtiles per consumer.
    """
    subtile = subtile_pointer(source, index, number).toint()
    for other in cutlass.range_constexpr(1, source.config.warpgroups_per_tile):
        others = subtile_pointer(source, index, other * per + number).toint()
        subtile = others if consumer.warpgroup_in_tile == other else subtile
    pointer = cute.make_ptr(cutlass.Uint8, subtile, source.stages.memspace, assumed_align=1024)
    writer = consumer.writer
    values = cute.make_rmem_tensor(writer.fragment_shape, source.dtype)
    thread = writer.load_copy.get_slice(consumer.context.thread % WARPGROUP)
    tensor = subtile_tensor(source, pointer)
    cute.copy(writer.load_copy, thread.partition_S(tensor), writer.load_copy.retile(values))
    return values


@cute.jit
def release_rest(
    source: EpilogueSource,
    consumer: Consumer,
    pipeline: GroupPipeline,
    states,
    count: cutlass.Constexpr,
):
    """One consumer, after the last of `count` subtiles: releases the stages that a narrow tile does
    not use.
    """
    per = subtiles_per_stage(source.config, source.epilogue_config, source.size)
    for state in states[-(-count // per) :]:
        pipeline.consumer_wait(state)
        release_stage(consumer, pipeline, state)


@cute.jit
def release_stage(consumer: Consumer, pipeline: GroupPipeline, state: PipelineState):
    """Releases a stage of which one consumer has read everything that it needs."""
    sync_consumer(consumer.index)
    pipeline.consumer_release(state.index)

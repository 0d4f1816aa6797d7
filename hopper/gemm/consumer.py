"""The work of a consumer warpgroup of `hopper.gemm`: the products of its work tiles, their
reduction along K, and their epilogue. `kernel.Gemm` documents how it cooperates with the other
warps.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import StoreCacheMode, warpgroup
from cutlass.utils import hopper_helpers

from outblas.hopper.gemm import (
    cluster_reduce,
    epilogue_load,
    epilogue_math,
    epilogue_store,
    promotion,
    scale_loads,
    splitk_reduce,
    term_mask,
)
from outblas.hopper.gemm.block_scales import column_parts
from outblas.hopper.gemm.epilogue_math import EpilogueOps, EpilogueTile
from outblas.hopper.gemm.pipeline import GroupPipeline
from outblas.hopper.gemm.records import Consumer, Cta, SplitKReduction, TileMma
from outblas.hopper.gemm.tile_scheduler import WorkTile
from outblas.hopper.gemm.views import tile_of
from outblas.hopper.parts import roles
from outblas.hopper.parts.config import WARPGROUP
from outblas.hopper.parts.pipeline import PipelineState
from outblas.hopper.parts.records import MmaFragments, NamedBarrier, TiledMmas


# ---- the state of a consumer before its first tile
def make_consumer(cta: Cta, index) -> Consumer:
    """Returns the state of a thread in consumer warpgroup `index`."""
    warpgroup_in_tile = Int32(0) if cta.config.pingpong else index
    thread_in_tile = warpgroup_in_tile * WARPGROUP + cta.context.thread % WARPGROUP
    writer = None
    if cta.epilogue.tma is not None:
        writer = epilogue_store.make_writer(
            cta.epilogue, cta.operands.word_dtype, index, cta.context.thread
        )
    return Consumer(index, warpgroup_in_tile, thread_in_tile, cta.context, writer)


def make_reduction(cta: Cta, consumer: Consumer) -> SplitKReduction:
    """Returns this consumer's part of the split-K workspace."""
    config, coord = cta.config, cta.coord
    cta_in_cluster = coord.cta_m_in_cluster + coord.cta_n_in_cluster * config.cluster_m
    lane = cta.context.thread % WARPGROUP
    if config.split and splitk_reduce.keeps_own(config.accumulator_registers):
        lane = splitk_reduce.opaque(lane)
    return SplitKReduction(
        cta.splitk,
        cta.arrived,
        lane,
        unit=cta_in_cluster * config.warpgroups_per_tile + consumer.warpgroup_in_tile,
        units=config.cluster * config.warpgroups_per_tile,
    )


def make_tile_mma(cta: Cta, consumer: Consumer, width: int) -> TileMma:
    """Returns instructions, fragments and accumulators for tiles `width` columns wide."""
    config, operands = cta.config, cta.operands
    mma, overwriting = (tiled_mma(cta, config.mma_n or width) for _ in range(2))
    mma.set(warpgroup.Field.ACCUMULATE, True)
    overwriting.set(warpgroup.Field.ACCUMULATE, False)
    # Shared-memory descriptors are the same for all threads of a warpgroup.
    thread = mma.get_slice(consumer.warpgroup_in_tile * WARPGROUP)
    tCrA = mma.make_fragment_A(thread.partition_A(operands.sA))
    # B's fragments cover all columns of a stage, of which a tile uses the first ones.
    whole = tiled_mma(cta, config.mma_n or config.stage_n)
    tCrB = whole.make_fragment_B(whole.get_slice(0).partition_B(operands.sB))
    shape = mma.partition_shape_C((config.tile_m, width))
    acc = cute.make_rmem_tensor(shape, Float32)
    fragments = MmaFragments(TiledMmas(mma, overwriting), tCrA, tCrB, acc)
    partial = None
    if cta.traits.promoted:
        rows = 64 * config.warpgroups_per_tile
        one = mma.partition_shape_C((rows, width // column_parts(config, cta.traits.gated)))
        partial = replace(fragments, acc=cute.make_rmem_tensor(one, Float32))
    return TileMma(width, fragments, partial)


def tiled_mma(cta: Cta, columns: int):
    """Returns the wgmma of the consumers that share a tile, `columns` wide."""
    operands, shape = cta.operands, (cta.config.warpgroups_per_tile, 1, 1)
    return hopper_helpers.make_trivial_tiled_mma(
        *operands.dtypes, *operands.majors, Float32, shape, (64, columns)
    )


def with_accumulator(cta: Cta, consumer: Consumer, registers, width: int) -> TileMma:
    """Returns what `make_tile_mma` returns, with these registers as the accumulator."""
    mma = make_tile_mma(cta, consumer, width)
    acc = cute.make_tensor(registers.iterator, mma.fragments.acc.layout)
    return replace(mma, fragments=replace(mma.fragments, acc=acc))


# ---- tiles
@cute.jit
def consumer_loop(cta: Cta, pipeline: GroupPipeline, index):
    """Consumer warpgroup `index`: computes all its work tiles."""
    config = cta.config
    consumer = make_consumer(cta, index)
    if cutlass.const_expr(cta.traits.block_scaled):
        pipeline = scale_loads.with_lane(cta, pipeline)
    reduction = make_reduction(cta, consumer)
    mmas = [make_tile_mma(cta, consumer, width) for width in config.tile_widths]
    state, first, stride = pipeline.initial_state(), Int32(0), 1
    stages_per_tile = cta.scheduler.params.k_tiles + cta.source_stages
    if cutlass.const_expr(config.pingpong):
        first, stride = consumer.index, 2
        state = pipeline.advance_by(state, consumer.index * stages_per_tile)
    if cutlass.const_expr(config.pingpong or cta.traits.staggered_tail):
        mma_order_begin(cta, consumer)

    count = cta.scheduler.work_tile_count(config)
    iterations = (count - first + stride - 1) // stride
    for iteration in cutlass.range(iterations, unroll=1):
        step = first + iteration * stride
        work = cta.scheduler.current_work(config, step)
        backwards = None
        if cutlass.const_expr(cta.traits.block_scaled):
            backwards = cta.scheduler.backwards(config, work, step)
        if cutlass.const_expr(config.pingpong):
            mma_order_wait(consumer)
        rest = reduction, pipeline, state, work, backwards, iteration, iterations
        if cutlass.const_expr(config.variable_tile_n):
            if work.narrow == 0:
                state = compute_tile(cta, consumer, mmas[0], *rest)
            else:
                state = compute_tile(cta, consumer, mmas[1], *rest)
        else:
            state = compute_tile(cta, consumer, mmas[0], *rest)
        if cutlass.const_expr(config.pingpong):
            state = pipeline.advance_by(state, stages_per_tile)


@cute.jit
def compute_tile(
    cta: Cta,
    consumer: Consumer,
    mma: TileMma,
    reduction,
    pipeline: GroupPipeline,
    state: PipelineState,
    work: WorkTile,
    backwards,
    iteration,
    iterations,
):
    """Computes one work tile: products, the reduction along K, the epilogue. Returns the state
    after the last stage.
    """
    config, traits = cta.config, cta.traits
    width, own = mma.width // config.cluster_k, work
    if cutlass.const_expr(config.cluster_k > 1):
        own = work._replace(column=work.column + cta.coord.cta_k_in_cluster * width)
    state, previous = multiply(cta, consumer, mma, pipeline, state, work, backwards)
    if cutlass.const_expr(config.pingpong and traits.source != ""):
        epilogue_load.await_all(cta.source, pipeline, state)
    if cutlass.const_expr(config.pingpong or traits.staggered_tail):
        mma_order_arrive(cta, consumer)
    operations = None
    if cutlass.const_expr(not config.split and config.cluster_k == 1):
        operations = EpilogueOps(epilogue_tile_of(cta, consumer, mma, work))
    registers, seen = config.accumulator_registers, None
    if cutlass.const_expr(config.stream_k and splitk_reduce.keeps_own(registers)):
        seen = splitk_reduce.look_ahead(reduction, work.partition)
    in_flight = config.in_flight
    if cutlass.const_expr(traits.promoted):
        in_flight = 0
    elif cutlass.const_expr(traits.staggered_tail):
        in_flight = 1
    roles.mma_tail(pipeline, previous, in_flight, None)
    if cutlass.const_expr(cta.epilogue.tma is not None):
        epilogue_store.wait_mainloop_done(cta.epilogue)

    if cutlass.const_expr(config.split):
        if work.partition.total == 1:
            finish_tile(cta, consumer, mma, work, pipeline, state, None)
        else:
            acc = mma.fragments.acc
            if splitk_reduce.reduce(reduction, consumer, acc, work.partition, registers, seen):
                finish_tile(cta, consumer, mma, work, pipeline, state, None)
    elif cutlass.const_expr(config.cluster_k > 1):
        sums = cluster_reduce.reduce(cta, consumer, mma.fragments.acc, iteration, iterations)
        part = with_accumulator(cta, consumer, sums, width)
        finish_tile(cta, consumer, part, own, pipeline, state, None)
    else:
        finish_tile(cta, consumer, mma, work, pipeline, state, operations)
    for _ in cutlass.range_constexpr(cta.source_stages):
        state = pipeline.advance(state)
    return state


@cute.jit
def multiply(
    cta: Cta,
    consumer: Consumer,
    mma: TileMma,
    pipeline: GroupPipeline,
    state: PipelineState,
    work,
    backwards,
):
    """Multiplies the k tiles of a work tile; the last groups still run at the end. Returns the
    state after the last stage, and that stage's index. `backwards`: 1 where the k tiles come in
    reverse order, which only scales that vary along K have to know.

    With a staggered tail, consumers multiply the last k tiles one after the other. A consumer then
    stores its part of the tile while the next one multiplies, and the last consumer stores while
    the first one multiplies the next tile. One group stays in flight meanwhile, because no other
    consumer multiplies.
    """
    config, fragments, traits = cta.config, mma.fragments, cta.traits
    in_flight, count = config.in_flight, work.partition.count
    if cutlass.const_expr(traits.masks_terms):
        state, previous = term_mask.multiply(cta, consumer, mma, pipeline, state, count, work.terms)
    elif cutlass.const_expr(traits.promoted):
        state = promotion.multiply(cta, consumer, mma, pipeline, state, work, backwards)
        previous = Int32(0)
    elif cutlass.const_expr(not traits.staggered_tail):
        state, previous = roles.mma_k_loop(fragments, pipeline, state, count, in_flight, True, None)
    elif cutlass.const_expr(traits.single_wave):
        state, previous = multiply_once(cta, consumer, mma, pipeline, state, count)
    else:
        last = config.staggered_k_tiles
        state, previous = roles.mma_k_loop(
            fragments, pipeline, state, count - last, in_flight, True, None
        )
        roles.mma_tail(pipeline, previous, in_flight, None)
        epilogue_store.await_stores(consumer)
        mma_order_wait(consumer)
        # Not the constant itself: with it, compilers would take the loop for divergent.
        rest = cutlass.min(count, last)
        state, previous = roles.mma_k_loop(fragments, pipeline, state, rest, 1, False, None)
    return state, previous


@cute.jit
def multiply_once(
    cta: Cta, consumer: Consumer, mma: TileMma, pipeline: GroupPipeline, state: PipelineState, count
):
    """Multiplies as `multiply` does with a staggered tail, where the CTA has only one tile. A group
    is still in flight when the consumer's turn comes, and the next consumer's turn comes when this
    one has almost finished. The stages that the loads of the last k tiles wait for have been
    released before, because fewer stages are held than exist.
    """
    config, fragments = cta.config, mma.fragments
    last = config.staggered_k_tiles
    before = count - last if cutlass.const_expr(config.in_flight > 0) else count - last - 1
    state, previous = roles.mma_k_loop(
        fragments, pipeline, state, before, config.in_flight, True, None
    )
    if cutlass.const_expr(config.in_flight == 0):
        pipeline.consumer_wait(state)
        roles.mma_stage(fragments, state.index)
        previous = state.index
        state = pipeline.advance(state)
    mma_order_wait(consumer)
    # Not the constant itself: with it, compilers would take the loop for divergent.
    rest = cutlass.min(count, last) - 1
    if cutlass.const_expr(last > 1):
        state, previous = roles.mma_k_loop_rest(fragments, pipeline, state, previous, rest, 1, None)
    return roles.mma_last_k_tile(fragments, pipeline, state, previous)


def epilogue_tile_of(cta: Cta, consumer: Consumer, mma: TileMma, work: WorkTile) -> EpilogueTile:
    """Returns the accumulators of a work tile for its epilogue."""
    epilogue = cta.scheduler.tile_epilogue(cta.epilogue, work)
    return EpilogueTile(epilogue, consumer, work, mma.fragments.acc, mma.width)


@cute.jit
def finish_tile(
    cta: Cta,
    consumer: Consumer,
    mma: TileMma,
    work: WorkTile,
    pipeline: GroupPipeline,
    state: PipelineState,
    operations,
):
    """Turns a complete accumulator into a tile of C. `state` is the one after the tile's last k
    tile; `operations` are those of its epilogue, if some have already run.
    """
    traits = cta.traits
    if cutlass.const_expr(operations is None):
        operations = EpilogueOps(epilogue_tile_of(cta, consumer, mma, work))
    width = mma.width // 2 if cutlass.const_expr(traits.gated) else mma.width
    if cutlass.const_expr(traits.aux not in ("", "staged")):
        epilogue_math.store_aux(operations)
    if cutlass.const_expr(cta.epilogue.tma is not None):
        tile = operations.tile
        epilogue_store.store(tile, width, cta.source, pipeline, state, operations)
    elif cutlass.const_expr(traits.plain):
        store_registers(cta, consumer, mma, work, width)
    else:
        outputs = epilogue_math.output_registers(operations, width)
        rounded = with_accumulator(cta, consumer, outputs, width)
        store_registers(cta, consumer, rounded, work, width)


@cute.jit
def store_registers(
    cta: Cta, consumer: Consumer, mma: TileMma, work: WorkTile, width: cutlass.Constexpr
):
    """Stores `width` columns of the accumulator directly to C, up to the end of C or of the
    group.
    """
    epilogue, config = cta.epilogue, cta.epilogue.config
    shape, extents = (config.tile_m, width), epilogue.extents
    if cutlass.const_expr(work.end_row is not None):
        extents = (work.end_row, extents[1])
    row = work.first_row(config.tile_m)
    gC = tile_of(epilogue.mC, cta.traits.batched, row, work.column, work.matrix, shape)
    coordinates = cute.make_identity_tensor(epilogue.extents)
    cC = cute.local_tile(cute.domain_offset((row, work.column), coordinates), shape, (0, 0))
    vector, whole_quads = cta.traits.width, (config.mma_n or width) % 32 == 0
    if cutlass.const_expr(vector > 2 and not (vector == 8 and whole_quads)):
        vector = 2
    roles.store_fragment(
        consumer, mma.fragments, gC, cC, extents, vector, StoreCacheMode.WRITE_THROUGH
    )


# ---- the ordered sequence of consumers: each passes its turn to multiply on, the last to the first
@cute.jit
def mma_order_wait(consumer: Consumer):
    """Waits until the previous consumer lets this one multiply."""
    cute.arch.barrier(
        barrier_id=consumer.index + NamedBarrier.MMA_ORDER, number_of_threads=2 * WARPGROUP
    )


@cute.jit
def mma_order_arrive(cta: Cta, consumer: Consumer):
    """Lets the next consumer multiply; the last consumer lets the first one multiply."""
    following = 1 - consumer.index
    if cutlass.const_expr(cta.config.consumers > 2):
        last = cta.config.consumers - 1
        following = Int32(0) if consumer.index == last else consumer.index + 1
    cute.arch.barrier_arrive(
        barrier_id=NamedBarrier.MMA_ORDER + following, number_of_threads=2 * WARPGROUP
    )


@cute.jit
def mma_order_begin(cta: Cta, consumer: Consumer):
    """Lets the first consumer start. The last consumer arrives on its behalf."""
    if consumer.index == cta.config.consumers - 1:
        cute.arch.barrier_arrive(
            barrier_id=int(NamedBarrier.MMA_ORDER), number_of_threads=2 * WARPGROUP
        )

"""The work of threads on one tile: loading its k tiles, multiplying them, storing the
accumulator.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cute.nvgpu import warpgroup

from outblas.hopper.parts.config import WARPGROUP
from outblas.hopper.parts.phase_clock import LOAD, TENSOR, WAIT, PhaseTimers, lap
from outblas.hopper.parts.pipeline import Pipeline, PipelineState
from outblas.hopper.parts.records import MmaFragments, NamedBarrier, TmaLoad


@cute.jit
def sync_consumer(index):
    """Synchronises the 128 threads of consumer warpgroup `index`."""
    cute.arch.barrier(barrier_id=index + NamedBarrier.CONSUMER, number_of_threads=WARPGROUP)


# ---- the producer
@cute.jit
def load_k_tile(
    load_a: TmaLoad,
    load_b: TmaLoad,
    pipeline: Pipeline,
    state: PipelineState,
    m: Int32,
    n: Int32,
    k_tile: Int32,
):
    """One warp: starts the TMA loads of k tile `k_tile` of row tile m and column tile n into a
    stage whose bytes have been announced.
    """
    barrier = pipeline.producer_get_barrier(state)
    cute.copy(
        load_a.atom,
        load_a.source[None, m, k_tile],
        load_a.shared[None, state.index],
        tma_bar_ptr=barrier,
        mcast_mask=load_a.mask,
    )
    cute.copy(
        load_b.atom,
        load_b.source[None, n, k_tile],
        load_b.shared[None, state.index],
        tma_bar_ptr=barrier,
        mcast_mask=load_b.mask,
    )


@cute.jit
def load_tile(
    load_a: TmaLoad,
    load_b: TmaLoad,
    pipeline: Pipeline,
    state: PipelineState,
    m: Int32,
    n: Int32,
    k_tiles: Int32,
    timers: PhaseTimers | None,
):
    """Producer warp: loads all k tiles of one tile. Returns the state after the last."""
    for k_tile in cutlass.range(k_tiles, unroll=1):
        pipeline.producer_acquire(state)
        pipeline.arrive_and_expect_tx(state)
        lap(timers, WAIT)
        load_k_tile(load_a, load_b, pipeline, state, m, n, k_tile)
        lap(timers, LOAD)
        state = pipeline.advance(state)
    return state


# ---- a consumer
@cute.jit
def mma_stage(
    fragments: MmaFragments,
    index: Int32,
    overwrite: cutlass.Constexpr = False,
    last_apart: cutlass.Constexpr = False,
):
    """Consumers: issue acc += A·B of one stage, or acc = A·B, as one wgmma group, and leave it in
    flight. `last_apart`: the last wgmma is a separate group.
    """
    tCrA, tCrB, acc = fragments.tCrA, fragments.tCrB, fragments.acc
    count = cute.size(tCrA, mode=[2])
    warpgroup.fence()
    for kb in cutlass.range_constexpr(count):
        if cutlass.const_expr(last_apart and 0 < kb == count - 1):
            warpgroup.commit_group()
        mma = fragments.mma.accumulating
        if cutlass.const_expr(overwrite and kb == 0):
            mma = fragments.mma.overwriting
        cute.gemm(mma, acc, tCrA[None, None, kb, index], tCrB[None, None, kb, index], acc)
    warpgroup.commit_group()


@cute.jit
def mma_k_loop(
    fragments: MmaFragments,
    pipeline: Pipeline,
    state: PipelineState,
    count: Int32,
    in_flight: cutlass.Constexpr,
    overwrite: cutlass.Constexpr,
    timers: PhaseTimers | None,
):
    """Consumers: multiply `count` k tiles of one tile; the last `in_flight` groups still run at the
    end. Return the state after the last stage, and the index of that stage.

    A stage is released when its group has completed, which is one stage later with one group in
    flight. `overwrite`: the first product replaces the contents of the accumulator.
    """
    previous, rest = state.index, count
    if cutlass.const_expr(in_flight > 0 or overwrite):
        pipeline.consumer_wait(state)
        lap(timers, WAIT)
        mma_stage(fragments, state.index, overwrite)
        if cutlass.const_expr(in_flight == 0):
            warpgroup.wait_group(0)
            pipeline.consumer_release(state.index)
        lap(timers, TENSOR)
        state, rest = pipeline.advance(state), rest - 1
    return mma_k_loop_rest(fragments, pipeline, state, previous, rest, in_flight, timers)


@cute.jit
def mma_k_loop_rest(
    fragments: MmaFragments,
    pipeline: Pipeline,
    state: PipelineState,
    previous: Int32,
    count: Int32,
    in_flight: cutlass.Constexpr,
    timers: PhaseTimers | None,
):
    """Consumers: continue after `mma_k_loop` with `count` more k tiles. `previous` is the stage
    whose group may still run.
    """
    for _ in cutlass.range(count, unroll=1):
        pipeline.consumer_wait(state)
        lap(timers, WAIT)
        mma_stage(fragments, state.index)
        warpgroup.wait_group(in_flight)
        done = previous if cutlass.const_expr(in_flight > 0) else state.index
        pipeline.consumer_release(done)
        lap(timers, TENSOR)
        previous = state.index
        state = pipeline.advance(state)
    return state, previous


@cute.jit
def mma_last_k_tile(
    fragments: MmaFragments, pipeline: Pipeline, state: PipelineState, previous: Int32
):
    """Consumers: multiply the last k tile of a tile after `mma_k_loop`, which left the group of
    stage `previous` in flight. Only the last wgmma stays in flight, just long enough for another
    consumer to wake up and multiply. Return the state after the stage, and its index.
    """
    pipeline.consumer_wait(state)
    mma_stage(fragments, state.index, last_apart=True)
    warpgroup.wait_group(1)
    pipeline.consumer_release(previous)
    return pipeline.advance(state), state.index


@cute.jit
def mma_tail(
    pipeline: Pipeline, previous: Int32, in_flight: cutlass.Constexpr, timers: PhaseTimers | None
):
    """Consumers: wait until the accumulator is complete, and release the last stage."""
    if cutlass.const_expr(in_flight > 0):
        warpgroup.wait_group(0)
        pipeline.consumer_release(previous)
        lap(timers, TENSOR)


@cute.jit
def mma_tile(
    fragments: MmaFragments,
    pipeline: Pipeline,
    state: PipelineState,
    k_tiles: Int32,
    in_flight: cutlass.Constexpr,
    overwrite: cutlass.Constexpr,
    timers: PhaseTimers | None,
):
    """Consumers: multiply all k tiles of one tile and complete the accumulator. Return the state
    after the last stage.
    """
    state, previous = mma_k_loop(fragments, pipeline, state, k_tiles, in_flight, overwrite, timers)
    mma_tail(pipeline, previous, in_flight, timers)
    return state


# ---- stores from registers
@cute.jit
def exchange(x, y, upper, distance: cutlass.Constexpr):
    """Exchanges values between two lanes that are `distance` apart: the upper lane's x for the
    lower lane's y.
    """
    received = cute.arch.shuffle_sync_bfly(x if upper else y, distance)
    return received if upper else x, y if upper else received


@cute.jit
def transpose_quad(rounded, lane):
    """Transposes values within the four lanes of a quad. Before, each lane holds two neighbours in
    each of four groups of eight columns. The lanes exchange words until each holds all eight
    columns of one group: 16 bytes of one row instead of four times 4 bytes.
    """
    words = cute.recast_tensor(rounded, Uint32)
    transposed = cute.make_rmem_tensor((cute.size(words),), Uint32)
    odd, high = lane & 1 == 1, lane & 2 == 2
    for v in cutlass.range_constexpr(cute.size(words) // 4):
        # w0 to w3 belong to the four groups; v % 2 selects the row, or the one eight below.
        first = v // 2 * 8 + v % 2
        w0, w1, w2, w3 = words[first], words[first + 2], words[first + 4], words[first + 6]
        w0, w1 = exchange(w0, w1, odd, 1)
        w2, w3 = exchange(w2, w3, odd, 1)
        w0, w2 = exchange(w0, w2, high, 2)
        w1, w3 = exchange(w1, w3, high, 2)
        for i in cutlass.range_constexpr(4):
            transposed[4 * v + i] = (w0, w1, w2, w3)[i]
    return cute.recast_tensor(transposed, rounded.element_type)


@cute.jit
def store_registers(
    consumer,
    mC,
    m: Int32,
    n: Int32,
    tile: cutlass.Constexpr,
    width: cutlass.Constexpr,
    cache: cutlass.Constexpr,
):
    """Consumers: store the accumulator to row tile m, column tile n of C, as `store_fragment`
    does.
    """
    gC = cute.local_tile(mC, tile, (m, n))
    cC = cute.local_tile(cute.make_identity_tensor(mC.shape), tile, (m, n))
    store_fragment(consumer, consumer.fragments, gC, cC, mC.shape, width, cache)


@cute.jit
def store_fragment(
    consumer,
    fragments: MmaFragments,
    gC,
    cC,
    shape,
    width: cutlass.Constexpr,
    cache: cutlass.Constexpr,
):
    """Consumers: each thread rounds its accumulators to C's dtype and writes them to the tile `gC`,
    whose coordinates are `cC`, `width` elements of a row at a time (1, 2, or 8 of 16 bits).
    Accesses beyond the edges of `shape` are predicated off. `cache` is the StoreCacheMode.
    """
    dtype, acc = gC.element_type, fragments.acc
    thread = fragments.mma.accumulating.get_slice(consumer.thread_in_tile)
    tCgC, tCcC = thread.partition_C(gC), thread.partition_C(cC)  # ((2, 2, V), MMA_M, MMA_N)
    tCrC = cute.make_rmem_tensor(acc.shape, dtype)
    tCrC.store(acc.load().to(dtype))
    right = Int32(0)  # columns from a lane's first element to the vector that it holds
    if cutlass.const_expr(width == 8):
        lane = consumer.context.thread % 4
        tCrC, right = transpose_quad(tCrC, lane), 6 * lane

    bits = width * dtype.width
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyR2GOp(), dtype, num_bits_per_copy=bits, store_cache_mode=cache
    )
    for j in cutlass.range(cute.size(tCrC) // width, unroll_full=True):
        first = j * width  # first element of the vector, in lane 0
        if cutlass.const_expr(width == 8):
            first = j // 2 * 16 + j % 2 * 2
        row, column = tCcC[first]
        if cute.elem_less((row, column + right), shape):
            at = tCgC.iterator + (cute.crd2idx(first, tCgC.layout) + right)
            at = cute.make_ptr(dtype, at.toint(), at.memspace, assumed_align=bits // 8)
            vector = cute.make_tensor(tCrC.iterator + j * width, width)
            cute.copy(atom, vector, cute.make_tensor(at, width))

"""Stores C of `hopper.gemm` through shared memory. It extends `parts.epilogue_store` to tiles of
any width and to C by rows or by columns.

Where `subtiles` do not divide a tile's width, the last one overlaps its neighbour: both write the
same values there, and a single TMA box serves every width. The contract of a buffer is that of
`parts.epilogue_store`.

`epilogue_math` computes the outputs from the accumulators; `epilogue_load` loads a source that has
C's layout.
"""

import functools
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.utils import hopper_helpers

from outblas.hopper.gemm import block_quantize, epilogue_load, epilogue_math, row_stores
from outblas.hopper.gemm.pipeline import GroupPipeline
from outblas.hopper.gemm.records import Consumer, CtaEpilogue, EpilogueTma, TmaTensor
from outblas.hopper.gemm.subtiles import (
    buffer_count,
    overlays_own_rows,
    overlays_stages,
    subtile_columns,
    subtiles,
)
from outblas.hopper.gemm.views import tile_of
from outblas.hopper.parts.config import WARPGROUP
from outblas.hopper.parts.epilogue_store import wait_stores_read
from outblas.hopper.parts.pipeline import PipelineState
from outblas.hopper.parts.records import NamedBarrier
from outblas.hopper.parts.roles import sync_consumer

_STORE, _LOAD = warp.StMatrix8x8x16bOp, warp.LdMatrix8x8x16bOp
_ROWS = warpgroup.SmemLayoutAtomKind
_BY_BYTES = {128: _ROWS.K_SW128, 64: _ROWS.K_SW64, 32: _ROWS.K_SW32, 16: _ROWS.K_INTER}


@dataclass(frozen=True)
class SubtileWriter:
    """The copies with which a thread of a consumer writes its warpgroup's subtiles, `columns` wide,
    and reads them.

    `store_copy` moves registers of shape `fragment_shape` to tSsC, (CPY, CPY_M, CPY_N, BUFFER), the
    thread's part of `buffers`, (64, columns, BUFFER); `load_copy` moves a subtile to registers.
    """

    store_copy: Any
    load_copy: Any
    buffers: Any
    tSsC: Any
    fragment_shape: Any
    columns: int


@dataclass(frozen=True)
class StorePass:
    """The stores of one matrix: the outputs, or one half of x (`aux`).

    `tma` stores them. `waits`: a buffer must be free before it is written again; `waits_first`:
    also before the first round. Neither is needed where buffers overlay the stages, because each is
    written only once (`overlays_stages`).
    """

    aux: bool
    half: int
    tma: TmaTensor
    subtiles: tuple[tuple[int, int], ...]
    overlays_stages: bool
    waits: bool
    waits_first: bool


def make_tma(config, c, aux, source, traits) -> EpilogueTma:
    """Host: prepares the TMA arguments for C, x and the epilogue's source."""
    dtype = c.element_type
    size = dtype.width // 8
    columns = subtile_columns(config, size)
    kind = _ROWS.MN_SW128 if traits.by_columns else _BY_BYTES[columns * size]
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    count = buffer_count(config, size, traits) * config.consumers
    buffers = cute.tile_to_shape(atom, (64, columns, count), (0, 1, 2))
    one = cute.tile_to_shape(atom, (64, columns), (0, 1))

    def tma(operation, tensor):
        return TmaTensor(*cpasync.make_tiled_tma_atom(operation, tensor, one, (64, columns)))

    nothing, store = TmaTensor(None, None), cpasync.CopyBulkTensorTileS2GOp()
    return EpilogueTma(
        c=tma(store, c),
        aux=tma(store, aux) if traits.aux == "staged" else nothing,
        source=tma(cpasync.CopyBulkTensorTileG2SOp(), source) if traits.source else nothing,
        subtile_layout=one,
        layout=buffers,
    )


def alloc_smem(smem, config, tma: EpilogueTma, dtype, traits, stages):
    """Returns the buffers of all consumers, in separate shared memory or in that of the
    `stages`.
    """
    layout = tma.layout
    if overlays_stages(config, dtype.width // 8, traits):
        return cute.make_tensor(cute.recast_ptr(stages, layout.inner, dtype), layout.outer)
    return smem.allocate_tensor(dtype, layout.outer, 1024, swizzle=layout.inner)


def make_writer(epilogue: CtaEpilogue, mma_dtype, consumer, thread) -> SubtileWriter:
    """Returns the copies with which thread `thread` of consumer warpgroup `consumer` writes and
    reads subtiles: matrix instructions for 16-bit elements, pairs for others.
    """
    dtype, config, traits = epilogue.dtype, epilogue.config, epilogue.traits
    columns = subtile_columns(config, epilogue.size)
    if dtype.width == 16:
        matrices = 4 if columns % 16 == 0 else 2
        store_atom, load_atom = (
            cute.make_copy_atom(operation(traits.by_columns, matrices), dtype)
            for operation in (_STORE, _LOAD)
        )
    else:
        store_atom = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=2 * dtype.width
        )
        load_atom = store_atom
    major = cute.nvgpu.OperandMajorMode.K
    mma = hopper_helpers.make_trivial_tiled_mma(
        mma_dtype, mma_dtype, major, major, Float32, (1, 1, 1), (64, columns)
    )
    fragment = cute.make_tiled_copy_C_atom(store_atom, mma)
    store_copy = cute.make_tiled_copy_S(store_atom, fragment)
    load_copy = cute.make_tiled_copy_S(load_atom, fragment)
    part = store_copy.get_slice(thread % WARPGROUP)
    count = buffer_count(config, epilogue.size, traits)
    numbers = count
    if overlays_own_rows(config, epilogue.size, traits):
        # The 64-row blocks of a stage of A belong to the consumers in turn.
        numbers = cute.make_layout((count,), stride=(config.consumers,))
    buffers = cute.local_tile(epilogue.sC, (64, columns, numbers), (0, 0, consumer))
    return SubtileWriter(
        store_copy,
        load_copy,
        buffers,
        tSsC=part.partition_D(buffers),
        fragment_shape=cute.shape(part.partition_S(buffers))[:3],
        columns=columns,
    )


@cute.jit
def wait_mainloop_done(epilogue: CtaEpilogue):
    """Every consumer, after its products: where C overlays the stages, waits until all consumers
    have read them; where it overlays only the consumer's own rows, no wait is needed.

    This is not part of `store`, because not all consumers of a tile may reach that: with partitions
    of K only the last to arrive does.
    """
    config, size, traits = epilogue.config, epilogue.size, epilogue.traits
    waits = overlays_stages(config, size, traits) and not overlays_own_rows(config, size, traits)
    if cutlass.const_expr(config.warpgroups_per_tile > 1 and waits):
        cute.arch.barrier(
            barrier_id=int(NamedBarrier.ALL_CONSUMERS),
            number_of_threads=config.warpgroups_per_tile * WARPGROUP,
        )


@cute.jit
def store(
    tile: epilogue_math.EpilogueTile,
    width: cutlass.Constexpr,
    source,
    pipeline: GroupPipeline,
    state: PipelineState,
    operations: cutlass.Constexpr,
):
    """One consumer: stores its rows of the tile, `width` columns of C, and before them x if the
    call asks for it. `state` is the first state of the epilogue's source, if there is one.
    """
    traits = tile.epilogue.traits
    free = traits.staggered_tail  # buffers were waited for before the last products
    if cutlass.const_expr(traits.aux == "staged"):
        for half in cutlass.range_constexpr(2 if traits.gated else 1):
            aux = make_pass(tile.epilogue, width, "aux", half, free)
            run_pass(tile, aux, None, pipeline, state, operations)
            free = False
    out = make_pass(tile.epilogue, width, "out", 0, free)
    run_pass(tile, out, source, pipeline, state, operations)


def make_pass(epilogue: CtaEpilogue, width: int, what: str, half: int, free: bool) -> StorePass:
    """Returns the pass that stores "aux" or "out". `free`: the first buffers need no wait."""
    fresh = overlays_stages(epilogue.config, epilogue.size, epilogue.traits)
    return StorePass(
        aux=what == "aux",
        half=half,
        tma=epilogue.tma.aux if what == "aux" else epilogue.tma.c,
        subtiles=tuple(subtiles(epilogue.config, epilogue.size, width)),
        overlays_stages=fresh,
        waits=not fresh,
        waits_first=not fresh and not free,
    )


@cute.jit
def run_pass(
    tile: epilogue_math.EpilogueTile,
    stores: cutlass.Constexpr,
    source,
    pipeline: GroupPipeline,
    state: PipelineState,
    operations: cutlass.Constexpr,
):
    """Stores one matrix in rounds. A round fills every buffer with a subtile and stores them as one
    bulk group.
    """
    count, together = len(stores.subtiles), tile.epilogue.config.epilogue_stages
    states = ()
    if cutlass.const_expr(source is not None):
        states = epilogue_load.stage_states(source, pipeline, state)
    for first in cutlass.range_constexpr(0, count, together):
        last = min(first + together, count)
        for number in cutlass.range_constexpr(first, last):
            load_source = None
            if cutlass.const_expr(source is not None):
                load_source = functools.partial(
                    epilogue_load.read_subtile,
                    source,
                    tile.consumer,
                    pipeline,
                    states,
                    number,
                    stores.subtiles,
                )
            write_subtile(tile, stores, number, first, operations, load_source)
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_consumer(tile.consumer.index)
        store_round(tile, stores, first, last)
    if cutlass.const_expr(source is not None):
        epilogue_load.release_rest(source, tile.consumer, pipeline, states, count)


@cute.jit
def write_subtile(
    tile: epilogue_math.EpilogueTile,
    stores: cutlass.Constexpr,
    number: cutlass.Constexpr,
    first: cutlass.Constexpr,
    operations: cutlass.Constexpr,
    load_source: cutlass.Constexpr,
):
    """One consumer: computes subtile `number` of the round that begins with `first`, rounds it and
    writes it to its buffer. Where there are operations, they are computed before the wait for
    buffers.
    """
    writer, plain = tile.consumer.writer, tile.epilogue.traits.plain
    waits = number == first and (stores.waits if first > 0 else stores.waits_first)
    if cutlass.const_expr(waits and plain):
        await_buffers(tile.consumer)
    i, start = stores.subtiles[number]
    end = (i, start + writer.columns)
    if cutlass.const_expr(stores.aux):
        operations.compute_x(stores.half, end)
    else:
        operations.compute_outputs(end)
    rounded = round_subtile(tile, stores, i, start, load_source)
    if cutlass.const_expr(waits and not plain):
        pin(rounded)
        await_buffers(tile.consumer)
    buffer = number if stores.overlays_stages else number - first
    cute.copy(writer.store_copy, rounded, writer.tSsC[None, None, None, buffer])


@cute.jit
def store_round(
    tile: epilogue_math.EpilogueTile,
    stores: cutlass.Constexpr,
    first: cutlass.Constexpr,
    last: cutlass.Constexpr,
):
    """One consumer: stores subtiles `first` to `last`, which all threads have written and fenced.
    One thread starts the TMA stores. Where a group of a grouped product ends inside the tile, the
    rows behind it are another group's, and the threads copy those of this one instead. They also do
    where the rows of C are scattered.
    """
    config, work = tile.epilogue.config, tile.work
    if cutlass.const_expr(row_stores.scatters(tile, stores)):
        for number in cutlass.range_constexpr(first, last):
            row_stores.store_rows(tile, stores, number, number - first)
    elif cutlass.const_expr(work.end_row is not None):
        if work.first_row(config.tile_m) + config.tile_m > work.end_row:
            for number in cutlass.range_constexpr(first, last):
                row_stores.store_rows(tile, stores, number, number - first)
        else:
            store_round_by_tma(tile, stores, first, last)
    else:
        store_round_by_tma(tile, stores, first, last)


@cute.jit
def store_round_by_tma(
    tile: epilogue_math.EpilogueTile,
    stores: cutlass.Constexpr,
    first: cutlass.Constexpr,
    last: cutlass.Constexpr,
):
    """The issuing thread of a consumer: starts the stores of `store_round`."""
    epilogue, consumer, work = tile.epilogue, tile.consumer, tile.work
    config, writer, tma = epilogue.config, consumer.writer, stores.tma
    if consumer.context.warp % 4 == 0:
        for number in cutlass.range_constexpr(first, last):
            i, start = stores.subtiles[number]
            row = (
                work.first_row(config.tile_m)
                + (i * config.warpgroups_per_tile + consumer.warpgroup_in_tile) * 64
            )
            gC = tile_of(
                tma.tensor,
                epilogue.traits.batched,
                row,
                work.column + start,
                work.matrix,
                (64, writer.columns),
                stores.half,
            )
            sC, gC = cute.group_modes(writer.buffers, 0, 2), cute.group_modes(gC, 0, 2)
            tCsC, tCgC = cpasync.tma_partition(tma.atom, 0, cute.make_layout(1), sC, gC)
            buffer = number if stores.overlays_stages else number - first
            cute.copy(tma.atom, tCsC[None, buffer], tCgC)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def await_buffers(consumer: Consumer):
    """One consumer: waits until its buffers may be written again."""
    await_stores(consumer)
    sync_consumer(consumer.index)


@cute.jit
def await_stores(consumer: Consumer):
    """One consumer: waits until its last stores have read their buffers. All its threads know this
    after their next barrier.
    """
    if consumer.context.warp % 4 == 0:
        wait_stores_read()


def pin(fragment):
    """Forces these registers to be computed here; otherwise compilers may move the computation
    behind a wait.
    """
    words = cute.recast_tensor(fragment, Uint32)
    for v in range(cute.size(words)):
        words[v] = cute.arch.inline_ptx(
            "mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[words[v]]
        )


@cute.jit
def round_subtile(
    tile: epilogue_math.EpilogueTile,
    stores: cutlass.Constexpr,
    i: cutlass.Constexpr,
    start: cutlass.Constexpr,
    load_source: cutlass.Constexpr,
):
    """Rounds the subtile of row group i, starting at column `start`, to C's dtype. `load_source`
    returns the values of the epilogue's source, where there is one.
    """
    writer, dtype = tile.consumer.writer, tile.epilogue.dtype
    values = tile.values(tile.registers(i, start, writer.columns, stores.half))
    if cutlass.const_expr(not stores.aux):
        epilogue_math.add_source(tile.epilogue, values, load_source)
    rounded = cute.make_rmem_tensor(writer.fragment_shape, dtype)
    if cutlass.const_expr(tile.epilogue.traits.scale_out != ""):
        block_quantize.quantize(tile, values, i, start, rounded)
        return rounded
    rounded.store(cute.make_tensor(values.iterator, rounded.layout).load().to(dtype))
    return rounded

"""C of `hopper.gemm` on its way through shared memory: as `staging`, for tiles of any width, C by
rows or by columns.

A slab has 64 rows, and as many columns as a row of 128 bytes holds or the narrowest tile has. Where
slabs do not divide a tile's width the last overlaps its neighbour: both write the same values
there, and one TMA box serves every width. The contract of a slab's memory is `staging`'s.

What is done to sums on the way is `transform`'s; what lies as C does comes as `fetched` says.
"""

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.utils import hopper_helpers

from ..core import epilogue_store
from ..core.config import WARPGROUP
from . import epilogue_load as fetched
from . import epilogue_math
from .epilogue_tile import places, slab_columns, tile_of

ALL = 8  # the named barrier of all consumers

_STORE, _LOAD = warp.StMatrix8x8x16bOp, warp.LdMatrix8x8x16bOp
_ROWS = warpgroup.SmemLayoutAtomKind
_BY_BYTES = {128: _ROWS.K_SW128, 64: _ROWS.K_SW64, 32: _ROWS.K_SW32, 16: _ROWS.K_INTER}


def buffers(config, dtype, form) -> int:
    """Slabs of one consumer in shared memory. A CTA that has one tile lays all of them over the
    ring, whose slots it has read by then; they fit unless K's slices are few and C's elements wide.
    Not where other slabs lie there.
    """
    slabs = max(len(places(config, dtype, width)) for width in config.widths)
    room = slabs * config.consumers * 64 * slab_columns(config, dtype) * dtype.width // 8
    fits = room <= config.slots * config.slot_bytes and not form.source and form.aux != "staged"
    return slabs if form.single_wave and fits else config.store_buffers


def over_ring(config, dtype, form) -> bool:
    return bool(buffers(config, dtype, form) > config.store_buffers)


def maps(config, c, aux, fetched, form):
    """Host: atoms and tensors of the TMA store of C, of x if it leaves so, and of the loads of what
    is fetched (or None), and the layouts of a slab and of all, (64, columns, BUFFER of all
    consumers).
    """
    dtype = c.element_type
    columns = slab_columns(config, dtype)
    kind = _ROWS.MN_SW128 if form.by_columns else _BY_BYTES[columns * dtype.width // 8]
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    held = buffers(config, dtype, form) * config.consumers
    slabs = cute.tile_to_shape(atom, (64, columns, held), (0, 1, 2))
    one = cute.tile_to_shape(atom, (64, columns), (0, 1))

    def made(operation, tensor):
        return cpasync.make_tiled_tma_atom(operation, tensor, one, (64, columns))

    store = cpasync.CopyBulkTensorTileS2GOp()
    stored = made(store, c)
    written = made(store, aux) if form.aux == "staged" else (None, None)
    read = made(cpasync.CopyBulkTensorTileG2SOp(), fetched) if form.source else (None, None)
    return *stored, *written, *read, one, slabs


def place(k, config, smem, made, ring):
    """Adds the slabs of all consumers to `k`, in shared memory of their own or in that of the
    ring's slots, `ring`.
    """
    (
        k.tma_c,
        k.gmem_c,
        k.tma_aux,
        k.gmem_aux,
        k.tma_fetched,
        k.gmem_fetched,
        k.slab_layout,
        slabs,
    ) = made
    dtype = k.mC.element_type
    if over_ring(config, dtype, k.form):
        k.sC = cute.make_tensor(cute.recast_ptr(ring, slabs.inner, dtype), slabs.outer)
    else:
        k.sC = smem.allocate_tensor(dtype, slabs.outer, 1024, swizzle=slabs.inner)


def become_writer(k, config, consumer, by_columns: bool):
    """Adds to `k` how one consumer's threads write slabs, and read them: by matrices of 16 bits,
    pairs of 32.
    """
    dtype = k.mC.element_type
    columns = k.slab_columns = slab_columns(config, dtype)
    if dtype.width == 16:
        operations = [kind(by_columns, 4 if columns % 16 == 0 else 2) for kind in (_STORE, _LOAD)]
        atom, back = (cute.make_copy_atom(operation, dtype) for operation in operations)
    else:
        atom = back = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=64)
    major = cute.nvgpu.OperandMajorMode.K
    kind = k.operand_type
    mma = hopper_helpers.make_trivial_tiled_mma(
        kind, kind, major, major, Float32, (1, 1, 1), (64, columns)
    )
    lie = cute.make_tiled_copy_C_atom(atom, mma)
    k.to_shared, k.from_shared = (
        cute.make_tiled_copy_S(atom, lie),
        cute.make_tiled_copy_S(back, lie),
    )
    thread = k.to_shared.get_slice(k.tidx % WARPGROUP)
    k.slabs = cute.local_tile(k.sC, (64, columns, buffers(config, dtype, k.form)), (0, 0, consumer))
    k.tSsC = thread.partition_D(k.slabs)  # (CPY, CPY_M, CPY_N, BUFFER)
    k.slab_registers = cute.shape(thread.partition_S(k.slabs))[:3]


@cute.jit
def settle(k, config: cutlass.Constexpr):
    """Every consumer, its products done: where C will lie over the ring, waits until all of them
    have read it. Not in `store`, for consumers that share a tile may not all come there: whoever
    adds the pieces of K last does.
    """
    if cutlass.const_expr(config.sharing > 1 and over_ring(config, k.mC.element_type, k.form)):
        cute.arch.barrier(barrier_id=ALL, number_of_threads=config.sharing * WARPGROUP)


@cute.jit
def store(
    k,
    whole: cutlass.Constexpr,
    config: cutlass.Constexpr,
    work,
    width: cutlass.Constexpr,
    ring,
    slot,
    steps: cutlass.Constexpr,
):
    """One consumer: its rows of the tile, x first where a call asks for it. `whole`: the kernel's
    config; `slot`: the first of those in which something was fetched, if anything was; `steps`: a
    `transform.Steps`.
    """
    free = k.form.staggered_tail
    if cutlass.const_expr(k.form.aux == "staged"):
        for half in cutlass.range_constexpr(2 if k.form.gated else 1):
            store_pass(k, whole, config, work, width, ring, slot, steps, "aux", half, free)
            free = False
    store_pass(k, whole, config, work, width, ring, slot, steps, "out", 0, free)


@cute.jit
def store_pass(
    k,
    whole: cutlass.Constexpr,
    config: cutlass.Constexpr,
    work,
    width: cutlass.Constexpr,
    ring,
    slot,
    steps: cutlass.Constexpr,
    what: cutlass.Constexpr,
    half: cutlass.Constexpr,
    free: cutlass.Constexpr,
):
    """Outputs, or a half of x, in rounds of as many slabs as there are buffers; a round leaves as
    one group of stores. Slabs over the ring are written once, after `settle`. `free`: buffers are.
    What takes steps is made before buffers are waited for.
    """
    dtype, together = k.mC.element_type, config.store_buffers
    columns, slabs = slab_columns(config, dtype), places(config, dtype, width)
    fresh = over_ring(config, dtype, k.form)
    tma, gmem = (k.tma_c, k.gmem_c) if what == "out" else (k.tma_aux, k.gmem_aux)
    fetches = what == "out" and k.form.source != ""
    turns = fetched.turns(k, whole, config, ring, slot) if fetches else ()
    take = steps.outputs if what == "out" else functools.partial(steps.x, half)
    issuer = k.warp % 4 == 0
    for first in cutlass.range_constexpr(0, len(slabs), together):
        batch, buffer = slabs[first : first + together], first if fresh else 0
        waits = not (fresh or (free and first == 0))
        if cutlass.const_expr(waits and k.form.plain):
            await_buffers(k)
        for n in cutlass.range_constexpr(len(batch)):
            (i, start), come = batch[n], None
            take((i, start + columns))
            if cutlass.const_expr(fetches):
                come = functools.partial(
                    fetched.take, k, whole, config, ring, turns, first + n, slabs
                )
            slab = rounded(k, config, batch[n], what, half, come)
            if cutlass.const_expr(n == 0 and waits and not k.form.plain):
                pin(slab)
                await_buffers(k)
            cute.copy(k.to_shared, slab, k.tSsC[None, None, None, buffer + n])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=k.consumer + 1, number_of_threads=WARPGROUP)
        if issuer:
            for n in cutlass.range_constexpr(len(batch)):
                row = work.m * config.tile_m + (batch[n][0] * config.sharing + k.share) * 64
                gC = tile_of(
                    k, gmem, row, work.column + batch[n][1], work.matrix, (64, columns), half
                )
                sC, gC = cute.group_modes(k.slabs, 0, 2), cute.group_modes(gC, 0, 2)
                tCsC, tCgC = cpasync.tma_partition(tma, 0, cute.make_layout(1), sC, gC)
                cute.copy(tma, tCsC[None, buffer + n], tCgC)
            cute.arch.cp_async_bulk_commit_group()
    if cutlass.const_expr(fetches):
        fetched.skip(k, whole, config, ring, turns, len(slabs))


@cute.jit
def await_buffers(k):
    free_buffers(k)
    cute.arch.barrier(barrier_id=k.consumer + 1, number_of_threads=WARPGROUP)


@cute.jit
def free_buffers(k):
    """One consumer: what it stored last has left its slabs, as all know after the next barrier."""
    if k.warp % 4 == 0:
        epilogue_store.finish()


def pin(slab):
    """What follows comes after these registers are made; compilers move that behind a wait if they
    may.
    """
    words = cute.recast_tensor(slab, Uint32)
    for v in range(cute.size(words)):
        words[v] = cute.arch.inline_ptx(
            "mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[words[v]]
        )


@cute.jit
def rounded(
    k,
    config: cutlass.Constexpr,
    slab: cutlass.Constexpr,
    what: cutlass.Constexpr,
    half: cutlass.Constexpr,
    come: cutlass.Constexpr,
):
    """A slab in C's dtype, of outputs or of a half of x. `come`: as `transform.finished`
    takes it.
    """
    i, start = slab
    which = epilogue_math.registers(
        config, k.width, i, start, slab_columns(config, k.mC.element_type), half
    )
    values = epilogue_math.values_of(k, which)
    if cutlass.const_expr(what == "out"):
        epilogue_math.finished(k, values, come)
    made = cute.make_rmem_tensor(k.slab_registers, k.mC.element_type)
    made.store(cute.make_tensor(values.iterator, made.layout).load().to(k.mC.element_type))
    return made

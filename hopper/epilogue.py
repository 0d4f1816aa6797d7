"""C of `hopper.gemm` on its way through shared memory: as `staging`, for tiles of any width, C by rows or by columns.

A slab has 64 rows, and as many columns as a row of 128 bytes holds or the narrowest tile has. Where slabs do not divide
a tile's width the last overlaps its neighbour: both write the same values there, and one TMA box serves every width.
The contract of a slab's memory is `staging`'s.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.utils import hopper_helpers

from . import staging
from .config import WARPGROUP

ALL = 8  # the named barrier of all consumers

_ROWS = warpgroup.SmemLayoutAtomKind
_BY_BYTES = {128: _ROWS.K_SW128, 64: _ROWS.K_SW64, 32: _ROWS.K_SW32, 16: _ROWS.K_INTER}


def slab_columns(config, dtype) -> int:
    """Columns of a slab: a power of two of 16-byte pieces."""
    columns: int = 1024 // dtype.width
    while columns > min(config.widths):
        columns //= 2
    return columns


def starts(width: int, columns: int) -> list[int]:
    """The first column of each slab of a tile so many columns wide."""
    found = list(range(0, width - columns + 1, columns))
    return found if width % columns == 0 else [*found, width - columns]


def places(config, dtype, width: int) -> list[tuple[int, int]]:
    """Row group and first column of each slab that a consumer stores of a tile so many columns wide."""
    tall = config.tile_m // (64 * config.sharing)
    return [(i, start) for i in range(tall) for start in starts(width, slab_columns(config, dtype))]


def buffers(config, dtype, once: bool) -> int:
    """Slabs of one consumer in shared memory. A CTA that has one tile lays all of them over the ring, whose slots it
    has read by then; they fit unless K's slices are few and C's elements wide.
    """
    slabs = max(len(places(config, dtype, width)) for width in config.widths)
    room = slabs * config.consumers * 64 * slab_columns(config, dtype) * dtype.width // 8
    return slabs if once and room <= config.slots * config.slot_bytes else config.store_buffers


def over_ring(config, dtype, once: bool):
    return buffers(config, dtype, once) > config.store_buffers


def maps(config, c, form):
    """Host: the atom and tensor of C's TMA store, and the slabs' layout (64, columns, BUFFER of all consumers)."""
    dtype = c.element_type
    columns = slab_columns(config, dtype)
    kind = _ROWS.MN_SW128 if form.by_columns else _BY_BYTES[columns * dtype.width // 8]
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    held = buffers(config, dtype, form.once) * config.consumers
    slabs = cute.tile_to_shape(atom, (64, columns, held), (0, 1, 2))
    one = cute.tile_to_shape(atom, (64, columns), (0, 1))
    return *cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), c, one, (64, columns)), slabs


def place(k, config, smem, made, ring):
    """Adds the slabs of all consumers to `k`, in shared memory of their own or in that of the ring's slots, `ring`."""
    k.tma_c, k.gmem_c, slabs = made
    dtype = k.mC.element_type
    if over_ring(config, dtype, k.once):
        k.sC = cute.make_tensor(cute.recast_ptr(ring, slabs.inner, dtype), slabs.outer)
    else:
        k.sC = smem.allocate_tensor(dtype, slabs.outer, 1024, swizzle=slabs.inner)


def become_writer(k, config, consumer, by_columns: bool):
    """Adds to `k` how one consumer's threads write its slabs: stmatrix for 16 bits, pairs for 32."""
    dtype = k.mC.element_type
    columns = slab_columns(config, dtype)
    if dtype.width == 16:
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(by_columns, 4 if columns % 16 == 0 else 2), dtype)
    else:
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=64)
    major = cute.nvgpu.OperandMajorMode.K
    kind = k.operand_type
    mma = hopper_helpers.make_trivial_tiled_mma(kind, kind, major, major, Float32, (1, 1, 1), (64, columns))
    k.to_shared = cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(atom, mma))
    thread = k.to_shared.get_slice(k.tidx % WARPGROUP)
    k.slabs = cute.local_tile(k.sC, (64, columns, buffers(config, dtype, k.once)), (0, 0, consumer))
    k.tSsC = thread.partition_D(k.slabs)  # (CPY, CPY_M, CPY_N, BUFFER)
    k.slab_registers = cute.shape(thread.partition_S(k.slabs))[:3]


@cute.jit
def settle(k, config: cutlass.Constexpr):
    """Every consumer, its products done: where C will lie over the ring, waits until all of them have read it. Not in
    `store`, for consumers that share a tile may not all come there: whoever adds the pieces of K last does.
    """
    if cutlass.const_expr(config.sharing > 1 and over_ring(config, k.mC.element_type, k.once)):
        cute.arch.barrier(barrier_id=ALL, number_of_threads=config.sharing * WARPGROUP)


@cute.jit
def store(k, config: cutlass.Constexpr, work, width: cutlass.Constexpr):
    """One consumer: its rows of the tile in rounds of as many slabs as there are buffers; a round leaves as one group
    of stores. Slabs over the ring are written once, after `settle`.
    """
    columns = slab_columns(config, k.mC.element_type)
    slabs, together = places(config, k.mC.element_type, width), config.store_buffers
    fresh = over_ring(config, k.mC.element_type, k.once)
    issuer = k.warp % 4 == 0
    for first in cutlass.range_constexpr(0, len(slabs), together):
        batch, buffer = slabs[first : first + together], first if fresh else 0
        if cutlass.const_expr(not fresh):
            if issuer:
                staging.finish()
            cute.arch.barrier(barrier_id=k.consumer + 1, number_of_threads=WARPGROUP)
        for i in cutlass.range_constexpr(len(batch)):
            slab = rounded(k, config, batch[i][0], batch[i][1], width)
            cute.copy(k.to_shared, slab, k.tSsC[None, None, None, buffer + i])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=k.consumer + 1, number_of_threads=WARPGROUP)
        if issuer:
            for i in cutlass.range_constexpr(len(batch)):
                row = work.m * config.tile_m + (batch[i][0] * config.sharing + k.share) * 64
                gC = tile_of(k, k.gmem_c, row, work.column + batch[i][1], work.matrix, (64, columns))
                sC, gC = cute.group_modes(k.slabs, 0, 2), cute.group_modes(gC, 0, 2)
                tCsC, tCgC = cpasync.tma_partition(k.tma_c, 0, cute.make_layout(1), sC, gC)
                cute.copy(k.tma_c, tCsC[None, buffer + i], tCgC)
            cute.arch.cp_async_bulk_commit_group()


def tile_of(k, tensor, row, column, matrix, shape):
    """The part of C, or of a tensor of its shape, from (row, column) of one matrix on."""
    if k.batched:
        return cute.local_tile(cute.domain_offset((row, column, 0), tensor), shape, (0, 0, matrix))
    return cute.local_tile(cute.domain_offset((row, column), tensor), shape, (0, 0))


@cute.jit
def rounded(k, config: cutlass.Constexpr, i: cutlass.Constexpr, start: cutlass.Constexpr, width: cutlass.Constexpr):
    """The slab of row group i from column `start` on, in C's dtype. Accumulators lie ((2, 2, V), MMA_M, MMA_N): eight
    columns of 64 rows are four registers.
    """
    dtype, mma_n = k.mC.element_type, config.mma_n or width
    tall = config.tile_m // (64 * config.sharing)
    exact = cute.make_rmem_tensor(k.slab_registers, Float32)
    for v in cutlass.range_constexpr(cute.size(exact)):
        column = start + v // 4 * 8
        exact[v] = k.acc[column % mma_n // 2 + mma_n // 2 * (i + tall * (column // mma_n)) + v % 4]
    slab = cute.make_rmem_tensor(k.slab_registers, dtype)
    slab.store(exact.load().to(dtype))
    return slab


@cute.jit
def scale(k, config: cutlass.Constexpr, work, width: cutlass.Constexpr):
    """Consumers: acc = alpha · acc + beta · C in fp32; C is not read where there is none."""
    acc = k.acc
    row, shape = work.m * config.tile_m, (config.tile_m, width)
    coordinates = cute.make_identity_tensor(k.extents)
    thread = k.mma.get_slice(k.consumer_thread)
    tile = cute.local_tile(cute.domain_offset((row, work.column), coordinates), shape, (0, 0))
    places = thread.partition_C(tile)
    for v in cutlass.range(cute.size(acc), unroll_full=True):
        scaled = k.alpha * acc[v]
        if cutlass.const_expr(k.addend is not None):
            added = Float32(0.0)
            if cute.elem_less(places[v], k.extents):
                added = k.beta * k.addend[places[v]].to(Float32)
            scaled += added
        acc[v] = scaled

"""C on its way through shared memory: slabs of 64 rows and 128 bytes that a consumer writes and TMA
stores.

Contract of a slab: the consumer's 128 threads write it, each fences its writes for the async proxy,
a named barrier of those 128 (its number is the consumer's, from 1) follows, and the first lane of
the consumer's first warp issues the TMA store. Before the slab is written again, that lane waits
until the store has read it, and the barrier follows.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from .config import WARPGROUP
from .phase_clock import STORE, lap


def slab_shape(dtype):
    """Rows and columns of a slab."""
    return 64, 1024 // dtype.width


def maps(config, c):
    """Host: the atom and tensor of C's TMA store, and the layout (64 · consumers, columns, BUFFER)
    of the slabs.
    """
    shape = slab_shape(c.element_type)
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, c.element_type)
    slabs = cute.tile_to_shape(
        atom, (64 * config.consumers, shape[1], config.store_buffers), (0, 1, 2)
    )
    one = cute.tile_to_shape(atom, shape, (0, 1))
    return *cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), c, one, shape), slabs


def place(k, smem, made):
    """Adds the slabs of all consumers to `k`, in shared memory."""
    k.tma_c, mC, slabs = made
    dtype = k.mC.element_type
    k.sC = smem.allocate_tensor(dtype, slabs.outer, 1024, swizzle=slabs.inner)
    k.gC = cute.local_tile(mC, slab_shape(dtype), (None, None))  # (64, columns, RestM, RestN)


def become_writer(k, config, consumer):
    """Adds to `k` how one consumer's threads write its slabs: stmatrix for 16 bits, pairs
    for 32.
    """
    dtype = k.mC.element_type
    if dtype.width == 16:
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    else:
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=64)
    k.to_shared = cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(atom, k.mma))
    thread = k.to_shared.get_slice(k.consumer_thread)
    k.tSsC = thread.partition_D(k.sC)  # (CPY, CPY_M, CPY_N, BUFFER)
    k.slab_registers = cute.shape(thread.partition_S(k.sC))[:3]
    own = cute.local_tile(k.sC, (*slab_shape(dtype), config.store_buffers), (consumer, 0, 0))
    k.tCsC, k.tCgC = cpasync.tma_partition(
        k.tma_c, 0, cute.make_layout(1), cute.group_modes(own, 0, 2), cute.group_modes(k.gC, 0, 2)
    )


@cute.jit
def store(k, config: cutlass.Constexpr, m, n):
    """One consumer: its rows of tile (m, n) in rounds of as many slabs as there are buffers; a
    round leaves as one group of stores.
    """
    tall = config.tile_m // (64 * config.consumers)
    wide = config.tile_n // slab_shape(k.mC.element_type)[1]
    slabs = [(i, j) for i in range(tall) for j in range(wide)]
    issuer = k.warp % 4 == 0
    for first in cutlass.range_constexpr(0, len(slabs), config.store_buffers):
        batch = slabs[first : first + config.store_buffers]
        if issuer:
            finish()
        cute.arch.barrier(barrier_id=k.consumer + 1, number_of_threads=WARPGROUP)
        for buffer in cutlass.range_constexpr(len(batch)):
            cute.copy(
                k.to_shared, rounded(k, config, *batch[buffer]), k.tSsC[None, None, None, buffer]
            )
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=k.consumer + 1, number_of_threads=WARPGROUP)
        if issuer:
            for buffer in cutlass.range_constexpr(len(batch)):
                row = (m * tall + batch[buffer][0]) * config.consumers + k.consumer
                cute.copy(
                    k.tma_c, k.tCsC[None, buffer], k.tCgC[None, row, n * wide + batch[buffer][1]]
                )
            cute.arch.cp_async_bulk_commit_group()
    lap(k, STORE)


@cute.jit
def rounded(k, config: cutlass.Constexpr, i: cutlass.Constexpr, j: cutlass.Constexpr):
    """Slab (i, j) of the accumulator in C's dtype: accumulators lie ((2, 2, V), MMA_M, MMA_N), a
    column is half one.
    """
    dtype, mma_n = k.mC.element_type, config.instruction_n
    column, tall = j * slab_shape(dtype)[1], config.tile_m // (64 * config.consumers)
    first = column % mma_n // 2 + mma_n // 2 * (i + tall * (column // mma_n))
    exact = cute.make_rmem_tensor(k.slab_registers, Float32)
    for v in cutlass.range_constexpr(cute.size(exact)):
        exact[v] = k.acc[first + v]
    slab = cute.make_rmem_tensor(k.slab_registers, dtype)
    slab.store(exact.load().to(dtype))
    return slab


@cute.jit
def finish():
    """Waits until every store that this thread issued has read its slab."""
    cute.arch.cp_async_bulk_wait_group(0, read=True)

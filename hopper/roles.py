"""What threads do for one tile: load a slice, multiply a slice, store the accumulator.

`k` is a namespace of facts known while tracing: atoms, partitioned tensors, thread coordinates.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, Uint64
from cutlass.cute.nvgpu import warpgroup


@cute.jit
def load_slice(k, ring, slot, m: Int32, n: Int32, at: Int32):
    """One warp: announce a slot's bytes and start the TMA loads of k-slice `at` of row tile m and column tile n."""
    ring.announce(slot)
    full = ring.full + slot.index
    cute.copy(k.tma_a, k.tAgA[None, m, at], k.tAsA[None, slot.index], tma_bar_ptr=full)
    cute.copy(k.tma_b, k.tBgB[None, n, at], k.tBsB[None, slot.index], tma_bar_ptr=full)


@cute.jit
def multiply_slot(k, index: Int32):
    """One warpgroup: acc += A·B of one slot, as one wgmma group, left in flight."""
    warpgroup.fence()
    for kb in cutlass.range_constexpr(cute.size(k.tCrA, mode=[2])):
        cute.gemm(k.mma, k.acc, k.tCrA[None, None, kb, index], k.tCrB[None, None, kb, index], k.acc)
    warpgroup.commit_group()


@cute.jit
def store_registers(k, m: Int32, n: Int32):
    """Each thread rounds what it holds to C's dtype and writes it, in pairs where C allows; edges are predicated."""
    tile = (k.tile_m, k.tile_n)
    dtype = k.mC.element_type
    thread = k.mma.get_slice(k.tidx)
    tCgC = thread.partition_C(cute.local_tile(k.mC, tile, (m, n)))  # ((2, 2, bN/8), MMA_M, MMA_N)
    tCcC = thread.partition_C(cute.local_tile(cute.make_identity_tensor(k.mC.shape), tile, (m, n)))
    tCrC = cute.make_rmem_tensor(k.acc.shape, dtype)
    tCrC.store(k.acc.load().to(dtype))
    if cutlass.const_expr(k.pairs):
        pair = Uint32 if dtype.width == 16 else Uint64
        tCgC, tCrC = cute.recast_tensor(tCgC, pair), cute.recast_tensor(tCrC, pair)
    width = cute.size(tCcC) // cute.size(tCrC)
    for i in cutlass.range(cute.size(tCrC), unroll_full=True):
        if cute.elem_less(tCcC[i * width], k.mC.shape):
            tCgC[i] = tCrC[i]

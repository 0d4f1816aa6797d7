"""What threads do for one tile: load its slices, multiply them, store the accumulator.

`k` is a namespace of facts known while tracing: atoms, partitioned tensors, thread coordinates.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cute.nvgpu import warpgroup

from .phase_clock import LOAD, STORE, TENSOR, WAIT, lap


@cute.jit
def load_slice(k, ring, slot, m: Int32, n: Int32, at: Int32):
    """One warp: start the TMA loads of k-slice `at` of row tile m and column tile n into a slot
    that was acquired.
    """
    full = ring.full + slot.index
    cute.copy(
        k.tma_a,
        k.tAgA[None, m, at],
        k.tAsA[None, slot.index],
        tma_bar_ptr=full,
        mcast_mask=k.mask_a,
    )
    cute.copy(
        k.tma_b,
        k.tBgB[None, n, at],
        k.tBsB[None, slot.index],
        tma_bar_ptr=full,
        mcast_mask=k.mask_b,
    )


@cute.jit
def load_tile(k, ring, slot, m: Int32, n: Int32):
    """Producer warp: all slices of one tile through the ring. Returns the slot after the last."""
    for at in cutlass.range(k.k_tiles, unroll=1):
        ring.acquire(slot)
        lap(k, WAIT)
        load_slice(k, ring, slot, m, n, at)
        lap(k, LOAD)
        slot = ring.next(slot)
    return slot


@cute.jit
def multiply_slot(k, index: Int32, overwrite: cutlass.Constexpr = False):
    """Consumers: acc += A·B of one slot, or acc = A·B, as one wgmma group, left in flight."""
    warpgroup.fence()
    for kb in cutlass.range_constexpr(cute.size(k.tCrA, mode=[2])):
        mma = k.mma_overwriting if cutlass.const_expr(overwrite and kb == 0) else k.mma
        cute.gemm(mma, k.acc, k.tCrA[None, None, kb, index], k.tCrB[None, None, kb, index], k.acc)
    warpgroup.commit_group()


@cute.jit
def multiply_slots(
    k, ring, slot, count: Int32, in_flight: cutlass.Constexpr, overwrite: cutlass.Constexpr
):
    """Consumers: `count` slices of one tile, the last `in_flight` groups still running at the end.
    Returns the slot after the last, and the last one's index.

    A slot is released when its own group is done; with one group in flight that is one slot later.
    `overwrite`: the first product replaces what the accumulator holds.
    """
    previous, rest = slot.index, count
    if cutlass.const_expr(in_flight > 0 or overwrite):
        ring.wait(slot)
        lap(k, WAIT)
        multiply_slot(k, slot.index, overwrite)
        if cutlass.const_expr(in_flight == 0):
            warpgroup.wait_group(0)
            ring.release(slot.index)
        lap(k, TENSOR)
        slot, rest = ring.next(slot), rest - 1
    for _ in cutlass.range(rest, unroll=1):
        ring.wait(slot)
        lap(k, WAIT)
        multiply_slot(k, slot.index)
        warpgroup.wait_group(in_flight)
        ring.release(previous if cutlass.const_expr(in_flight > 0) else slot.index)
        lap(k, TENSOR)
        previous = slot.index
        slot = ring.next(slot)
    return slot, previous


@cute.jit
def multiply_promoted(k, ring, slot, count: Int32):
    """As `multiply_slots`, of fp8: tensor cores keep 14 bits of a sum, so each slot's is one of its
    own, added to the accumulator in fp32 while the other consumer multiplies. Returns the slot
    after the last.
    """
    acc, own = k.acc, k.own.acc
    acc.fill(0.0)
    for _ in cutlass.range(count, unroll=1):
        ring.wait(slot)
        multiply_slot(k.own, slot.index, True)
        warpgroup.wait_group(0)
        ring.release(slot.index)
        for v in cutlass.range_constexpr(cute.size(acc)):
            acc[v] += own[v]
        slot = ring.next(slot)
    return slot


@cute.jit
def drain(k, ring, previous: Int32, in_flight: cutlass.Constexpr):
    """Consumers: the accumulator is complete, the last slot released."""
    if cutlass.const_expr(in_flight > 0):
        warpgroup.wait_group(0)
        ring.release(previous)
        lap(k, TENSOR)


@cute.jit
def multiply_tile(k, ring, slot, in_flight: cutlass.Constexpr, overwrite: cutlass.Constexpr):
    """Consumers: all slices of one tile, the accumulator complete at the end. Returns the slot
    after the last.
    """
    slot, previous = multiply_slots(k, ring, slot, k.k_tiles, in_flight, overwrite)
    drain(k, ring, previous, in_flight)
    return slot


@cute.jit
def swap(x, y, upper, distance: cutlass.Constexpr):
    """Between two lanes `distance` apart: the upper one's x for the lower one's y."""
    received = cute.arch.shuffle_sync_bfly(x if upper else y, distance)
    return received if upper else x, y if upper else received


@cute.jit
def gather_rows(rounded, lane):
    """The four lanes of a quad hold two neighbours each of eight columns; they trade until each
    holds all eight of another group of columns: 16 bytes of one row, where they had 4 of each.
    """
    words = cute.recast_tensor(rounded, Uint32)
    gathered = cute.make_rmem_tensor((cute.size(words),), Uint32)
    odd, high = lane & 1 == 1, lane & 2 == 2
    for v in cutlass.range_constexpr(cute.size(words) // 4):
        first = (
            v // 2 * 8 + v % 2
        )  # four groups of columns; within each, the row and the one eight below
        w0, w1, w2, w3 = words[first], words[first + 2], words[first + 4], words[first + 6]
        w0, w1 = swap(w0, w1, odd, 1)
        w2, w3 = swap(w2, w3, odd, 1)
        w0, w2 = swap(w0, w2, high, 2)
        w1, w3 = swap(w1, w3, high, 2)
        gathered[4 * v], gathered[4 * v + 1], gathered[4 * v + 2], gathered[4 * v + 3] = (
            w0,
            w1,
            w2,
            w3,
        )
    return cute.recast_tensor(gathered, rounded.element_type)


@cute.jit
def store_registers(k, m: Int32, n: Int32, width: cutlass.Constexpr, cache: cutlass.Constexpr):
    """Consumers: the accumulator to row tile m, column tile n of C, as `store_pieces`."""
    tile = (k.tile_m, k.tile_n)
    gC = cute.local_tile(k.mC, tile, (m, n))
    cC = cute.local_tile(cute.make_identity_tensor(k.mC.shape), tile, (m, n))
    store_pieces(k, gC, cC, k.mC.shape, width, cache)


@cute.jit
def store_pieces(k, gC, cC, shape, width: cutlass.Constexpr, cache: cutlass.Constexpr):
    """Consumers: each thread rounds what it holds to C's dtype and writes it to the tile `gC`,
    whose coordinates are `cC`, `width` elements of a row at a time (1, 2, or 8 of 16 bits); edges
    of `shape` are predicated. `cache` is the StoreCacheMode.
    """
    dtype = k.mC.element_type
    thread = k.mma.get_slice(k.consumer_thread)
    tCgC, tCcC = thread.partition_C(gC), thread.partition_C(cC)  # ((2, 2, V), MMA_M, MMA_N)
    tCrC = cute.make_rmem_tensor(k.acc.shape, dtype)
    tCrC.store(k.acc.load().to(dtype))
    right = Int32(0)  # columns from a lane's own first element to that of the vector it holds
    if cutlass.const_expr(width == 8):
        lane = k.tidx % 4
        tCrC, right = gather_rows(tCrC, lane), 6 * lane
    bits = width * dtype.width
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyR2GOp(), dtype, num_bits_per_copy=bits, store_cache_mode=cache
    )
    for j in cutlass.range(cute.size(tCrC) // width, unroll_full=True):
        first = (
            j // 2 * 16 + j % 2 * 2 if cutlass.const_expr(width == 8) else j * width
        )  # of the vector, in lane 0
        row, column = tCcC[first]
        if cute.elem_less((row, column + right), shape):
            at = tCgC.iterator + (cute.crd2idx(first, tCgC.layout) + right)
            at = cute.make_ptr(dtype, at.toint(), at.memspace, assumed_align=bits // 8)
            held = cute.make_tensor(tCrC.iterator + j * width, width)
            cute.copy(atom, held, cute.make_tensor(at, width))
    lap(k, STORE)

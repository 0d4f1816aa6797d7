"""Partial sums within a cluster: `cluster_k` CTAs have a part of K each, and send each other their
sums.

CTA r ends with the r-th part of the tile's columns, complete. The others' sums of it land in its
shared memory, where only they write, while it may still multiply: nothing goes through L2, and
nobody waits but for what it adds. Sums are added in the order of K, so bits do not depend on who
was first. A consumer warpgroup exchanges with the same warpgroup of its peers, over two barriers of
its own:

landed: 1 arrival a tile, by its first thread, which announces the bytes of all peers.
free: 1 by each peer a tile but the last, when the peer has read what this one sent, and may be sent
the next.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..core.config import WARPGROUP

VECTOR = 4  # floats that a thread sends at once; those of a warpgroup lie side by side


def place(k, smem, config, barriers):
    """Adds to `k` the memory in which sums land, and the barriers: landed of each consumer, then
    free.
    """
    k.received = cute.recast_ptr(smem.allocate(config.exchange_bytes, 16), dtype=Float32)
    k.exchanged = barriers


@cute.jit
def init(k, config: cutlass.Constexpr):
    """One thread, before anyone waits."""
    for consumer in cutlass.range_constexpr(config.sharing):
        cute.arch.mbarrier_init(k.exchanged + consumer, 1)
        cute.arch.mbarrier_init(k.exchanged + config.sharing + consumer, config.cluster_k - 1)


def registers(acc, parts: int, part: int) -> list[int]:
    """Accumulators of one part of the columns: they lie ((2, 2, V), MMA_M), part after part in each
    MMA_M.
    """
    rows = cute.size(acc, mode=[1])
    held = cute.size(acc) // rows
    return [
        row * held + part * (held // parts) + v for row in range(rows) for v in range(held // parts)
    ]


@cute.jit
def combine(k, config: cutlass.Constexpr, turn: Int32, turns: Int32):
    """One consumer, its products done: the sum of its part of the columns, as a list of registers.
    `turn`: of how many tiles, `turns`, this is which.
    """
    parts = config.cluster_k
    flat = cute.make_tensor(k.acc.iterator, cute.size(k.acc))
    words = cute.recast_tensor(flat, Int32)
    count = cute.size(k.acc) // parts
    lane, own = k.tidx % WARPGROUP, k.part_k
    room = k.received + k.share * ((parts - 1) * count * WARPGROUP)
    landed, free = k.exchanged + k.share, k.exchanged + config.sharing + k.share
    if lane == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(landed, (parts - 1) * count * WARPGROUP * 4)
    if cutlass.const_expr(not k.single_wave):
        await_free(free, turn)
    for part in cutlass.range_constexpr(parts):
        sent = registers(k.acc, parts, part)
        if own != part:
            slot = own - 1 if own > part else own
            for v in cutlass.range_constexpr(0, count, VECTOR):
                vector = tuple(words[sent[v + i]] for i in range(VECTOR))
                at = aligned(room + (slot * count + v) * WARPGROUP + lane * VECTOR)
                cute.arch.store_async_dsmem(at, vector, landed, k.first_part + part * config.group)
    cute.arch.mbarrier_wait(landed, turn & 1)
    sums = cute.make_rmem_tensor((count,), Float32)
    for v in cutlass.range_constexpr(0, count, VECTOR):
        at = room + v * WARPGROUP + lane * VECTOR
        theirs = [received(at + slot * (count * WARPGROUP)) for slot in range(parts - 1)]
        for i in cutlass.range_constexpr(VECTOR):
            mine = flat[registers(k.acc, parts, 0)[v + i]]
            for part in cutlass.range_constexpr(1, parts):
                mine = flat[registers(k.acc, parts, part)[v + i]] if own == part else mine
            total = mine if own == 0 else theirs[0][i]
            for part in cutlass.range_constexpr(1, parts):
                later = theirs[part - 1][i]  # of piece `part`, where that is behind this CTA's own
                if cutlass.const_expr(part < parts - 1):
                    later = later if own < part else theirs[part][i]
                total += mine if own == part else later
            sums[v + i] = total
    if cutlass.const_expr(not k.single_wave):
        cute.arch.barrier(barrier_id=k.consumer + 1, number_of_threads=WARPGROUP)
        peer = lane < parts and lane != own
        if peer and turn + 1 < turns:
            # what was read stays ahead of what the peer sends next
            cute.arch.fence_acq_rel_cluster()
            cute.arch.mbarrier_arrive(free, k.first_part + lane * config.group)
    return sums


@cute.jit
def await_free(free, turn: Int32):
    if turn > 0:
        cute.arch.mbarrier_wait(free, (turn - 1) & 1)


def received(pointer):
    """A vector of the sums that landed."""
    vector = cute.make_rmem_tensor((VECTOR,), Float32)
    cute.autovec_copy(cute.make_tensor(aligned(pointer), VECTOR), vector)
    return vector


def aligned(pointer):
    """A pointer to whole vectors."""
    return cute.make_ptr(Float32, pointer.toint(), pointer.memspace, assumed_align=4 * VECTOR)

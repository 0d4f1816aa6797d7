"""Split-K within a cluster: `cluster_k` CTAs each compute a part of K, and send their partial sums
to each other.

CTA r ends with the r-th part of the tile's columns, complete. The other CTAs' sums of that part
arrive in its shared memory, in a region that only they write, possibly while it still multiplies.
Nothing goes through L2, and a CTA waits only for the sums that it adds. Sums are added in the order
of K, so bits do not depend on which CTA finished first. A consumer warpgroup exchanges sums with
the same warpgroup of its peers, over two barriers of its own:

landed, 1 arrival per tile:
    the consumer's first thread arrives and announces the bytes of all peers;
    the peers' asynchronous stores subtract them as they arrive;
    the consumer's threads wait for the phase of this tile, then read.
free, cluster_k - 1 arrivals per tile, except the last:
    when a peer has read what was sent to it, one of its threads arrives here;
    before it sends the sums of any tile but the first, the consumer waits for the phase of the
    previous tile.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from outblas.hopper.gemm.records import ClusterReduction, Consumer, Cta
from outblas.hopper.parts.config import WARPGROUP
from outblas.hopper.parts.roles import sync_consumer

VECTOR = 4  # floats that a thread sends at once; the vectors of a warpgroup are contiguous


def alloc_smem(smem, config, barriers) -> ClusterReduction:
    """Allocates the memory that receives sums. `barriers`: landed of each consumer, then free of
    each.
    """
    received = cute.recast_ptr(smem.allocate(config.exchange_bytes, 16), dtype=Float32)
    return ClusterReduction(received, barriers)


@cute.jit
def init_barriers(reduction: ClusterReduction, config: cutlass.Constexpr):
    """Initialises the barriers. One thread calls it before any thread waits."""
    for consumer in cutlass.range_constexpr(config.warpgroups_per_tile):
        cute.arch.mbarrier_init(reduction.barriers + consumer, 1)
        cute.arch.mbarrier_init(
            reduction.barriers + config.warpgroups_per_tile + consumer, config.cluster_k - 1
        )


def registers(acc, parts: int, part: int) -> list[int]:
    """Returns the indices of the accumulators of one part of the columns. Accumulators have the
    layout ((2, 2, V), MMA_M), and the parts follow each other within each MMA_M.
    """
    rows = cute.size(acc, mode=[1])
    row_registers = cute.size(acc) // rows
    count = row_registers // parts
    return [row * row_registers + part * count + v for row in range(rows) for v in range(count)]


@cute.jit
def reduce(cta: Cta, consumer: Consumer, acc, iteration: Int32, iterations: Int32):
    """One consumer, after its products: returns the sum of its part of the columns in registers.
    `iteration` is the index of this tile among the CTA's `iterations` tiles.
    """
    config, reduction = cta.config, cta.cluster_reduction
    count = cute.size(acc) // config.cluster_k
    lane = consumer.context.thread % WARPGROUP
    peer_sums = (config.cluster_k - 1) * count * WARPGROUP
    received = reduction.received + consumer.warpgroup_in_tile * peer_sums
    landed = reduction.barriers + consumer.warpgroup_in_tile
    free = reduction.barriers + config.warpgroups_per_tile + consumer.warpgroup_in_tile
    if lane == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(landed, peer_sums * 4)
    if cutlass.const_expr(not cta.traits.single_wave):
        await_free(free, iteration)
    send_partials(cta, acc, received, landed, lane)
    cute.arch.mbarrier_wait(landed, iteration & 1)
    sums = add_partials(cta, acc, received, lane)
    if cutlass.const_expr(not cta.traits.single_wave):
        sync_consumer(consumer.index)
        release_peers(cta, free, lane, iteration + 1 < iterations)
    return sums


@cute.jit
def await_free(free, iteration: Int32):
    """Waits until the peers have read what was sent to them for the previous tile."""
    if iteration > 0:
        cute.arch.mbarrier_wait(free, (iteration - 1) & 1)


@cute.jit
def send_partials(cta: Cta, acc, received, landed, lane):
    """Sends every peer its part of the columns, from registers to its shared memory."""
    parts, own = cta.config.cluster_k, cta.coord.cta_k_in_cluster
    words = cute.recast_tensor(cute.make_tensor(acc.iterator, cute.size(acc)), Int32)
    count = cute.size(acc) // parts
    for part in cutlass.range_constexpr(parts):
        sent = registers(acc, parts, part)
        if own != part:
            sender = own - 1 if own > part else own  # this CTA's index among the senders
            peer = cta.coord.multicast_rank + part * cta.config.multicast_size
            for v in cutlass.range_constexpr(0, count, VECTOR):
                vector = tuple(words[sent[v + i]] for i in range(VECTOR))
                target = aligned(received + (sender * count + v) * WARPGROUP + lane * VECTOR)
                cute.arch.store_async_dsmem(target, vector, landed, peer)


@cute.jit
def add_partials(cta: Cta, acc, received, lane):
    """Adds up this CTA's part of the columns, its own sums and the received ones, in the order of
    K.
    """
    parts, own = cta.config.cluster_k, cta.coord.cta_k_in_cluster
    flat = cute.make_tensor(acc.iterator, cute.size(acc))
    count = cute.size(acc) // parts
    sums = cute.make_rmem_tensor((count,), Float32)
    for v in cutlass.range_constexpr(0, count, VECTOR):
        first = received + v * WARPGROUP + lane * VECTOR
        theirs = [
            received_vector(first + sender * (count * WARPGROUP)) for sender in range(parts - 1)
        ]
        for i in cutlass.range_constexpr(VECTOR):
            mine = flat[registers(acc, parts, 0)[v + i]]
            for part in cutlass.range_constexpr(1, parts):
                mine = flat[registers(acc, parts, part)[v + i]] if own == part else mine
            total = mine if own == 0 else theirs[0][i]
            for part in cutlass.range_constexpr(1, parts):
                # the sums of part `part`, for parts that come after this CTA's own
                later = theirs[part - 1][i]
                if cutlass.const_expr(part < parts - 1):
                    later = later if own < part else theirs[part][i]
                total += mine if own == part else later
            sums[v + i] = total
    return sums


@cute.jit
def release_peers(cta: Cta, free, lane, again):
    """Tells the peers that they may send the sums of the next tile, if there is one (`again`)."""
    peer = lane < cta.config.cluster_k and lane != cta.coord.cta_k_in_cluster
    if peer and again:
        # The reads must complete before the peer sends again.
        cute.arch.fence_acq_rel_cluster()
        cute.arch.mbarrier_arrive(free, cta.coord.multicast_rank + lane * cta.config.multicast_size)


def received_vector(pointer):
    """Loads a vector of the received sums."""
    vector = cute.make_rmem_tensor((VECTOR,), Float32)
    cute.autovec_copy(cute.make_tensor(aligned(pointer), VECTOR), vector)
    return vector


def aligned(pointer):
    """Returns a pointer with the alignment of whole vectors."""
    return cute.make_ptr(Float32, pointer.toint(), pointer.memspace, assumed_align=4 * VECTOR)

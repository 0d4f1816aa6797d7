"""What an addend or a residual that lies as C does comes by: TMA, into slots of the ring behind a
tile's last slices.

There it is on its way while the products run, and takes memory for as long as it waits to be read.
A slot holds as many slabs of C (`epilogue`) for each consumer that shares the tile as fit in its
part of A and in its part of B.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from ..core.config import WARPGROUP
from . import epilogue_tile

LOADERS = 6  # the named barrier of the two warps that load


def slab_bytes(stored, dtype) -> int:
    return int(64 * epilogue_tile.slab_columns(stored, dtype) * dtype.width // 8)


def per_slot(config, stored, dtype) -> int:
    """Slabs of each consumer in a slot; none where slots do not begin at whole swizzles."""
    if config.tile_k < 64:
        return 0
    rows = config.tile_m, config.slot_n
    return int(
        sum(extent * config.tile_k * 2 // slab_bytes(stored, dtype) for extent in rows)
        // config.sharing
    )


def slots(config, stored, dtype) -> int:
    """Of a tile: as many for each, whatever its width."""
    most = max(len(epilogue_tile.places(stored, dtype, width)) for width in stored.widths)
    return -(-most // per_slot(config, stored, dtype))


def memory(k, config, stored, index, number: int):
    """Where a slab of slot `index` begins."""
    size = slab_bytes(stored, k.mC.element_type)
    bytes_a, bytes_b = (extent * config.tile_k * 2 for extent in (config.tile_m, config.slot_n))
    in_a = bytes_a // size
    if number < in_a:
        return k.slots + (index * bytes_a + number * size)
    return k.slots + (config.slots * bytes_a + index * bytes_b + (number - in_a) * size)


@cute.jit
def load(
    k,
    config: cutlass.Constexpr,
    stored: cutlass.Constexpr,
    ring,
    slot,
    work,
    issues: cutlass.Constexpr,
):
    """One of the two warps that load, after a tile's slices. Returns the slot after the last.
    `issues`: it is the one that loads these.

    The other must not wait for these slots to be empty: nothing of them waits for it, so they may
    be filled, read and released before it looks, and it would wait for a phase that has passed. Nor
    may it go on without knowing that they were empty: by parity it would take the phase before for
    the one that it awaits next. So the two meet.
    """
    for number in cutlass.range_constexpr(slots(config, stored, k.mC.element_type)):
        if cutlass.const_expr(issues):
            ring.await_empty(slot)
            if cutlass.const_expr(config.elastic):
                if work.narrow == 0:
                    fill(k, config, stored, ring, slot, work, config.tile_n, number)
                else:
                    fill(k, config, stored, ring, slot, work, config.tile_n - 8, number)
            else:
                fill(k, config, stored, ring, slot, work, stored.tile_n, number)
        slot = ring.next(slot)
    # Not `cute.arch.barrier`, which is `bar.sync`: where two warps meet at different `bar.sync`
    # instructions, compute-sanitizer's synccheck reports divergent threads. It finds nothing where
    # they meet at `barrier.sync`.
    cute.arch.inline_ptx(f"barrier.sync {LOADERS}, {2 * 32};")
    return slot


@cute.jit
def fill(
    k,
    config: cutlass.Constexpr,
    stored: cutlass.Constexpr,
    ring,
    slot,
    work,
    width: cutlass.Constexpr,
    number: cutlass.Constexpr,
):
    """The slabs of all consumers in slot `number` of those of a tile."""
    dtype, per = k.mC.element_type, per_slot(config, stored, k.mC.element_type)
    columns = epilogue_tile.slab_columns(stored, dtype)
    batch = epilogue_tile.places(stored, dtype, width)[number * per :][:per]
    ring.announce(slot, len(batch) * config.sharing * slab_bytes(stored, dtype))
    for share in cutlass.range_constexpr(config.sharing):
        for i in cutlass.range_constexpr(len(batch)):
            at = memory(k, config, stored, slot.index, share * per + i)
            sC = cute.make_tensor(
                cute.recast_ptr(at, k.slab_layout.inner, dtype), k.slab_layout.outer
            )
            row = work.m * stored.tile_m + (batch[i][0] * stored.sharing + share) * 64
            gC = epilogue_tile.tile_of(
                k, k.gmem_fetched, row, work.column + batch[i][1], work.matrix, (64, columns)
            )
            sC, gC = cute.group_modes(sC, 0, 2), cute.group_modes(gC, 0, 2)
            target, source = cpasync.tma_partition(k.tma_fetched, 0, cute.make_layout(1), sC, gC)
            cute.copy(k.tma_fetched, source, target, tma_bar_ptr=ring.full + slot.index)


def turns(k, config, stored, ring, slot):
    """One consumer: the ring's slots of a tile's slabs in their order, `slot` the first."""
    found = [slot]
    while len(found) < slots(config, stored, k.mC.element_type):
        found.append(ring.next(found[-1]))
    return found


@cute.jit
def await_full(k, config: cutlass.Constexpr, stored: cutlass.Constexpr, ring, slot):
    """One consumer of pingpong, before the other multiplies: all that was fetched for its tile has
    landed. The other's slices come into these slots next. While one of them is not full, its
    barrier is still in the phase before, and by parity the other would take that for the phase that
    it waits for.
    """
    for each in turns(k, config, stored, ring, slot):
        ring.wait(each)


@cute.jit
def take(
    k,
    config: cutlass.Constexpr,
    stored: cutlass.Constexpr,
    ring,
    turns,
    number: cutlass.Constexpr,
    slabs: cutlass.Constexpr,
):
    """One consumer: this thread's values of its slab `number`. C may lie where the addend does:
    what the next slab has of the same columns must have come before this one leaves.
    """
    dtype = k.mC.element_type
    per = per_slot(config, stored, dtype)
    slot = turns[number // per]
    if cutlass.const_expr(number % per == 0):
        ring.wait(slot)
    ends = number + 1 == len(slabs)
    if cutlass.const_expr((number + 1) % per == 0 and not ends):
        (i, start), (next_i, next_start) = slabs[number : number + 2]
        if cutlass.const_expr(
            i == next_i and next_start < start + epilogue_tile.slab_columns(stored, dtype)
        ):
            ring.wait(turns[(number + 1) // per])
    slab = memory(k, config, stored, slot.index, number % per).toint()
    for share in cutlass.range_constexpr(1, config.sharing):
        other = memory(k, config, stored, slot.index, share * per + number % per).toint()
        slab = other if k.share == share else slab
    at = cute.make_ptr(cutlass.Uint8, slab, k.slots.memspace, assumed_align=1024)
    lies = cute.make_tensor(cute.recast_ptr(at, k.slab_layout.inner, dtype), k.slab_layout.outer)
    values = cute.make_rmem_tensor(k.slab_registers, dtype)
    thread = k.from_shared.get_slice(k.tidx % WARPGROUP)
    cute.copy(k.from_shared, thread.partition_S(lies), k.from_shared.retile(values))
    if cutlass.const_expr((number + 1) % per == 0 or ends):
        leave(k, ring, slot)
    return values


@cute.jit
def skip(
    k, config: cutlass.Constexpr, stored: cutlass.Constexpr, ring, turns, count: cutlass.Constexpr
):
    """One consumer, after the last of `count` slabs: slots that a narrow tile leaves empty."""
    for slot in turns[-(-count // per_slot(config, stored, k.mC.element_type)) :]:
        ring.wait(slot)
        leave(k, ring, slot)


@cute.jit
def leave(k, ring, slot):
    """One consumer has read all that it needs of a slot."""
    cute.arch.barrier(barrier_id=k.consumer + 1, number_of_threads=WARPGROUP)
    ring.release(slot.index)

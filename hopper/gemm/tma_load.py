"""How slices come into the ring: one warp loads A, another B, for each TMA load keeps a warp busy
for 150 cycles.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class Load(NamedTuple):
    """An operand: its TMA atom; of each part of its slices of one tile where it goes and comes
    from, with the slot or slice last; and which CTAs of the cluster receive what this one loads.
    """

    tma: Any
    parts: Any
    mask: Any


@cute.jit
def slices(load, ring, slot, begin: Int32, count: Int32, back, announces: cutlass.Constexpr):
    """One warp: `count` slices of an operand from slice `begin` on, the last first where `back` is
    1. Returns the slot after the last. `announces`: by this warp a slot learns how many bytes will
    land, of either operand.
    """
    for i in cutlass.range(count, unroll=1):
        ring.await_empty(slot)
        if cutlass.const_expr(announces):
            ring.announce(slot)
        at, full = begin + i + back * (count - 1 - 2 * i), ring.full + slot.index
        for part in cutlass.range_constexpr(len(load.parts)):
            target, source = load.parts[part]
            cute.copy(
                load.tma,
                source[None, at],
                target[None, slot.index],
                tma_bar_ptr=full,
                mcast_mask=load.mask,
            )
        slot = ring.next(slot)
    return slot

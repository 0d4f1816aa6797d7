"""The mbarrier ring between TMA and wgmma."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class Slot(NamedTuple):
    """Where a role stands in the ring: the slot's index, and the phase bit of its barrier."""

    index: Int32
    phase: Int32


@dataclass(frozen=True)  # a method call on an unfrozen object counts as a write to it inside a staged loop
class Ring:
    """Slots of shared memory, each with one barrier.

    Contract of `full[s]`: 1 arrival a turn, by the thread that issues the loads, which announces `tx_bytes`; TMA
    subtracts the bytes as they land; every thread that multiplies waits. A slot is refilled only after a CTA barrier
    that follows the multiplication, so there is no barrier for "empty".
    """

    full: cute.Pointer
    slots: int
    tx_bytes: int
    arrivals: int = 1

    @cute.jit
    def init(self):
        for s in cutlass.range_constexpr(self.slots):
            cute.arch.mbarrier_init(self.full + s, self.arrivals)

    def start(self):
        return Slot(Int32(0), Int32(0))

    @cute.jit
    def next(self, slot: Slot):
        index = slot.index + 1
        wrapped = index == self.slots
        return Slot(Int32(0) if wrapped else index, (slot.phase ^ 1) if wrapped else slot.phase)

    @cute.jit
    def announce(self, slot: Slot):
        """One elected thread arrives and says how many bytes will land."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + slot.index, self.tx_bytes)

    @cute.jit
    def wait(self, slot: Slot):
        cute.arch.mbarrier_wait(self.full + slot.index, slot.phase)


@cute.jit
def jitter(enabled: cutlass.Constexpr):
    """Sleep up to about 2 µs, a different time for each warp and turn, when `enabled`."""
    if cutlass.const_expr(enabled):
        nanoseconds = (cute.arch.clock() * 747796405 + cute.arch.warp_idx() * 277803737) >> 8 & 2047
        cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[nanoseconds])

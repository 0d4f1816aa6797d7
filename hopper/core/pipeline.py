"""The mbarrier ring between TMA and wgmma: slots of shared memory that a producer fills and
consumers empty.

Each slot has a barrier `full` and a barrier `empty`. How many arrivals end a turn of either follows
from the fields of the ring (`contract`), and every method that arrives notes what it emits.
`settle` compares the two when the kernel has been traced, so a ring whose roles do not keep its
contract fails to compile; it would hang otherwise.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .config import WARPGROUP


class Slot(NamedTuple):
    """Where a role stands in the ring: the slot's index, and the phase bit of its barriers."""

    index: Int32
    phase: Int32


@dataclass(
    frozen=True
)  # a method call on an unfrozen object counts as a write to it inside a staged loop
class Ring:
    """One warpgroup loads and multiplies, so a CTA barrier says that a slot may be filled again.

    full[s]: 1 arrival a turn, by the thread that issues the loads, which announces `tx_bytes`; TMA
    subtracts the bytes as they land; every thread that multiplies waits. empty[s]: none.
    """

    full: cute.Pointer
    empty: cute.Pointer
    slots: int
    tx_bytes: int
    consumers: int
    cluster: int
    jitter: bool
    emitted: dict[tuple[str, str], int] = field(default_factory=dict)

    def contract(self) -> dict[str, int]:
        """Arrivals that end a turn of each barrier of a slot; a barrier with none is never used."""
        return {"full": 1, "empty": 0}

    def note(self, barrier: str, by: str, arrivals: int) -> None:
        """Called while tracing, by whatever emits arrivals: so many a turn."""
        self.emitted[barrier, by] = arrivals

    def settle(self) -> None:
        """Raises ValueError unless the arrivals that were traced are those of the contract."""
        for barrier, expected in self.contract().items():
            traced = {
                by: arrivals for (name, by), arrivals in self.emitted.items() if name == barrier
            }
            if sum(traced.values()) != expected:
                raise ValueError(
                    f"{barrier}[s] gets {traced or 'no'} arrivals a turn, its contract expects "
                    f"{expected}"
                )

    @cute.jit
    def init(self):
        """One thread, before anyone waits."""
        contract = self.contract()
        for s in cutlass.range(self.slots, unroll_full=True):
            cute.arch.mbarrier_init(self.full + s, contract["full"])
            if cutlass.const_expr(contract["empty"] > 0):
                cute.arch.mbarrier_init(self.empty + s, contract["empty"])

    def start(self):
        return Slot(Int32(0), Int32(0))

    @cute.jit
    def next(self, slot: Slot):
        index = slot.index + 1
        wrapped = index == self.slots
        return Slot(Int32(0) if wrapped else index, (slot.phase ^ 1) if wrapped else slot.phase)

    @cute.jit
    def skip(self, slot: Slot, count: Int32):
        """The slot `count` further on, past those of another consumer's tile."""
        index = slot.index + count
        turns = index // self.slots
        return Slot(index - turns * self.slots, slot.phase ^ (turns & 1))

    @cute.jit
    def acquire(self, slot: Slot):
        """Producer warp: wait until the slot may be filled, then announce the bytes that will land
        in it.
        """
        jitter(self.jitter)
        self.announce(slot)

    @cute.jit
    def announce(self, slot: Slot, tx_bytes: cutlass.Constexpr = None):
        """One elected thread arrives and says how many bytes will land: those of a slice, if it is
        not told.
        """
        self.note("full", "producer", 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(
                self.full + slot.index, self.tx_bytes if tx_bytes is None else tx_bytes
            )

    @cute.jit
    def wait(self, slot: Slot):
        """Consumer: wait until the slot is full."""
        cute.arch.mbarrier_wait(self.full + slot.index, slot.phase)
        jitter(self.jitter)

    @cute.jit
    def release(self, index: Int32):
        """Consumer: the slot has been read."""
        jitter(self.jitter)
        cute.arch.sync_threads()


@dataclass(frozen=True)
class TokenRing(Ring):
    """As with cuda::barrier, everyone who waits on a barrier arrives at it too: 257 arrivals for
    two consumers.

    full[s]: 1 by the producer, which announces `tx_bytes`, and 128 by each consumer warpgroup,
    before it waits. empty[s]: 128 by each consumer warpgroup once it has read the slot, and 1 by
    the producer once it has waited. Slots begin empty: the producer waits for the phase before the
    first.
    """

    def contract(self) -> dict[str, int]:
        everyone = 1 + WARPGROUP * self.consumers
        return {"full": everyone, "empty": everyone}

    @cute.jit
    def acquire(self, slot: Slot):
        jitter(self.jitter)
        cute.arch.mbarrier_wait(self.empty + slot.index, slot.phase ^ 1)
        self.note("empty", "producer", 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + slot.index)
        self.announce(slot)

    @cute.jit
    def wait(self, slot: Slot):
        self.note("full", "consumers", WARPGROUP * self.consumers)
        cute.arch.mbarrier_arrive(self.full + slot.index)
        Ring.wait(self, slot)

    @cute.jit
    def release(self, index: Int32):
        jitter(self.jitter)
        self.note("empty", "consumers", WARPGROUP * self.consumers)
        cute.arch.mbarrier_arrive(self.empty + index)


@cute.jit
def jitter(enabled: cutlass.Constexpr):
    """Sleep up to about 2 µs, a different time for each warp and turn, when `enabled`."""
    if cutlass.const_expr(enabled):
        nanoseconds = (cute.arch.clock() * 747796405 + cute.arch.warp_idx() * 277803737) >> 8 & 2047
        cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[nanoseconds])

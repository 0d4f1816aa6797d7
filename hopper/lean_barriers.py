"""hopper.lean_barriers

Idea: one arrival per warpgroup in place of one per thread.
Parent: hopper.persistent
Changes: the ring. Who waits no longer arrives; phase bits say which turn a barrier is in. 3
    arrivals a turn for two consumers, of 257 + 257.
Why it pays: consumers need not wait for each other before they multiply, so one keeps the tensor
    cores busy while the other is between two slots: from wgmma to release takes 834 cycles where it
    took 1035. 5% at 4096, 4% at 8192; with the stores of `hopper.store_tuning` it would be 11%, for
    then nothing else is in the way.
Source: 001 kernel 7 (704 TFLOP/s of cuBLAS's 716), 004.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from ..core.registry import Kernel
from . import persistent
from .core import entry, pipeline
from .core.config import WARPGROUP

Config = persistent.Config


@dataclass(frozen=True)
class LeanRing(pipeline.Ring):
    """full[s]: 1 arrival a turn, by the producer, which announces `tx_bytes`. empty[s]: 1 by each
    consumer warpgroup, once it has read the slot. Slots begin empty: the producer waits for the
    phase before the first.
    """

    def contract(self) -> dict[str, int]:
        return {"full": 1, "empty": self.consumers}

    @cute.jit
    def acquire(self, slot: pipeline.Slot):
        pipeline.jitter(self.jitter)
        cute.arch.mbarrier_wait(self.empty + slot.index, slot.phase ^ 1)
        self.announce(slot)

    @cute.jit
    def release(self, index: Int32):
        pipeline.jitter(self.jitter)
        self.note("empty", "consumers", self.consumers)
        if cute.arch.thread_idx()[0] % WARPGROUP == 0:
            cute.arch.mbarrier_arrive(self.empty + index)


class LeanBarriers(persistent.Persistent):
    """Its parent over another ring."""

    ring_type = LeanRing


KERNEL = Kernel(
    name="hopper.lean_barriers",
    ladder="hopper",
    idea="one phase-tracked arrival per warpgroup in place of one per thread",
    parent="hopper.persistent",
    source="001 kernel 7, 004",
    dtypes=("bfloat16", "float16"),
    min_arch=90,
    max_arch=90,
    dsl="cute",
)

unsupported, plan, artifact, phases, precompile, space = entry.entry(KERNEL, LeanBarriers, Config)

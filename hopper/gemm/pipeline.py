"""The ring of `hopper.gemm`: as a cluster's, among the CTAs that load for each other, and short to
begin and to end.

A call of a few µs waits for each of these: four warps initialise the barriers; a slot that no other
CTA fills is released without mapping an address; and a CTA ends when its own barriers say that no
peer will arrive any more. A barrier of the whole cluster would say so too, behind a fence of the
GPU's memory.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .. import cluster_multicast
from ..core import pipeline
from ..core.config import WARPGROUP


@dataclass(frozen=True)
class GroupRing(cluster_multicast.ClusterRing):
    """`cluster` is the number of CTAs that load for each other, `first` the rank of the first of
    them.
    """

    first: Int32 | int = 0

    @cute.jit
    def init(self):
        """The first warpgroup, before anyone waits: each warp a quarter of the slots."""
        contract = self.contract()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp < 4:
            with cute.arch.elect_one():
                for first in cutlass.range_constexpr(0, self.slots, 4):
                    slot = first + warp
                    if slot < self.slots:
                        cute.arch.mbarrier_init(self.full + slot, contract["full"])
                        cute.arch.mbarrier_init(self.empty + slot, contract["empty"])
            cute.arch.mbarrier_init_fence()

    @cute.jit
    def await_empty(self, slot: pipeline.Slot):
        """A warp that loads: wait until the slot may be filled."""
        pipeline.jitter(self.jitter)
        cute.arch.mbarrier_wait(self.empty + slot.index, slot.phase ^ 1)

    @cute.jit
    def release(self, index: Int32):
        pipeline.jitter(self.jitter)
        self.note("empty", "consumers", self.consumers * self.cluster)
        lane = cute.arch.thread_idx()[0] % WARPGROUP
        if cutlass.const_expr(self.cluster == 1):
            if lane == 0:
                cute.arch.mbarrier_arrive(self.empty + index)
        else:
            if lane < self.cluster:
                cute.arch.mbarrier_arrive(self.empty + index, self.first + lane)

    @cute.jit
    def close(self, slot: pipeline.Slot):
        """Producer warp, after its last slot: waits until no peer will arrive here any more, so
        that the CTA may end. What peers multicast into it, its consumers have waited for.
        """
        if cutlass.const_expr(self.cluster > 1):
            for _ in cutlass.range(self.slots, unroll=1):
                cute.arch.mbarrier_wait(self.empty + slot.index, slot.phase ^ 1)
                slot = self.next(slot)

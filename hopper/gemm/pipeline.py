"""The pipeline of `hopper.gemm`: the cluster pipeline, limited to the CTAs that load for each
other, with a fast start and end.

Calls of a few µs notice each of these steps. Four warps initialise the barriers; a stage that no
other CTA fills is released without mapping an address; and a CTA exits when its own barriers show
that no peer will arrive again. A barrier of the whole cluster would show the same, but only after a
GPU-wide memory fence.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from outblas.hopper.parts.config import WARPGROUP
from outblas.hopper.parts.pipeline import Pipeline, PipelineState, jitter


@dataclass(frozen=True)
class GroupPipeline(Pipeline):
    """`cluster` is the number of CTAs that load for each other, `first_rank` the rank of the first
    of them. Two warps load; one of them announces the bytes of both:

    full[s], 1 arrival per phase:
        warp LOAD_A arrives and announces the bytes of A and B (or those of the epilogue's source);
        TMA subtracts the bytes as they arrive, including those that warp LOAD_B and peers load;
        the consumers wait for the phase, then read the stage.
    empty[s], consumers that share a tile · cluster arrivals per phase:
        thread r of a consumer arrives at the barrier of CTA `first_rank` + r when the consumer has
        read its stage s;
        both loading warps wait for the previous phase, then load.
    """

    first_rank: Int32 | int = 0

    def arrival_counts(self) -> dict[str, int]:
        return {"full": 1, "empty": self.consumers * self.cluster}

    @cute.jit
    def init_barriers(self):
        """Initialises the barriers. The first warpgroup calls it before any thread waits; each warp
        initialises a quarter of the stages.
        """
        counts = self.arrival_counts()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp < 4:
            with cute.arch.elect_one():
                for first in cutlass.range_constexpr(0, self.stages, 4):
                    stage = first + warp
                    if stage < self.stages:
                        cute.arch.mbarrier_init(self.full + stage, counts["full"])
                        cute.arch.mbarrier_init(self.empty + stage, counts["empty"])
            cute.arch.mbarrier_init_fence()

    @cute.jit
    def producer_acquire(self, state: PipelineState):
        jitter(self.jitter)
        # Of the previous phase: a new barrier counts as being in it, because stages start empty.
        cute.arch.mbarrier_wait(self.empty + state.index, state.phase ^ 1)

    @cute.jit
    def consumer_release(self, index: Int32):
        jitter(self.jitter)
        self.record_arrivals("empty", "consumers", self.consumers * self.cluster)
        lane = cute.arch.thread_idx()[0] % WARPGROUP
        if cutlass.const_expr(self.cluster == 1):
            if lane == 0:
                cute.arch.mbarrier_arrive(self.empty + index)
        else:
            if lane < self.cluster:
                cute.arch.mbarrier_arrive(self.empty + index, self.first_rank + lane)

    @cute.jit
    def producer_tail(self, state: PipelineState):
        """Producer warp, after its last stage: waits until no peer will arrive here again, so that
        the CTA may exit. Its consumers have already waited for everything that peers multicast into
        it.
        """
        if cutlass.const_expr(self.cluster > 1):
            for _ in cutlass.range(self.stages, unroll=1):
                cute.arch.mbarrier_wait(self.empty + state.index, state.phase ^ 1)
                state = self.advance(state)

"""The mbarrier pipeline between TMA and wgmma: stages of shared memory that a producer fills and
consumers empty.

Each stage has a barrier `full` and a barrier `empty`. A phase of a barrier completes when its
arrivals are complete (and, for `full`, when all announced bytes have arrived). The fields of the
pipeline determine how many arrivals complete a phase (`arrival_counts`), and every method that
arrives records the arrivals that it emits. `check_arrival_counts` compares the two after the kernel
has been traced. A pipeline whose roles break its contract thus fails to compile; otherwise it would
hang.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from outblas.hopper.parts.config import WARPGROUP


class PipelineState(NamedTuple):
    """The position of a role in the pipeline: the index of a stage, and the phase bit of its
    barriers.
    """

    index: Int32
    phase: Int32


# Frozen, because the DSL treats a method call on an unfrozen object as a write to it.
@dataclass(frozen=True)
class Pipeline:
    """The pipeline of kernels in which one warpgroup loads and multiplies. A CTA barrier tells when
    a stage may be filled again.

    full[s], 1 arrival per phase:
        the thread that issues the loads arrives and announces `tx_bytes`;
        TMA subtracts the bytes as they arrive;
        every thread that multiplies waits for the phase, then reads the stage.
    empty[s] is not used.
    """

    full: cute.Pointer
    empty: cute.Pointer
    stages: int
    tx_bytes: int
    consumers: int
    cluster: int
    jitter: bool
    traced_arrivals: dict[tuple[str, str], int] = field(default_factory=dict)

    def arrival_counts(self) -> dict[str, int]:
        """Returns the arrivals that complete a phase of each barrier; a barrier with 0 is never
        used.
        """
        return {"full": 1, "empty": 0}

    def record_arrivals(self, barrier: str, by: str, arrivals: int) -> None:
        """Records, while tracing, that the code `by` emits this many arrivals in each phase."""
        self.traced_arrivals[barrier, by] = arrivals

    def check_arrival_counts(self) -> None:
        """Raises ValueError unless the traced arrivals equal those of the contract."""
        for barrier, expected in self.arrival_counts().items():
            traced = {
                by: arrivals
                for (name, by), arrivals in self.traced_arrivals.items()
                if name == barrier
            }
            if sum(traced.values()) != expected:
                raise ValueError(
                    f"{barrier}[s] gets {traced or 'no'} arrivals per phase, but its contract "
                    f"expects {expected}"
                )

    @cute.jit
    def init_barriers(self):
        """Initialises the barriers. One thread calls it before any thread waits."""
        counts = self.arrival_counts()
        for s in cutlass.range(self.stages, unroll_full=True):
            cute.arch.mbarrier_init(self.full + s, counts["full"])
            if cutlass.const_expr(counts["empty"] > 0):
                cute.arch.mbarrier_init(self.empty + s, counts["empty"])

    def initial_state(self):
        """Returns the first stage in its first phase."""
        return PipelineState(Int32(0), Int32(0))

    @cute.jit
    def advance(self, state: PipelineState):
        """Returns the state of the next stage."""
        index = state.index + 1
        wrapped = index == self.stages
        return PipelineState(
            Int32(0) if wrapped else index, (state.phase ^ 1) if wrapped else state.phase
        )

    @cute.jit
    def advance_by(self, state: PipelineState, count: Int32):
        """Returns the state `count` stages later, which skips those of another consumer's tile."""
        index = state.index + count
        wraps = index // self.stages
        return PipelineState(index - wraps * self.stages, state.phase ^ (wraps & 1))

    @cute.jit
    def producer_acquire(self, state: PipelineState):
        """Producer warp: waits until the stage may be filled."""
        jitter(self.jitter)

    @cute.jit
    def arrive_and_expect_tx(self, state: PipelineState, tx_bytes: cutlass.Constexpr = None):
        """Producer warp: one elected thread arrives and announces how many bytes will arrive, by
        default those of a k tile of both operands.
        """
        self.record_arrivals("full", "producer", 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(
                self.full + state.index, self.tx_bytes if tx_bytes is None else tx_bytes
            )

    @cute.jit
    def producer_get_barrier(self, state: PipelineState):
        """Returns the barrier on which TMA counts the bytes that arrive in a stage."""
        return self.full + state.index

    @cute.jit
    def consumer_wait(self, state: PipelineState):
        """Consumer: waits until the stage is full."""
        cute.arch.mbarrier_wait(self.full + state.index, state.phase)
        jitter(self.jitter)

    @cute.jit
    def consumer_release(self, index: Int32):
        """Consumer: signals that it has read stage `index`."""
        jitter(self.jitter)
        cute.arch.sync_threads()


@dataclass(frozen=True)
class TokenPipeline(Pipeline):
    """The pipeline of cuda::barrier, where every thread that waits on a barrier also arrives at it:
    257 arrivals for two consumers.

    full[s], 1 + 128 · consumers arrivals per phase:
        each thread of a consumer arrives before it waits for the phase;
        the producer arrives and announces `tx_bytes`; TMA subtracts them as they arrive;
        the consumers pass and read the stage.
    empty[s], 1 + 128 · consumers arrivals per phase:
        the producer waits for the previous phase (a new barrier counts as being in it, because
        stages start empty), arrives, and fills the stage;
        each thread of a consumer arrives after it has read the stage.
    """

    def arrival_counts(self) -> dict[str, int]:
        everyone = 1 + WARPGROUP * self.consumers
        return {"full": everyone, "empty": everyone}

    @cute.jit
    def producer_acquire(self, state: PipelineState):
        jitter(self.jitter)
        cute.arch.mbarrier_wait(self.empty + state.index, state.phase ^ 1)
        self.record_arrivals("empty", "producer", 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + state.index)

    @cute.jit
    def consumer_wait(self, state: PipelineState):
        self.record_arrivals("full", "consumers", WARPGROUP * self.consumers)
        cute.arch.mbarrier_arrive(self.full + state.index)
        Pipeline.consumer_wait(self, state)

    @cute.jit
    def consumer_release(self, index: Int32):
        jitter(self.jitter)
        self.record_arrivals("empty", "consumers", WARPGROUP * self.consumers)
        cute.arch.mbarrier_arrive(self.empty + index)


@cute.jit
def jitter(enabled: cutlass.Constexpr):
    """If `enabled`, sleeps up to about 2 µs, for a different time in each warp and phase."""
    if cutlass.const_expr(enabled):
        nanoseconds = (cute.arch.clock() * 747796405 + cute.arch.warp_idx() * 277803737) >> 8 & 2047
        cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[nanoseconds])

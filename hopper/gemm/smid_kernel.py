"""A kernel that reports on which SM each of its CTAs runs."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from outblas.hopper.parts import build

SHARED = 200 * 1024  # bytes, so that an SM has one CTA at a time
STAY = 20_000  # cycles that a CTA stays, by when all others are running


class Probe:
    """Each CTA writes the index of its SM, then stays: up to 8 times as long where `jitter` is
    1.
    """

    def __init__(self, cluster: int):
        self.cluster = cluster

    @cute.jit
    def __call__(self, sms, jitter: Int32, stream):
        self.kernel(sms, jitter).launch(
            grid=(sms.shape[0], 1, 1),
            block=(32, 1, 1),
            cluster=(self.cluster, 1, 1),
            smem=SHARED,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, sms, jitter: Int32):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        begun = cute.arch.clock64()
        if thread == 0:
            sms[cta] = Int32(cute.arch.smid())
        stay = STAY + jitter * STAY * (cta * 40503 // 64 % 8)
        while cute.arch.clock64() - begun < stay:
            pass


def compiled_probe(cluster: int, name: str) -> Any:
    """Returns the DSL's compiled function of a probe with clusters of this many CTAs."""
    return build.compiled(Probe(cluster), name, [build.compact(Int32, 1), Int32(1)])

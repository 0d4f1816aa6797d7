"""A release of stages that racecheck can follow.

In `hopper.gemm` the lanes of a warp that have read scales synchronise, and one of them arrives at
the stage's barrier for all. The memory model orders what they read before what is loaded next, but
racecheck follows only threads that arrive themselves: it reports what the other lanes read, with a
barrier of the whole warpgroup in place of that of the warp as well. Here every lane arrives.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from outblas.hopper.gemm import scale_loads
from outblas.hopper.gemm.pipeline import GroupPipeline

LANES = scale_loads.LANES


@cute.jit
def consumer_release(self: Any, index: Int32) -> None:
    warps = 4 * self.consumers
    self.record_arrivals("empty", "consumers", LANES * warps * self.cluster)
    if cutlass.const_expr(self.cluster == 1):
        cute.arch.mbarrier_arrive(self.empty + index)
    else:
        for rank in cutlass.range_constexpr(self.cluster):
            cute.arch.mbarrier_arrive(self.empty + index, self.first_rank + rank)


def arrival_counts(self: Any) -> dict[str, int]:
    counts: dict[str, int] = GroupPipeline.arrival_counts(self)
    return counts | {"empty": counts["empty"] * 4 * LANES}


def install() -> None:
    """Lets every lane arrive, in kernels that are compiled from now on."""
    pipeline: Any = scale_loads.ScaledPipeline
    pipeline.consumer_release, pipeline.arrival_counts = consumer_release, arrival_counts

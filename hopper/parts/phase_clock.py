"""Timers that count cycles per phase in the registers of each thread; only kernels compiled with
`phases=True` have them.

Each role calls `lap` where a phase ends. At the end, the first thread of every warpgroup writes its
sums.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from outblas.hopper.parts.config import WARPGROUP
from outblas.hopper.parts.records import WarpContext

# WAIT: until a stage is full, or empty. LOAD: issue of TMA loads (and, in rungs without a producer
# warp, until they arrived). TENSOR: from the first wgmma of a stage to its completion. STORE: store
# of a tile of C.
PHASES = ("wait", "load", "tensor", "store")
WAIT, LOAD, TENSOR, STORE = range(len(PHASES))
_LAST = len(PHASES)


@dataclass(frozen=True)
class PhaseTimers:
    """`cycles`: the sum of each phase, then the clock at the last lap, int64 registers. `trace`:
    the tensor that receives the sums, int64 (CTA, warpgroup, phase).
    """

    cycles: Any
    trace: Any
    context: WarpContext


def start(trace, context: WarpContext) -> PhaseTimers | None:
    """Starts the timers of a thread, or returns None where there is no trace to write."""
    if trace is None:
        return None
    cycles = cute.make_rmem_tensor((len(PHASES) + 1,), Int64)
    cycles.fill(Int64(0))
    cycles[_LAST] = cute.arch.clock64()
    return PhaseTimers(cycles, trace, context)


@cute.jit
def lap(timers: Any, phase: cutlass.Constexpr):
    """Adds the cycles since the last lap to a phase. `timers`: a PhaseTimers, or None."""
    if cutlass.const_expr(timers is not None):
        cycles = timers.cycles
        now = cute.arch.clock64()
        cycles[phase] = cycles[phase] + (now - cycles[_LAST])
        cycles[_LAST] = now


@cute.jit
def finish(timers: Any):
    """Writes the sums to trace[CTA, warpgroup, phase]."""
    if cutlass.const_expr(timers is not None):
        trace, cycles, context = timers.trace, timers.cycles, timers.context
        if context.thread % WARPGROUP == 0:
            for phase in cutlass.range_constexpr(len(PHASES)):
                trace[context.cta, context.warpgroup, phase] = cycles[phase]

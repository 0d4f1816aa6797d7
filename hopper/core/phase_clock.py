"""Cycles by phase: a stopwatch in the registers of each thread, in compiles with `phases=True`
only.

Each role calls `lap` where a phase ends; the first thread of every warpgroup writes its sums at the
end.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from .config import WARPGROUP

# WAIT: for a slot to become full, or empty. LOAD: issuing TMA loads (and, where nobody else loads,
# until they landed). TENSOR: from the first wgmma of a slot to its completion. STORE: a tile of C.
PHASES = ("wait", "load", "tensor", "store")
WAIT, LOAD, TENSOR, STORE = range(len(PHASES))
_LAST = len(PHASES)


@cute.jit
def start(k):
    """Starts the stopwatch `k.laps`, or leaves it None."""
    laps = None
    if cutlass.const_expr(k.trace is not None):
        laps = cute.make_rmem_tensor((len(PHASES) + 1,), Int64)
        laps.fill(Int64(0))
        laps[_LAST] = cute.arch.clock64()
    return laps


@cute.jit
def lap(k, phase: cutlass.Constexpr):
    """Adds the cycles since the last lap to a phase."""
    if cutlass.const_expr(k.trace is not None):
        laps = k.laps
        now = cute.arch.clock64()
        laps[phase] = laps[phase] + (now - laps[_LAST])
        laps[_LAST] = now


@cute.jit
def finish(k):
    """Writes the sums to trace[CTA, warpgroup, phase], int64."""
    if cutlass.const_expr(k.trace is not None):
        trace, laps = k.trace, k.laps
        if k.tidx % WARPGROUP == 0:
            for phase in cutlass.range_constexpr(len(PHASES)):
                trace[k.cta, k.warpgroup, phase] = laps[phase]

"""The true SM clock: the cycles that every SM counted between two points of a stream, divided by
the nanoseconds between them.

NVML's clock is sampled a few times a second, which is too coarse for a burst of a millisecond.
"""

import statistics
from functools import cache
from typing import Any

import torch

CTAS_PER_SM = 4  # enough that every SM stamps at least once


@cache
def _kernel() -> Any:
    """Returns the kernel, compiled on first use, because importing outblas.bench must not need
    Triton.
    """
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["wait"])
    def outblas_clock_stamp(out, wait):  # type: ignore[no-untyped-def]
        """Writes to row i of out: the SM, its clock64 and globaltimer (ns), `wait` ns after the CTA
        started.
        """
        sm, cycles, nanoseconds = tl.inline_asm_elementwise(
            "{ .reg .u64 begun, t; .reg .u32 s; .reg .pred p; mov.u64 begun, %globaltimer; "
            "loop: mov.u64 t, %globaltimer; sub.u64 t, t, begun; setp.lt.u64 p, t, $3; "
            "@p bra loop; mov.u32 s, %smid; cvt.u64.u32 $0, s; mov.u64 $1, %clock64; "
            "mov.u64 $2, %globaltimer; }",
            "=l,=l,=l,l",
            [tl.full((1,), 0, tl.int64) + wait],
            (tl.int64, tl.int64, tl.int64),
            False,
            1,
        )
        row = out + tl.program_id(0) * 3 + tl.arange(0, 1)
        tl.store(row, sm)
        tl.store(row + 1, cycles)
        tl.store(row + 2, nanoseconds)

    return outblas_clock_stamp


class Clock:
    """Two stamps on the current device and stream. Memory is allocated once, so that nothing is
    allocated while timing.
    """

    def __init__(self) -> None:
        sms = torch.cuda.get_device_properties().multi_processor_count
        self._rows = sms * CTAS_PER_SM
        self._stamps = torch.zeros(2, self._rows, 3, dtype=torch.int64, device="cuda")
        self.start()
        self.stop()
        torch.cuda.synchronize()

    def start(self, wait_us: float = 0.0) -> None:
        """Stamps after keeping every SM busy for `wait_us`, so that the host has time to enqueue
        the timed calls.
        """
        self._stamp(0, wait_us)

    def stop(self) -> None:
        self._stamp(1, 0.0)

    def mhz(self) -> float:
        """Returns the median clock of the SMs between the stamps, in MHz; waits for the device."""
        return mhz(*self._stamps.tolist())

    def _stamp(self, which: int, wait_us: float) -> None:
        _kernel()[(self._rows,)](self._stamps[which], int(wait_us * 1000), num_warps=1)


def mhz(before: list[list[int]], after: list[list[int]]) -> float:
    """Returns the clock from rows (SM, cycles, nanoseconds) of two stamps: each SM counts its own
    cycles, and the median over SMs is returned.
    """
    ends = {row[0]: row for row in after}
    return statistics.median(
        1000 * (ends[sm][1] - cycles) / (ends[sm][2] - nanoseconds)
        for sm, (_, cycles, nanoseconds) in {row[0]: row for row in before}.items()
        if sm in ends
    )

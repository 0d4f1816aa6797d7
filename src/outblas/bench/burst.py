"""The burst protocol: idle time, one warm call, the timed calls. Providers are interleaved round by
round, in balanced order.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from outblas.base import progress
from outblas.bench import schedule
from outblas.bench.clock import Clock
from outblas.bench.turn import Batch, Call

IDLE_SECONDS = 0.05  # lets clocks and temperature recover between turns
# How long the SMs are kept busy while the host, which is slow after its sleep, enqueues the calls.
ENQUEUE_US = 300.0


@dataclass
class Samples:
    """µs per call and MHz, one entry per round."""

    us: list[float] = field(default_factory=list)
    mhz: list[float] = field(default_factory=list)


def run(
    batches: Mapping[str, tuple[Call, Batch]],
    clock: Clock,
    *,
    rounds: int,
    idle: float = IDLE_SECONDS,
    name: str = "burst",
) -> dict[str, Samples]:
    """Times every (warm call, batch) in each of `rounds` rounds on the current CUDA device, each
    after `idle` seconds. Progress is reported under a `name`.
    """
    samples = {label: Samples() for label in batches}
    for number, order in enumerate(schedule.rounds(list(batches), rounds), 1):
        for label in order:
            warm, batch = batches[label]
            us, mhz = _turn(warm, batch, clock, idle)
            samples[label].us.append(us)
            samples[label].mhz.append(mhz)
        progress.say(f"{name}, round {number} of {rounds}")
    return samples


def _turn(warm: Call, batch: Batch, clock: Clock, idle: float) -> tuple[float, float]:
    """Returns the µs per call of the batch, and the clock from the warm call on.

    A stamp between the two lets the SMs run out of work: that cost cuBLAS 2.5% at N = 4096, and 10
    µs of spread.
    """
    torch.cuda.synchronize()
    time.sleep(idle)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    clock.start(ENQUEUE_US)
    warm()
    start.record()
    batch.run()
    end.record()
    clock.stop()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000 / batch.calls, clock.mhz()

"""The sustained protocol: turns of several seconds whose first half is discarded, with the base
before and after every other provider.

Power, not the SMs, limits large products. A turn shorter than a second or two would still be
affected by the heat of the previous one.
"""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from outblas.base import progress
from outblas.bench import schedule
from outblas.bench.clock import Clock
from outblas.bench.power import EnergyMeter
from outblas.bench.turn import Batch

TURN_SECONDS = 2.0
BATCH_US = 8000.0  # work enqueued between two readings of the energy counter
_QUEUED = 3  # batches in flight: the device never waits for the host


@dataclass(frozen=True)
class Turn:
    """One turn: µs per call, MHz, and watts (None without a counter), of its second half."""

    us: float
    mhz: float
    watts: float | None


def run(
    batches: Mapping[str, Batch],
    base: str,
    clock: Clock,
    meter: EnergyMeter | None,
    *,
    passes: int,
    seconds: float = TURN_SECONDS,
) -> list[tuple[str, Turn]]:
    """Returns the turns in the order in which they ran, which `schedule.turns` determines. Batches
    should last about `BATCH_US`.
    """
    done: list[tuple[str, Turn]] = []
    order = schedule.turns(base, [name for name in batches if name != base], passes)
    for name in order:
        done.append((name, _turn(batches[name], clock, meter, seconds)))
        progress.say(f"sustained, turn {len(done)} of {len(order)}")
    return done


def pair(done: list[tuple[str, Turn]], base: str) -> dict[str, tuple[list[Turn], list[float]]]:
    """Returns by provider its turns, and for each the base's µs as the mean of the turns before and
    after.

    The base's own turns are compared with themselves.
    """
    paired: dict[str, tuple[list[Turn], list[float]]] = {}
    for i, (name, turn) in enumerate(done):
        turns, bases = paired.setdefault(name, ([], []))
        turns.append(turn)
        bases.append(turn.us if name == base else (done[i - 1][1].us + done[i + 1][1].us) / 2)
    return paired


def _turn(batch: Batch, clock: Clock, meter: EnergyMeter | None, seconds: float) -> Turn:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    queue: deque[torch.cuda.Event] = deque()

    def work(until: float) -> int:
        calls = 0
        while calls == 0 or time.perf_counter() < until:
            batch.run()
            calls += batch.calls
            queue.append(torch.cuda.Event())
            queue[-1].record()
            if meter is not None:
                meter.sample()
            if len(queue) > _QUEUED:
                queue.popleft().synchronize()
        return calls

    begun = time.perf_counter()
    work(begun + seconds / 2)
    if meter is not None:
        meter.reset()
    clock.start()
    start.record()
    calls = work(begun + seconds)
    end.record()
    clock.stop()
    watts = meter.watts() if meter is not None else None
    end.synchronize()
    return Turn(float(start.elapsed_time(end)) * 1000 / calls, clock.mhz(), watts)

"""The burst protocol: idle, one warm call, eight timed calls; providers interleaved by rounds, in rotated order."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

CALLS = 8
IDLE_SECONDS = 0.05  # lets clocks and temperature recover between turns


@dataclass(frozen=True)
class Timing:
    """Median time of a call in µs, and the median over rounds of the base provider's time over this one's.

    `ratio_low` and `ratio_high` are the 10th and 90th percentile.
    """

    us: float
    ratio: float
    ratio_low: float
    ratio_high: float


def burst(calls: Mapping[str, Callable[[], object]], *, base: str, rounds: int = 15) -> dict[str, Timing]:
    """Times every call on the current CUDA device; `base` names the one that ratios compare with."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(_turn(calls[name]))
    return {name: summarize(times[name], times[base]) for name in names}


def summarize(times: list[float], base: list[float]) -> Timing:
    """The statistics of one provider from its times and the base's, round by round (at least two rounds)."""
    ratios = [b / t for t, b in zip(times, base, strict=True)]
    deciles = statistics.quantiles(ratios, n=10, method="inclusive")
    return Timing(statistics.median(times), statistics.median(ratios), deciles[0], deciles[-1])


def _turn(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    time.sleep(IDLE_SECONDS)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    start.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000 / CALLS

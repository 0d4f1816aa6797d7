"""Computes a ratio with its spread and a verdict from times measured round by round."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["faster", "slower", "tied"]

# Ratios that differ from 1 by less than this are ties, however often they repeat: a provider timed
# against itself can show as much.
BURST_TOLERANCE = 0.005
SUSTAINED_TOLERANCE = 0.003


@dataclass(frozen=True)
class Ratio:
    """The base's time divided by a provider's: the median over rounds, and the 10th and 90th
    percentile.

    `sure_low` and `sure_high` enclose the true median with 95% confidence, by ranks, so no
    distribution is assumed. With fewer than six rounds no ranks do, and they are the extremes.
    """

    median: float
    low: float
    high: float
    sure_low: float
    sure_high: float

    def verdict(self, tolerance: float) -> Verdict:
        """Returns "faster" or "slower" than the base only if the interval excludes 1 and the median
        differs by the tolerance.
        """
        if self.sure_low > 1 and self.median > 1 + tolerance:
            return "faster"
        if self.sure_high < 1 and self.median < 1 - tolerance:
            return "slower"
        return "tied"


def ratio(base: Sequence[float], times: Sequence[float]) -> Ratio:
    """Computes ratios of times taken in the same rounds. Raises ValueError unless both have the
    same number of times, at least two.
    """
    if len(base) != len(times) or len(times) < 2:
        raise ValueError(
            f"times has {len(times)} rounds and base {len(base)}, expected as many, at least 2"
        )
    ratios = sorted(b / t for b, t in zip(base, times, strict=True))
    deciles = statistics.quantiles(ratios, n=10, method="inclusive")
    rank = _rank(len(ratios))
    return Ratio(
        statistics.median(ratios), deciles[0], deciles[-1], ratios[rank], ratios[-1 - rank]
    )


def _rank(n: int) -> int:
    """Returns the largest k such that the k-th smallest and k-th largest of n values (from 0)
    enclose the median with 95% confidence.
    """
    tail, k = 0.0, -1
    while (tail := tail + math.comb(n, k + 1) / 2**n) <= 0.025:
        k += 1
    return max(k, 0)

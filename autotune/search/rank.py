"""Measures how well two orders agree."""

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence


def spearman(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Returns the correlation of ranks, from -1 to 1; equal values share their mean rank.

    Raises ValueError for different lengths, for fewer than two values, and where all values of one
    side are equal, because those have no order.
    """
    return statistics.correlation(_ranks(predicted), _ranks(measured))


def _ranks(values: Sequence[float]) -> list[int]:
    """Returns twice the place of each value in ascending order, less a constant."""
    ordered = sorted(values)
    return [bisect_left(ordered, value) + bisect_right(ordered, value) for value in values]

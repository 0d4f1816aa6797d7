"""Measures how well two orders agree."""

import statistics
from collections.abc import Sequence
from itertools import groupby


def ranks(values: Sequence[float]) -> list[float]:
    """Returns places in ascending order, from 1; equal values share their mean place."""
    order = sorted(range(len(values)), key=values.__getitem__)
    places, before = [0.0] * len(values), 0
    for _, group in groupby(order, key=values.__getitem__):
        equal = list(group)
        for i in equal:
            places[i] = before + (len(equal) + 1) / 2
        before += len(equal)
    return places


def spearman(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Returns the correlation of ranks, from -1 to 1.

    Raises ValueError for different lengths, for fewer than two values, and where all values of one
    side are equal, because those have no order.
    """
    return statistics.correlation(ranks(predicted), ranks(measured))

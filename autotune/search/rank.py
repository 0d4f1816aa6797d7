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
    if len(predicted) != len(measured):
        raise ValueError(
            f"predicted has {len(predicted)} values and measured {len(measured)}, expected as many"
        )
    if len(predicted) < 2:
        raise ValueError(f"predicted has {len(predicted)} values, expected at least 2")
    for name, values in (("predicted", predicted), ("measured", measured)):
        if len(set(values)) == 1:
            raise ValueError(f"{name} has {values[0]} only, expected values that differ")
    return statistics.correlation(ranks(predicted), ranks(measured))

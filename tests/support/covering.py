"""A selection of the combinations of several parameters that has every value, or every pair of two
values, at least once.

The product of all values is more than CI has to run on every change: it takes the selection, and
the other combinations have the mark `slow`.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

Names = tuple[str, ...]


def covering(
    *axes: Mapping[str, Any], of: int = 1, possible: Callable[..., bool] | None = None
) -> list[Any]:
    """Parameters of a test: all combinations of a value of each axis, by their names, of which
    those beyond the selection are slow.

    of: how many axes have their values combined in the selection, 1 for every value and 2 for every
        pair of values.
    possible: says of a combination's values whether it is one at all.
    """
    values = {
        names: tuple(axis[name] for axis, name in zip(axes, names, strict=True))
        for names in itertools.product(*axes)
    }
    values = {names: each for names, each in values.items() if not possible or possible(*each)}
    chosen = selection(list(values), of)
    return [
        pytest.param(
            *each, id="-".join(names), marks=() if names in chosen else (pytest.mark.slow,)
        )
        for names, each in values.items()
    ]


def selection(combinations: list[Names], of: int) -> set[Names]:
    """Combinations that have all which `of` values together occur in any: each the one that adds
    most, the first of those.
    """
    missing = set().union(*(_parts(names, of) for names in combinations))
    chosen: set[Names] = set()
    while missing:
        best = max(combinations, key=lambda names: len(_parts(names, of) & missing))
        chosen.add(best)
        missing -= _parts(best, of)
    return chosen


def _parts(names: Names, of: int) -> set[tuple[tuple[int, str], ...]]:
    """The values of a combination, so many at once, each with the number of its axis."""
    return set(itertools.combinations(enumerate(names), of))

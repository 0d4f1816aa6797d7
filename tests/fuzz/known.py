"""The differences from torch that are meant. docs/migrate.md has the same list, for people.

A difference is explained by the first entry whose predicate takes it; entries are narrow, so that
a fault which looks a little different is not.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from .calls import Outcome, described
from .compare import Difference

Predicate = Callable[[dict, Outcome, Outcome, Difference], bool]


@dataclass(frozen=True)
class Known:
    """`example` is the description of a call that shows the difference, and no other that is not listed."""

    name: str
    reason: str
    matches: Predicate
    example: dict


def explained(spec: dict, ours: Outcome, theirs: Outcome, found: Difference) -> Known | None:
    return next((entry for entry in KNOWN if entry.matches(spec, ours, theirs, found)), None)


def tensor(*shape: int, dtype: str = "float32", **how) -> dict:
    """The description of an ordinary tensor."""
    return {"shape": list(shape), "dtype": dtype, "layout": "contiguous", "seed": 1} | how


def call(name: str, tensors: dict, **how) -> dict:
    return {"call": name, "tensors": tensors} | how


def raises(pattern: str, *, torch_too: bool = False) -> Predicate:
    """outblas alone raises this, or with `torch_too` torch raises something else, of another type."""
    kinds = ("only outblas raises", "another type of error") if torch_too else ("only outblas raises",)

    def matches(spec: dict, ours: Outcome, theirs: Outcome, found: Difference) -> bool:
        return found.kind in kinds and bool(re.match(pattern, described(ours.error)))

    return matches


A, B = tensor(3, 4), tensor(4, 5)

KNOWN: list[Known] = []

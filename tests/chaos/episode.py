"""What an episode of a campaign is given, and what it says in the end."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .nursery import Nursery


@dataclass(frozen=True)
class Failure:
    """A promise that was not kept: which one, in a word or two that group failures, and all that is
    known of it.
    """

    promise: str
    detail: str


@dataclass
class Episode:
    """`units`: how many of what the campaign counts. `counts` are added up over episodes, `shares`
    averaged.
    """

    units: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    shares: dict[str, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def fail(self, promise: str, detail: object) -> None:
        """Keeps one failure of each promise and detail."""
        found = Failure(promise, str(detail))
        if found not in self.failures:
            self.failures.append(found)


@dataclass(frozen=True)
class Setting:
    """Where an episode runs: a fresh folder of its own, its random numbers, and processes that
    start quickly.

    `index` says which episode it is, `units` how many at most are wanted of it. `nursery_with`
    makes another nursery, with these variables in the environment of all that it starts.
    """

    index: int
    units: int
    random: random.Random
    folder: Path
    nursery: Nursery
    nursery_with: Callable[[dict[str, str]], Nursery]

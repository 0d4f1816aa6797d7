"""The finals: from times of rivals that took turns to a winner, by how much it won, and how sure
that is.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ...bench.statistics import Ratio, ratio

K = TypeVar("K")

ROUNDS = 12  # before anyone is dropped
BATCH = 6  # rounds between two looks
MOST_ROUNDS = 60
RESOLUTION = 0.002  # rivals that are surely nearer than this after all rounds are as fast


@dataclass
class Race(Generic[K]):
    """Rivals that take turns with cuBLAS round by round; those that are surely slower drop out.

    `times` has a rival's µs a call by round, `base` cuBLAS's. A rival that dropped out has fewer
    rounds.
    """

    rivals: list[K]
    base: list[float] = field(default_factory=list)
    times: dict[K, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.alive = list(self.rivals)
        self.times = {rival: [] for rival in self.rivals}

    @property
    def rounds(self) -> int:
        """That the leader has run."""
        return len(self.base)

    def add(self, base: Sequence[float], times: Sequence[Sequence[float]]) -> None:
        """More rounds of all that are alive, in their order."""
        self.base += base
        for rival, found in zip(self.alive, times, strict=True):
            self.times[rival] += found
        if self.rounds >= ROUNDS:
            self._drop()

    def remove(self, rival: K) -> None:
        """A rival that could not go on."""
        self.alive.remove(rival)
        del self.times[rival]

    @property
    def over(self) -> bool:
        """Whether further rounds would change nothing worth knowing."""
        return self.rounds >= MOST_ROUNDS or (self.rounds >= ROUNDS and len(self.alive) < 2)

    def ahead(self, rival: K, others: Iterable[K]) -> bool:
        """Whether each of the others is surely slower, or surely not faster by more than the race
        resolves.
        """
        leads = [self.lead(rival, other) for other in others if other != rival]
        return all(lead.sure_low > 1 or lead.sure_high < 1 + RESOLUTION for lead in leads)

    @property
    def separated(self) -> bool:
        """Whether nobody is left that may be as fast as the leader, or nobody that differs by what
        the race resolves after all rounds.
        """
        if len(self.alive) < 2:
            return True
        leader = self.leader
        others = [self.lead(leader, rival) for rival in self.alive if rival != leader]
        return self.rounds >= MOST_ROUNDS and all(
            lead.sure_high < 1 + RESOLUTION for lead in others
        )

    @property
    def leader(self) -> K:
        """The fastest by the median over rounds."""
        return min(self.alive, key=lambda rival: statistics.median(self.times[rival]))

    def order(self) -> list[K]:
        """The fastest first: those alive, then the others by the median ratio to cuBLAS of their
        rounds.
        """
        return sorted(
            self.times,
            key=lambda rival: (rival not in self.alive, -self.against_base(rival).median),
        )

    def lead(self, rival: K, other: K) -> Ratio:
        """The other's time over the rival's, in the rounds that both ran."""
        mine, theirs = self.times[rival], self.times[other]
        both = min(len(mine), len(theirs))
        return ratio(theirs[:both], mine[:both])

    def against_base(self, rival: K) -> Ratio:
        """cuBLAS's time over the rival's."""
        times = self.times[rival]
        return ratio(self.base[: len(times)], times)

    def confidence(self, rival: K, others: Iterable[K]) -> float:
        """A bound from below of that with which the rival is the fastest of them: by sign tests
        against each other one, whose doubts are added up. 0 where they add up to 1 or more, which
        says nothing. No distribution of times is assumed; that the race was looked at while it ran
        is not accounted for.
        """
        doubt = sum(
            _sign_test(self.times[rival], self.times[other]) for other in others if other != rival
        )
        return max(0.0, 1.0 - doubt)

    def _drop(self) -> None:
        leader = self.leader
        for rival in [rival for rival in self.alive if rival != leader]:
            lead = self.lead(leader, rival)
            if lead.sure_low > 1:
                self.alive.remove(rival)


def _sign_test(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """How likely so many rounds are won by one who is no faster; ties count for neither."""
    wins = sum(a < b for a, b in zip(mine, theirs, strict=False))
    losses = sum(a > b for a, b in zip(mine, theirs, strict=False))
    rounds = wins + losses
    tail = sum(math.comb(rounds, k) for k in range(wins, rounds + 1))
    return min(1.0, tail / float(2**rounds))

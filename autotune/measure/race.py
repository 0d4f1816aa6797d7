"""Successive elimination of the finals' candidates: from times of candidates that took turns to the
best, by how much it leads, and how sure that is.
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
RESOLUTION = 0.002  # candidates that are surely nearer than this after all rounds are as fast


@dataclass
class SuccessiveElimination(Generic[K]):
    """Candidates that take turns with cuBLAS round by round; those that are surely slower drop out.

    `times` has a candidate's µs a call by round, `base` cuBLAS's. A candidate that dropped out has
    fewer rounds.
    """

    candidates: list[K]
    base: list[float] = field(default_factory=list)
    times: dict[K, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.alive = list(self.candidates)
        self.times = {candidate: [] for candidate in self.candidates}

    @property
    def rounds(self) -> int:
        """How many rounds the leader has run."""
        return len(self.base)

    def add(self, base: Sequence[float], times: Sequence[Sequence[float]]) -> None:
        """Adds rounds: µs a call of cuBLAS, and of each candidate that is alive, in their order."""
        self.base += base
        for candidate, found in zip(self.alive, times, strict=True):
            self.times[candidate] += found
        if self.rounds >= ROUNDS:
            self._drop()

    def remove(self, candidate: K) -> None:
        """Takes out a candidate that could not go on."""
        self.alive.remove(candidate)
        del self.times[candidate]

    @property
    def over(self) -> bool:
        """Whether further rounds would change nothing worth knowing."""
        return self.rounds >= MOST_ROUNDS or (self.rounds >= ROUNDS and len(self.alive) < 2)

    def ahead(self, candidate: K, others: Iterable[K]) -> bool:
        """Whether each of the others is surely slower, or surely not faster by more than
        RESOLUTION.
        """
        leads = [self.lead(candidate, other) for other in others if other != candidate]
        return all(lead.sure_low > 1 or lead.sure_high < 1 + RESOLUTION for lead in leads)

    @property
    def separated(self) -> bool:
        """Whether no candidate is left that may be as fast as the leader, or, after all rounds,
        none that differs from it by more than RESOLUTION.
        """
        if len(self.alive) < 2:
            return True
        leader = self.leader
        others = [self.lead(leader, candidate) for candidate in self.alive if candidate != leader]
        return self.rounds >= MOST_ROUNDS and all(
            lead.sure_high < 1 + RESOLUTION for lead in others
        )

    @property
    def leader(self) -> K:
        """The fastest by the median over rounds."""
        return min(self.alive, key=lambda candidate: statistics.median(self.times[candidate]))

    def order(self) -> list[K]:
        """The fastest first: those alive, then the others by the median ratio to cuBLAS of their
        rounds.
        """
        return sorted(
            self.times,
            key=lambda candidate: (
                candidate not in self.alive,
                -self.against_base(candidate).median,
            ),
        )

    def lead(self, candidate: K, other: K) -> Ratio:
        """The other's time over the candidate's, in the rounds that both ran."""
        mine, theirs = self.times[candidate], self.times[other]
        both = min(len(mine), len(theirs))
        return ratio(theirs[:both], mine[:both])

    def against_base(self, candidate: K) -> Ratio:
        """cuBLAS's time over the candidate's."""
        times = self.times[candidate]
        return ratio(self.base[: len(times)], times)

    def confidence(self, candidate: K, others: Iterable[K]) -> float:
        """A lower bound of the confidence with which the candidate is the fastest of them.

        There is a sign test against each of the others, and the doubts are added up; 0 where they
        add up to 1 or more, which says nothing. No distribution of times is assumed. That the
        times were looked at between rounds is not accounted for.
        """
        doubt = sum(
            _sign_test(self.times[candidate], self.times[other])
            for other in others
            if other != candidate
        )
        return max(0.0, 1.0 - doubt)

    def _drop(self) -> None:
        leader = self.leader
        for candidate in [candidate for candidate in self.alive if candidate != leader]:
            lead = self.lead(leader, candidate)
            if lead.sure_low > 1:
                self.alive.remove(candidate)


def _sign_test(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """How likely it is that a candidate that is no faster wins so many rounds; ties count for
    neither.
    """
    wins = sum(a < b for a, b in zip(mine, theirs, strict=False))
    losses = sum(a > b for a, b in zip(mine, theirs, strict=False))
    rounds = wins + losses
    tail = sum(math.comb(rounds, k) for k in range(wins, rounds + 1))
    return min(1.0, tail / float(2**rounds))

"""The finals: candidates take turns with cuBLAS in a worker, and successive elimination determines
the best, its lead, and the confidence in it. A candidate that fails does not affect the others.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from outblas.autotune.measure.isolated import Bench
from outblas.autotune.measure.progress import Progress
from outblas.autotune.measure.worker import Entry
from outblas.autotune.search.candidates import Candidate
from outblas.autotune.store.records import Workload
from outblas.base.processes import WorkerDied
from outblas.bench.statistics import Ratio, ratio

K = TypeVar("K")

ROUNDS = 12  # before a candidate may drop out
BATCH = 6  # rounds between two checks
MOST_ROUNDS = 60


@dataclass
class SuccessiveElimination(Generic[K]):
    """Candidates that take turns with cuBLAS round by round; those that are surely slower drop out.

    `times` has a candidate's µs per call by round, `base` those of cuBLAS. A candidate that dropped
    out has fewer rounds.
    """

    candidates: list[K]
    base: list[float] = field(default_factory=list)
    times: dict[K, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.alive = list(self.candidates)
        self.times = {candidate: [] for candidate in self.candidates}

    @property
    def rounds(self) -> int:
        """The number of rounds that the leader has run."""
        return len(self.base)

    def add(self, base: Sequence[float], times: Sequence[Sequence[float]]) -> None:
        """Adds rounds: µs per call of cuBLAS, and of each remaining candidate, in order."""
        self.base += base
        for candidate, us in zip(self.alive, times, strict=True):
            self.times[candidate] += us
        if self.rounds >= ROUNDS:
            self._drop()

    def remove(self, candidate: K) -> None:
        """Removes a candidate that failed."""
        self.alive.remove(candidate)
        del self.times[candidate]

    @property
    def over(self) -> bool:
        """Returns whether further rounds would change nothing of interest."""
        return self.rounds >= MOST_ROUNDS or (self.rounds >= ROUNDS and len(self.alive) < 2)

    @property
    def leader(self) -> K:
        """The fastest candidate by the median over rounds."""
        return min(self.alive, key=lambda candidate: statistics.median(self.times[candidate]))

    def order(self) -> list[K]:
        """Returns the candidates, the fastest first: the remaining ones, then the others by their
        median ratio to cuBLAS.
        """
        return sorted(
            self.times,
            key=lambda candidate: (
                candidate not in self.alive,
                -self.against_base(candidate).median,
            ),
        )

    def lead(self, candidate: K, other: K) -> Ratio:
        """Returns the ratio of the other's time to the candidate's, over the rounds that both
        ran.
        """
        mine, theirs = self.times[candidate], self.times[other]
        both = min(len(mine), len(theirs))
        return ratio(theirs[:both], mine[:both])

    def against_base(self, candidate: K) -> Ratio:
        """Returns the ratio of cuBLAS's time to the candidate's."""
        times = self.times[candidate]
        return ratio(self.base[: len(times)], times)

    def confidence(self, candidate: K, others: Iterable[K]) -> float:
        """Returns a lower bound of the confidence that the candidate is the fastest of them.

        It makes a sign test against each of the others and adds up the doubts; it returns 0, which
        means nothing, where they add up to 1 or more. No distribution of times is assumed. The
        checks between rounds are not accounted for.
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
    """Returns the probability that a candidate that is not faster wins this many rounds; ties do
    not count.
    """
    wins = sum(a < b for a, b in zip(mine, theirs, strict=False))
    losses = sum(a > b for a, b in zip(mine, theirs, strict=False))
    rounds = wins + losses
    tail = sum(math.comb(rounds, k) for k in range(wins, rounds + 1))
    return min(1.0, tail / float(2**rounds))


MOST_KILLS = 2  # of workers from outside, while only this candidate ran, before it is removed


class Finals:
    """Measures the fastest configs of a workload until the best is known or the budget is spent."""

    def __init__(
        self, workload: Workload, bench: Bench, progress: Progress, say: Callable[[], None]
    ) -> None:
        self.workload, self.bench, self.progress, self.say = workload, bench, progress, say
        # workers killed from outside while only this candidate ran
        self.kills: Counter[Candidate] = Counter()

    def run(self, candidates: Sequence[Candidate]) -> SuccessiveElimination[Candidate]:
        """Runs the finals and returns the elimination, possibly with no candidate left, or without
        any round.
        """
        race = SuccessiveElimination(list(candidates))
        for _ in range(MOST_ROUNDS + 4 * len(candidates)):
            if not race.alive or race.over or self._late(race):
                break
            try:
                race.add(*self.bench.race(self.workload, _entries(race.alive), BATCH))
                self._tell(race)
            except WorkerDied as death:
                self.progress.message = f"finals: {death}"
                self._remove_faulty(race)
        return race

    def _late(self, race: SuccessiveElimination[Candidate]) -> bool:
        deadline = self.progress.deadline
        return deadline is not None and race.rounds >= BATCH and time.monotonic() > deadline

    def _tell(self, race: SuccessiveElimination[Candidate]) -> None:
        self.progress.rounds = race.rounds
        us = statistics.median(race.times[race.leader])
        self.progress.lead(race.leader.brief, us, race.against_base(race.leader).median)
        self.say()

    def _remove_faulty(self, race: SuccessiveElimination[Candidate]) -> None:
        """After rounds in which the worker died, measures each candidate alone, and removes those
        with which the worker dies again. That it is killed from outside is not held against a
        candidate while it is rare.
        """
        for candidate in list(race.alive):
            try:
                self.bench.race(self.workload, _entries([candidate]), 1)
            except WorkerDied as death:
                self.kills[candidate] += death.status == "killed"
                if death.status != "killed" or self.kills[candidate] >= MOST_KILLS:
                    race.remove(candidate)
                    self.progress.message = f"{candidate.label}: {death.status} in the finals"
                    self.progress.failures[death.status] += 1


def _entries(candidates: Iterable[Candidate]) -> list[Entry]:
    return [(candidate.target, candidate.text) for candidate in candidates]

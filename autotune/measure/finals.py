"""The finals in a worker: candidates take turns with cuBLAS, and a candidate that fails does not
affect the others.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from outblas.autotune.measure.bench import Bench
from outblas.autotune.measure.processes import WorkerDied
from outblas.autotune.measure.progress import Progress
from outblas.autotune.measure.race import BATCH, MOST_ROUNDS, SuccessiveElimination
from outblas.autotune.measure.worker import Entry
from outblas.autotune.search.candidates import Candidate
from outblas.autotune.store.records import Workload

MOST_KILLS = 2  # of workers from outside, while only this candidate ran, before it is removed


class Finals:
    """Measures the fastest configs of a workload until the best is known or the budget is spent."""

    def __init__(
        self, workload: Workload, bench: Bench, progress: Progress, say: Callable[[], None]
    ) -> None:
        self.workload, self.bench, self.progress, self.say = workload, bench, progress, say
        self.entered: dict[Candidate, int] = {}  # with the number of workers lost before
        # workers killed from outside while only this candidate ran
        self.kills: Counter[Candidate] = Counter()

    def run(self, candidates: Sequence[Candidate]) -> SuccessiveElimination[Candidate]:
        """Runs the finals and returns the elimination, possibly with no candidate left, or without
        any round.
        """
        race = SuccessiveElimination(list(candidates))
        for _ in range(MOST_ROUNDS + 4 * len(candidates)):
            if not self._all_entered(race):
                continue
            if not race.alive or race.over or self._late(race):
                break
            try:
                base, times = self.bench.race(_entries(race.alive), BATCH)
                before = set(race.alive)
                race.add(base, times)
                self._tell(race)
                self.bench.forget(_entries(before - set(race.alive)))
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

    def _all_entered(self, race: SuccessiveElimination[Candidate]) -> bool:
        """Prepares the remaining candidates in the current worker; returns False if one of them
        failed and was removed.
        """
        for candidate in list(race.alive):
            if self.entered.get(candidate) == self.bench.restarts:
                continue
            try:
                status: str = self.bench.enter(
                    self.workload, (candidate.target, candidate.text)
                ).status
            except WorkerDied as death:
                if self._spared(candidate, death):
                    return False
                status = death.status
            if status != "ok":
                self._remove(race, candidate, status)
                return False
            self.entered[candidate] = self.bench.restarts
        return all(self.entered[candidate] == self.bench.restarts for candidate in race.alive)

    def _remove_faulty(self, race: SuccessiveElimination[Candidate]) -> None:
        """After rounds in which the worker died, measures each candidate alone, and removes those
        with which the worker dies again.
        """
        for candidate in list(race.alive):
            while candidate in race.alive and not self._all_entered(race):
                pass
            if candidate not in race.alive:
                continue
            try:
                self.bench.race(_entries([candidate]), 1)
            except WorkerDied as death:
                if not self._spared(candidate, death):
                    self._remove(race, candidate, death.status)

    def _spared(self, candidate: Candidate, death: WorkerDied) -> bool:
        """Returns whether a worker was killed from outside, which is not held against the candidate
        while it is rare.
        """
        self.kills[candidate] += death.status == "killed"
        return death.status == "killed" and self.kills[candidate] < MOST_KILLS

    def _remove(
        self, race: SuccessiveElimination[Candidate], candidate: Candidate, status: str
    ) -> None:
        race.remove(candidate)
        self.progress.message = f"{candidate.label}: {status} in the finals"
        self.progress.failures[status] += 1


def _entries(candidates: Iterable[Candidate]) -> list[Entry]:
    return [(candidate.target, candidate.text) for candidate in candidates]

"""The finals in a worker: rivals take turns with cuBLAS, and one that cannot go on costs the others
nothing.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ...core.configs import brief
from ..search.prune import Candidate
from ..store.records import Workload
from .isolated import MeasureWorker, WorkerDied
from .progress import Progress
from .race import BATCH, MOST_ROUNDS, Race
from .worker import Entry

MOST_KILLS = 2  # of workers by somebody else, while a rival alone ran, before it is out


class Finals:
    """A race of a workload's fastest configs, until it is decided or the budget is spent."""

    def __init__(
        self, workload: Workload, bench: MeasureWorker, progress: Progress, say: Callable[[], None]
    ) -> None:
        self.workload, self.bench, self.progress, self.say = workload, bench, progress, say
        self.entered: dict[Candidate, int] = {}  # by how many workers had gone before
        self.kills: Counter[Candidate] = Counter()  # of workers, from outside, while it alone ran

    def run(self, rivals: Sequence[Candidate]) -> Race[Candidate]:
        """The race as it ended, which may be with nobody alive, or before its first round."""
        race = Race(list(rivals))
        for _ in range(MOST_ROUNDS + 4 * len(rivals)):
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

    def _late(self, race: Race[Candidate]) -> bool:
        deadline = self.progress.deadline
        return deadline is not None and race.rounds >= BATCH and time.monotonic() > deadline

    def _tell(self, race: Race[Candidate]) -> None:
        self.progress.rounds = race.rounds
        self.progress.best = f"{race.leader.subject.name}[{brief(race.leader.config)}]"
        self.progress.best_ratio = race.against_base(race.leader).median
        self.say()

    def _all_entered(self, race: Race[Candidate]) -> bool:
        """Makes those in the race ready in the worker that there is; False if one of them failed,
        and is out.
        """
        for rival in list(race.alive):
            if self.entered.get(rival) == self.bench.restarts:
                continue
            try:
                status: str = self.bench.enter(self.workload, (rival.subject, rival.text)).status
            except WorkerDied as death:
                if self._spared(rival, death):
                    return False
                status = death.status
            if status != "ok":
                self._remove(race, rival, status)
                return False
            self.entered[rival] = self.bench.restarts
        return all(self.entered[rival] == self.bench.restarts for rival in race.alive)

    def _remove_faulty(self, race: Race[Candidate]) -> None:
        """After a race that took the worker down: who does so alone is out."""
        for rival in list(race.alive):
            while rival in race.alive and not self._all_entered(race):
                pass
            if rival not in race.alive:
                continue
            try:
                self.bench.race(_entries([rival]), 1)
            except WorkerDied as death:
                if not self._spared(rival, death):
                    self._remove(race, rival, death.status)

    def _spared(self, rival: Candidate, death: WorkerDied) -> bool:
        """Whether a worker was killed from outside, which is not the rival's fault while it happens
        seldom.
        """
        self.kills[rival] += death.status == "killed"
        return death.status == "killed" and self.kills[rival] < MOST_KILLS

    def _remove(self, race: Race[Candidate], rival: Candidate, status: str) -> None:
        race.remove(rival)
        self.progress.message = f"{rival.label}: {status} in the finals"
        self.progress.failures[status] += 1


def _entries(rivals: Iterable[Candidate]) -> list[Entry]:
    return [(rival.subject, rival.text) for rival in rivals]

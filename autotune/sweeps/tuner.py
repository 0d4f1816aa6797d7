"""Tunes one workload on one GPU: compiles ahead, measures each config once, then lets the fastest
configs take turns in the finals.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from outblas.autotune.measure.compile_pool import UNBUILT, Pool
from outblas.autotune.measure.finals import Finals, SuccessiveElimination
from outblas.autotune.measure.isolated import Bench
from outblas.autotune.measure.progress import Progress, Report, silent
from outblas.autotune.search.candidates import Candidate
from outblas.autotune.search.plan import batches
from outblas.autotune.search.prune import prune
from outblas.autotune.search.strategy import Search
from outblas.autotune.store.records import (
    WEIGHTS,
    BestConfig,
    Finalist,
    Gpu,
    Trial,
    Workload,
    base_name,
    now,
)
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps.outcome import Job, Outcome
from outblas.autotune.sweeps.screening import Screen
from outblas.base.grouped_shapes import DISTRIBUTIONS, Grouping
from outblas.base.processes import WorkerDied

SCREEN_SHARE = 0.75  # of the budget; the rest is for the finals


@dataclass
class Tuning:
    """The tuning of a job's workload. Every trial is in `store` as soon as it is finished, so
    killing this process loses only the current one.

    `stopped` tells that the sweep was interrupted; `run` raises Cancelled where it would otherwise
    wait for other drivers, and StrategyError for errors of the job's strategy.
    """

    job: Job
    gpu: Gpu
    bench: Bench
    compilers: Pool | None
    store: Store
    report: Report = silent
    label: str = ""
    stopped: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        job, gpu, options = self.job, self.gpu, self.job.options
        self.sources = {target.name: target.fingerprint for target in job.targets}

        base = base_name(job.workload, on_gpu=gpu.arch > 0)
        self.progress = Progress(job.workload, gpu=self.label or gpu.name, base=base)
        started = time.monotonic()
        self.until: float | None = None  # when screening ends
        if job.seconds is not None:
            self.progress.deadline = started + job.seconds
            self.until = started + SCREEN_SHARE * job.seconds

        space = prune(job.targets, job.workload, gpu)
        self.search = Search(
            job.workload, gpu, space.candidates, trials=options.trials, until=self.until
        )
        self.outcome = Outcome(job, gpu, space)
        self.screen = Screen(
            self.store,
            self.bench,
            self.compilers if gpu.arch else None,
            self.outcome,
            self.search,
            self.progress,
            self.say,
            self.stopped,
        )

    def say(self) -> None:
        """Reports the progress."""
        self.report(self.progress)

    def run(self) -> Outcome:
        """Runs the job."""
        progress, outcome = self.progress, self.outcome
        try:
            self._measure_proposals()
            if not self._decided():
                self._finals()
            progress.stage = "done"
        except WorkerDied as death:  # the worker cannot even make its operands
            progress.stage, progress.message, outcome.finished = "failed", str(death), False
            outcome.failure = str(death)
        outcome.unlocked = self.bench.unlocked
        progress.message = progress.message or outcome.unlocked
        self.say()
        return outcome

    # Screening.
    def _measure_proposals(self) -> None:
        """Measures what the strategy proposes, batch by batch, until the strategy or the budget
        ends.
        """
        outcome, progress = self.outcome, self.progress
        progress.stage = "preparing"
        proposals = batches(self.job.strategy, self.search, self._candidates(self._related()))
        for batch in proposals:
            outcome.plan = replace(outcome.plan, ranked=(*outcome.plan.ranked, *batch))
            progress.valid = len(outcome.plan.ranked)
            missing = []
            for candidate in batch:
                trial = self.screen.stored.get(self.screen.identity(candidate))
                if trial is None:
                    missing.append(candidate)
                else:
                    progress.known += 1
                    self.screen.note(trial)
            if not missing:
                continue
            if progress.stage == "preparing":
                progress.cublas_us = self.bench.open(self.job.workload)
                progress.stage = "screening"
            elif self.until is not None and time.monotonic() > self.until:
                break
            self.say()
            self.screen.run(missing, self.until)
        outcome.finished = len(outcome.trials) == len(outcome.plan.ranked)

    def _decided(self) -> bool:
        """Returns whether an earlier sweep has run the finals of these trials, so that its winners
        are those of this sweep.
        """
        if not self.job.options.resume or self.outcome.new:
            return False
        earlier = {winner.kernel: winner for winner in self._winners_at(self.job.workload)}
        names = [target.name for target in self.job.targets]
        screened = self._screened()
        if not all(name in earlier and earlier[name].screened >= screened for name in names):
            return False

        self.outcome.winners = [earlier[name] for name in names]
        best = self.outcome.winner
        assert best is not None
        self.progress.lead(self.screen.label(best), best.us, best.ratio)
        return True

    def _related(self) -> list[BestConfig]:
        """Returns winners for the same product with the other state of its weights, and without its
        epilogue; and for the same groups, balanced and skewed. A config that is fast with warm
        weights is worth trying with cold ones, and the other way round, wherever the strategy ranks
        it.
        """
        workload = self.job.workload
        others = [replace(workload, weights=w) for w in WEIGHTS if w != workload.weights]
        if workload.epilogue:
            others.append(replace(workload, epilogue=""))
        if workload.grouping:
            grouping = Grouping.parse(workload.grouping)
            others += [
                replace(workload, grouping=str(replace(grouping, distribution=other)))
                for other in DISTRIBUTIONS
                if other != grouping.distribution
            ]
        return [winner for other in others for winner in self._winners_at(other)]

    def _winners_at(self, workload: Workload) -> list[BestConfig]:
        """Returns winners of earlier sweeps on this GPU, for these kernels with their current
        source.
        """
        return [
            winner
            for winner in self.store.winners(workload=workload)
            if winner.gpu == self.gpu and self.sources.get(winner.kernel) == winner.source
        ]

    def _candidates(self, records: Iterable[Trial | BestConfig]) -> list[Candidate]:
        """Returns the candidates for the kernels and configs of these records, each once."""
        places = dict.fromkeys((record.kernel, record.config) for record in records)
        candidates = (self.search.find(kernel, config) for kernel, config in places)
        return [candidate for candidate in candidates if candidate is not None]

    def _screened(self) -> int:
        """Returns the number of configs that could be compiled and were measured."""
        return sum(trial.status not in UNBUILT for trial in self.outcome.trials)

    # Finals.
    def _finals(self) -> None:
        finalists = self._candidates(self._finalists())
        if not finalists:
            return
        self.progress.stage = "finals"
        self.say()
        race = Finals(self.job.workload, self.bench, self.progress, self.say).run(finalists)
        if race.alive and race.rounds >= 2:
            self._record_winners(race)

    def _finalists(self) -> Iterator[Trial | BestConfig]:
        """Yields the fastest trials of the screening, the best of each kernel, earlier winners, and
        winners of related workloads that are correct here too.

        An earlier winner may have had bad luck in the screening, or not have been proposed this
        time. It takes part in any case, because the winner of these finals replaces it in the
        store.
        """
        timed = [trial for trial in self.outcome.trials if trial.ok and trial.us is not None]
        timed.sort(key=lambda trial: trial.us or 0.0)
        yield from timed[: self.job.options.top_k]
        for target in self.job.targets:
            yield from [trial for trial in timed if trial.kernel == target.name][:1]
        yield from self._winners_at(self.job.workload)
        right = {(trial.kernel, trial.config) for trial in timed}
        yield from (won for won in self._related() if (won.kernel, won.config) in right)

    def _record_winners(self, race: SuccessiveElimination[Candidate]) -> None:
        order = race.order()
        finalists = tuple(_finalist(race, candidate) for candidate in order)
        for target in self.job.targets:
            of_kernel = [candidate for candidate in order if candidate.target == target]
            if of_kernel:
                winner = self._winner(race, of_kernel, finalists)
                self.store.record_best(winner)
                self.outcome.winners.append(winner)

    def _winner(
        self,
        race: SuccessiveElimination[Candidate],
        order: Sequence[Candidate],
        finalists: tuple[Finalist, ...],
    ) -> BestConfig:
        """Returns the winner of one kernel, whose candidates are in `order`, the fastest first."""
        best, second = order[0], order[1] if len(order) > 1 else None
        lead = race.lead(best, second) if second is not None else None
        rounds = len(race.times[best])
        return BestConfig(
            **vars(_finalist(race, best)),
            gpu=self.gpu,
            workload=self.job.workload,
            source=self.sources[best.target.name],
            cublas_us=statistics.median(race.base[:rounds]),
            rounds=rounds,
            runner_up=second.text if second is not None else "",
            lead=lead.median if lead is not None else None,
            lead_low=lead.sure_low if lead is not None else None,
            lead_high=lead.sure_high if lead is not None else None,
            confidence=race.confidence(best, order),
            screened=self._screened(),
            valid=self.outcome.plan.valid,
            finalists=finalists,
            when=now(),
        )


def _finalist(race: SuccessiveElimination[Candidate], candidate: Candidate) -> Finalist:
    spread = race.against_base(candidate)
    return Finalist(
        kernel=candidate.target.name,
        config=candidate.text,
        us=statistics.median(race.times[candidate]),
        ratio=spread.median,
        ratio_low=spread.low,
        ratio_high=spread.high,
    )

"""Tunes one workload on one GPU: compiles ahead, measures each config once, then lets the fastest
configs take turns in the finals.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from outblas.autotune.measure.bench import Bench
from outblas.autotune.measure.compile_pool import UNBUILT
from outblas.autotune.measure.finals import Finals
from outblas.autotune.measure.prefetch import Ahead, Pool
from outblas.autotune.measure.processes import WorkerDied
from outblas.autotune.measure.progress import Progress, Report, silent
from outblas.autotune.measure.race import SuccessiveElimination
from outblas.autotune.search.candidates import Candidate, Ranker, by_model
from outblas.autotune.search.plan import Plan, batches
from outblas.autotune.search.prune import prune
from outblas.autotune.search.strategy import ModelRanked, Search, Strategy
from outblas.autotune.search.target import TuneTarget
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
from outblas.autotune.sweeps.job_view import JobView
from outblas.autotune.sweeps.screening import Built, Screen, Unmeasured
from outblas.base.configs import brief
from outblas.base.grouped_shapes import DISTRIBUTIONS, Grouping

SCREEN_SHARE = 0.75  # of the budget; the rest is for the finals

# Identifies a trial on one GPU: the kernel, its source, and the config as text.
_Key = tuple[str, str, str]


@dataclass(frozen=True)
class Job:
    """What to tune: competing kernels, one workload, and limits.

    Attributes:
        targets: the kernels.
        trials: how many configs of each kernel to measure, the first that `strategy` proposes;
            None: all valid ones.
        top_k: how many configs go to the finals.
        seconds: the time for the whole job; None: no limit.
        resume: whether results in the store count; otherwise everything is measured again.
        ranker: predicts times, for `strategy` and for pruning.
        retry_failed: whether configs that have failed are measured again.
        strategy: decides which configs are measured, and in which order.
    """

    targets: tuple[TuneTarget, ...]
    workload: Workload
    trials: int | None = None
    top_k: int = 8
    seconds: float | None = None
    resume: bool = True
    ranker: Ranker = by_model
    retry_failed: bool = False
    strategy: Strategy = field(default_factory=ModelRanked)


@dataclass
class Outcome:
    """What a sweep found for one workload on one GPU.

    Attributes:
        job: The kernels, the workload and the options.
        gpu: Where it was measured.
        plan: What was to be measured, and what was pruned.
        trials: All trials of the plan, those that the store had before included.
        new: How many of the trials were measured now.
        winners: The fastest config of each kernel.
        finished: Whether every config of the plan has a trial.
        failure: Why the job could not go on; "" where it did.
        unmeasured: Configs that could not be measured because something else went wrong, such as
            a worker that was killed. The next sweep tries them again.
        unlocked: Why the GPU was measured without a lock; "" where it was locked.

    Example:
        >>> from outblas.autotune import Outcome, Sweep
        >>> def report(found: Sweep) -> None:
        ...     for outcome in found.outcomes:  # Outcome records
        ...         print(outcome.job.workload, outcome.gpu.name, len(outcome.trials))
        >>> report(Sweep())
    """

    job: Job
    gpu: Gpu
    plan: Plan
    trials: list[Trial] = field(default_factory=list)
    new: int = 0
    winners: list[BestConfig] = field(default_factory=list)
    finished: bool = True
    failure: str = ""
    unmeasured: list[Unmeasured] = field(default_factory=list)
    unlocked: str = ""

    @property
    def winner(self) -> BestConfig | None:
        """The fastest config of all kernels; None where nothing could be measured."""
        return max(self.winners, key=lambda winner: winner.ratio, default=None)


def tune(
    job: Job,
    gpu: Gpu,
    bench: Bench,
    compilers: Pool | None,
    store: Store,
    report: Report = silent,
    *,
    label: str = "",
    stopped: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Runs a job. Every trial is in `store` as soon as it is finished, so killing this process
    loses only the current one.

    `stopped` tells that the sweep was interrupted; Cancelled is raised where the job would
    otherwise wait for other drivers. Raises StrategyError for errors of the job's strategy.
    """
    return _Tuning(job, gpu, bench, compilers, store, report, label, stopped).run()


class _Tuning:
    def __init__(
        self,
        job: Job,
        gpu: Gpu,
        bench: Bench,
        compilers: Pool | None,
        store: Store,
        report: Report,
        label: str,
        stopped: Callable[[], bool],
    ) -> None:
        self.job, self.gpu, self.bench, self.is_stopped = job, gpu, bench, stopped
        self.store = JobView(store, job.workload, resume=job.resume, retry_failed=job.retry_failed)
        self.compilers = compilers if gpu.arch else None
        self.sources = {target.name: target.fingerprint for target in job.targets}

        base = base_name(job.workload, on_gpu=gpu.arch > 0)
        self.progress = Progress(job.workload, gpu=label or gpu.name, base=base)
        self.say: Callable[[], None] = lambda: report(self.progress)
        started = time.monotonic()
        self.until: float | None = None  # when screening ends
        if job.seconds is not None:
            self.progress.deadline = started + job.seconds
            self.until = started + SCREEN_SHARE * job.seconds

        space = prune(job.targets, job.workload, gpu, job.ranker)
        self.search = Search(
            job.workload, gpu, space.candidates, trials=job.trials, until=self.until
        )
        self.outcome = Outcome(job, gpu, Plan.before_proposals(space))
        self.best: Trial | None = None
        self.screen = Screen(self.store, bench, self.compilers, gpu, job.workload, self)

    def run(self) -> Outcome:
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
        seeds = self._candidates((won.kernel, won.config) for won in self._related_winners())
        proposals = batches(self.job.strategy, self.search, seeds)
        progress.stage = "preparing"
        batch = next(proposals, ())
        self._extend_plan(batch)
        self.say()

        stored = self._stored_trials()
        while batch:
            missing = self._take_stored(batch, stored)
            if missing:
                if progress.stage == "preparing":
                    progress.cublas_us = self.bench.open(self.job.workload)
                    progress.stage = "screening"
                elif self._late():
                    break
                self.say()
                self._screen(missing)
            batch = next(proposals, ())
            self._extend_plan(batch)
        outcome.finished = len(outcome.trials) == len(outcome.plan.ranked)

    def _extend_plan(self, batch: Sequence[Candidate]) -> None:
        self.outcome.plan = self.outcome.plan.extended(batch)
        self.progress.valid = len(self.outcome.plan.ranked)

    def _late(self) -> bool:
        return self.until is not None and time.monotonic() > self.until

    def _stored_trials(self) -> dict[_Key, Trial]:
        """Returns the trials of this GPU that count as known."""
        trials = self.store.trials(workload=self.job.workload)
        return {(t.kernel, t.source, t.config): t for t in trials if t.gpu == self.gpu}

    def _take_stored(
        self, batch: Sequence[Candidate], stored: dict[_Key, Trial]
    ) -> list[Candidate]:
        """Takes the known trials of a batch, and returns the candidates without one."""
        missing = []
        for candidate in batch:
            name = candidate.target.name
            trial = stored.get((name, self.sources[name], candidate.text))
            if trial is None:
                missing.append(candidate)
            else:
                self.outcome.trials.append(trial)
                self.progress.known += 1
                self._note(trial)
        return missing

    def _screen(self, missing: Sequence[Candidate]) -> None:
        """Measures configs as their compiles finish: first the kernels' defaults, which every other
        config has to beat, then the others in the strategy's order.
        """
        ordered = sorted(missing, key=lambda candidate: not candidate.own)
        queue = Ahead(ordered, self.compilers, self.job.workload, self.gpu.arch, self.until)
        self.screen.run(self._followed(queue), self.until)

    def _followed(self, queue: Ahead) -> Iterator[tuple[Candidate, Built | None]]:
        """Yields what comes out of the queue, and keeps its lengths in the progress."""
        for candidate, built in queue:
            self.progress.compiling, self.progress.compiled = queue.compiling, queue.ready
            yield candidate, built
        self.progress.compiling = self.progress.compiled = 0

    # What the screening calls, see `Watcher`.
    def best_us(self) -> float | None:
        return self.best.us if self.best else None

    def take(self, trial: Trial, new: bool) -> None:
        self.outcome.new += new
        self.outcome.trials.append(trial)
        self.progress.screened += 1
        self._note(trial)
        self.say()

    def leave_out(self, unmeasured: Unmeasured) -> None:
        self.outcome.unmeasured.append(unmeasured)
        self.progress.failures["unmeasured"] += 1
        self.say()

    def stopped(self) -> bool:
        return self.is_stopped()

    def wait_for(self, count: int) -> None:
        waiting = (
            f"waiting for {count} configs that other sweeps measure or that are compiled again"
        )
        self.progress.message = waiting if count else ""
        self.say()

    def _note(self, trial: Trial) -> None:
        """Reports a trial to the strategy and to the progress."""
        self.search.record(trial)
        if not trial.ok:
            self.progress.failures[trial.status] += 1
        elif trial.us is not None and (self.best is None or trial.us < (self.best.us or 0.0)):
            self.best = trial
            self.progress.best_us, self.progress.best_ratio = trial.us, trial.ratio
            self.progress.best = self._label(trial.kernel, trial.config)

    def _label(self, kernel: str, config: str) -> str:
        candidate = self.search.find(kernel, config)
        return f"{kernel}[{config if candidate is None else brief(candidate.config)}]"

    def _decided(self) -> bool:
        """Returns whether an earlier sweep has run the finals of these trials, so that its winners
        are those of this sweep.
        """
        if not self.job.resume or self.outcome.new:
            return False
        earlier = {winner.kernel: winner for winner in self._earlier_winners()}
        names = [target.name for target in self.job.targets]
        screened = self._screened()
        if not all(name in earlier and earlier[name].screened >= screened for name in names):
            return False

        self.outcome.winners = [earlier[name] for name in names]
        best = self.outcome.winner
        assert best is not None
        self.progress.best = self._label(best.kernel, best.config)
        self.progress.best_us, self.progress.best_ratio = best.us, best.ratio
        return True

    def _earlier_winners(self) -> list[BestConfig]:
        """Returns winners of earlier sweeps on this GPU, for these kernels with their current
        source.
        """
        return self._winners_at(self.job.workload)

    def _related_winners(self) -> list[BestConfig]:
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
            own = Grouping.parse(workload.grouping)
            others += [
                replace(workload, grouping=str(replace(own, distribution=other)))
                for other in DISTRIBUTIONS
                if other != own.distribution
            ]
        return [winner for other in others for winner in self._winners_at(other)]

    def _winners_at(self, workload: Workload) -> list[BestConfig]:
        winners = self.store.winners(workload=workload)
        return [
            winner
            for winner in winners
            if winner.gpu == self.gpu and self.sources.get(winner.kernel) == winner.source
        ]

    def _screened(self) -> int:
        """Returns the number of configs that could be compiled and were measured."""
        return sum(trial.status not in UNBUILT for trial in self.outcome.trials)

    # Finals.
    def _finals(self) -> None:
        finalists = self._finalists()
        if not finalists:
            return
        self.progress.stage = "finals"
        self.say()
        race = Finals(self.job.workload, self.bench, self.progress, self.say).run(finalists)
        if race.alive and race.rounds >= 2:
            self._record_winners(race)

    def _finalists(self) -> list[Candidate]:
        """Returns the fastest candidates of the screening, the best of each kernel, earlier
        winners, and winners of related workloads that are correct here too.

        An earlier winner may have had bad luck in the screening, or not have been proposed this
        time. It takes part in any case, because the winner of these finals replaces it in the
        store.
        """
        timed = [trial for trial in self.outcome.trials if trial.ok and trial.us is not None]
        timed.sort(key=lambda trial: trial.us or 0.0)
        chosen = [(trial.kernel, trial.config) for trial in timed[: self.job.top_k]]
        for target in self.job.targets:
            chosen += [(t.kernel, t.config) for t in timed if t.kernel == target.name][:1]
        chosen += [(winner.kernel, winner.config) for winner in self._earlier_winners()]
        right = {(trial.kernel, trial.config) for trial in timed}
        related = ((winner.kernel, winner.config) for winner in self._related_winners())
        chosen += [each for each in related if each in right]
        return self._candidates(chosen)

    def _candidates(self, configs: Iterable[tuple[str, str]]) -> list[Candidate]:
        """Returns the candidates for these kernels and configs."""
        candidates = (self.search.find(kernel, config) for kernel, config in dict.fromkeys(configs))
        return [candidate for candidate in candidates if candidate is not None]

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
        spread = race.against_base(best)
        rounds = len(race.times[best])
        name = best.target.name
        return BestConfig(
            gpu=self.gpu,
            workload=self.job.workload,
            kernel=name,
            source=self.sources[name],
            config=best.text,
            us=statistics.median(race.times[best]),
            cublas_us=statistics.median(race.base[:rounds]),
            ratio=spread.median,
            ratio_low=spread.low,
            ratio_high=spread.high,
            rounds=rounds,
            runner_up=second.text if second is not None else "",
            lead=lead.median if lead is not None else None,
            lead_low=lead.sure_low if lead is not None else None,
            lead_high=lead.sure_high if lead is not None else None,
            confidence=race.confidence(best, order),
            separated=race.ahead(best, order),
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

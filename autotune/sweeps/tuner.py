"""One workload on one GPU: compile ahead, measure each config once, then let the fastest race."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ...core.configs import brief
from ..measure import compile_pool as compiling
from ..measure.compile_pool import Compilers
from ..measure.finals import Finals
from ..measure.isolated import MeasureWorker, WorkerDied
from ..measure.prefetch import Ahead
from ..measure.progress import Progress, Report, silent
from ..measure.race import SuccessiveElimination
from ..search.prune import Candidate, Plan, Ranker, by_model, plan
from ..search.target import Subject
from ..store.records import BestConfig, Finalist, Gpu, Trial, Workload, now
from .job_view import JobView, TrialStore
from .screening import Built, Screen, Unmeasured, say_waiting

SCREEN_SHARE = 0.75  # of the budget; the rest is for the finals


@dataclass(frozen=True)
class Job:
    """What to tune: kernels that compete, one workload, and how far to go.

    `trials`: as many configs of each kernel, the best by `ranker`; None: all that are valid.
    `top_k` go to the finals.
    `seconds`: for all of it; None: until it is done. Without `resume` all is measured anew, with
    `retry_failed` what has failed.
    """

    subjects: tuple[Subject, ...]
    workload: Workload
    trials: int | None = None
    top_k: int = 8
    seconds: float | None = None
    resume: bool = True
    ranker: Ranker = by_model
    retry_failed: bool = False


@dataclass
class Outcome:
    """What came of a job: its plan, all trials of it, in the store before or new, and the winners
    by kernel.

    `unmeasured`: configs of which nothing is known, because something else went wrong; the next
    sweep tries them again. `failure` says why the job could not go on, if it could not, `unlocked`
    why the GPU was measured without its lock.
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
        """The fastest of all kernels."""
        return max(self.winners, key=lambda w: w.ratio, default=None)


def tune(
    job: Job,
    gpu: Gpu,
    bench: MeasureWorker,
    compilers: Compilers | None,
    store: TrialStore,
    report: Report = silent,
    *,
    label: str = "",
    stopped: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Runs a job. Every trial is in `store` as soon as it is over; whoever kills this loses the
    one that runs.

    `stopped` says that the sweep was interrupted: Cancelled is raised where the job would wait for
    others.
    """
    return _Tuning(job, gpu, bench, compilers, store, report, label, stopped).run()


class _Tuning:
    def __init__(
        self,
        job: Job,
        gpu: Gpu,
        bench: MeasureWorker,
        compilers: Compilers | None,
        store: TrialStore,
        report: Report,
        label: str,
        stopped: Callable[[], bool],
    ) -> None:
        self.job, self.gpu, self.bench, self.stopped = job, gpu, bench, stopped
        self.store = JobView(store, job.workload, resume=job.resume, retry_failed=job.retry_failed)
        self.compilers = compilers if gpu.arch else None
        self.sources = {subject.name: subject.fingerprint for subject in job.subjects}
        self.progress = Progress(job.workload, gpu=label or gpu.name)
        self.say: Callable[[], None] = lambda: report(self.progress)
        self.begun = time.monotonic()
        if job.seconds is not None:
            self.progress.deadline = self.begun + job.seconds
        made = plan(job.subjects, job.workload, gpu, trials=job.trials, ranker=job.ranker)
        self.outcome = Outcome(job, gpu, made)
        self.best: Trial | None = None

    def run(self) -> Outcome:
        progress, outcome = self.progress, self.outcome
        progress.stage, progress.valid = "preparing", len(outcome.plan.ranked)
        self.say()
        known = self._known()
        missing = []
        for candidate in outcome.plan.ranked:
            found = known.get(self._identity(candidate))
            if found is None:
                missing.append(candidate)
            else:
                outcome.trials.append(found)
                self._note(found)
        progress.known = len(outcome.trials)
        try:
            if missing:
                progress.cublas_us = self.bench.open(self.job.workload)
                progress.stage = "screening"
                self.say()
                self._screen(missing)
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

    def _identity(self, candidate: Candidate) -> tuple[str, str, str]:
        return candidate.subject.name, self.sources[candidate.subject.name], candidate.text

    def _known(self) -> dict[tuple[str, str, str], Trial]:
        found = (t for t in self.store.trials(workload=self.job.workload) if t.gpu == self.gpu)
        return {(t.kernel, t.source, t.config): t for t in found}

    # Screening.
    def _screen(self, missing: Sequence[Candidate]) -> None:
        """Measures configs as their compiles end: the kernels' own, which any other has to beat,
        then the best by the model.
        """
        ordered = sorted(missing, key=lambda candidate: not candidate.own)
        seconds = self.job.seconds
        until = None if seconds is None else self.begun + SCREEN_SHARE * seconds
        queue = Ahead(ordered, self.compilers, self.job.workload, self.gpu.arch, until)
        screen = Screen(
            self.store,
            self.bench,
            self.compilers,
            self.gpu,
            self.job.workload,
            best_us=lambda: self.best.us if self.best else None,
            taken=self._take,
            left_out=self._leave_out,
            waiting=self._wait,
            stopped=self.stopped,
        )
        screen.run(self._followed(queue), until)
        self.outcome.finished = len(self.outcome.trials) == len(self.outcome.plan.ranked)

    def _followed(self, queue: Ahead) -> Iterator[tuple[Candidate, Built | None]]:
        """What comes out of the queue, with its lengths in the progress."""
        for candidate, built in queue:
            self.progress.compiling, self.progress.compiled = queue.compiling, queue.ready
            yield candidate, built
        self.progress.compiling = self.progress.compiled = 0

    def _take(self, trial: Trial, new: bool) -> None:
        """A trial of the screen, of this driver or of another."""
        self.outcome.new += new
        self.outcome.trials.append(trial)
        self.progress.screened += 1
        self._note(trial)
        self.say()

    def _leave_out(self, unmeasured: Unmeasured) -> None:
        self.outcome.unmeasured.append(unmeasured)
        self.progress.failures["unmeasured"] += 1
        self.say()

    def _wait(self, count: int) -> None:
        say_waiting(self.progress, count)
        self.say()

    def _note(self, trial: Trial) -> None:
        if not trial.ok:
            self.progress.failures[trial.status] += 1
        elif trial.us is not None and (self.best is None or trial.us < (self.best.us or 0.0)):
            self.best = trial
            self.progress.best_ratio = trial.ratio
            self.progress.best = f"{trial.kernel}[{self._brief(trial.kernel, trial.config)}]"

    def _brief(self, kernel: str, config: str) -> str:
        candidates = (
            c for c in self.outcome.plan.ranked if c.subject.name == kernel and c.text == config
        )
        return next((brief(c.config) for c in candidates), config)

    def _decided(self) -> bool:
        """Whether an earlier sweep has had the finals of these trials: then its winners are this
        one's.
        """
        earlier = (
            {w.kernel: w for w in self._earlier()}
            if self.job.resume and not self.outcome.new
            else {}
        )
        wanted = [subject.name for subject in self.job.subjects]
        if not all(
            name in earlier and earlier[name].screened >= self._screened() for name in wanted
        ):
            return False
        self.outcome.winners = [earlier[name] for name in wanted]
        best = self.outcome.winner
        assert best is not None
        self.progress.best, self.progress.best_ratio = (
            f"{best.kernel}[{self._brief(best.kernel, best.config)}]",
            best.ratio,
        )
        return True

    def _earlier(self) -> list[BestConfig]:
        """Winners of earlier sweeps on this GPU, of these kernels as they are."""
        found = (w for w in self.store.winners(workload=self.job.workload) if w.gpu == self.gpu)
        return [w for w in found if self.sources.get(w.kernel) == w.source]

    def _screened(self) -> int:
        return sum(t.status not in compiling.UNBUILT for t in self.outcome.trials)

    # Finals.
    def _finals(self) -> None:
        rivals = self._rivals()
        if not rivals:
            return
        self.progress.stage = "finals"
        self.say()
        race = Finals(self.job.workload, self.bench, self.progress, self.say).run(rivals)
        if race.alive and race.rounds >= 2:
            self._record_best(race)

    def _rivals(self) -> list[Candidate]:
        """The fastest of the screen, the best of each kernel, and winners of before: their screen
        may have been unlucky.
        """
        by_text = {(c.subject.name, c.text): c for c in self.outcome.plan.ranked}
        right = sorted(
            (t for t in self.outcome.trials if t.ok and t.us is not None), key=lambda t: t.us or 0.0
        )
        chosen = [(t.kernel, t.config) for t in right[: self.job.top_k]]
        for subject in self.job.subjects:
            chosen += [(t.kernel, t.config) for t in right if t.kernel == subject.name][:1]
        chosen += [(w.kernel, w.config) for w in self._earlier()]
        return [by_text[key] for key in dict.fromkeys(chosen) if key in by_text]

    def _record_best(self, race: SuccessiveElimination[Candidate]) -> None:
        order = race.order()
        finalists = tuple(_finalist(race, rival) for rival in order)
        for subject in self.job.subjects:
            own = [rival for rival in order if rival.subject == subject]
            if own:
                winner = self._winner(race, own, finalists)
                self.store.record_best(winner)
                self.outcome.winners.append(winner)

    def _winner(
        self,
        race: SuccessiveElimination[Candidate],
        own: Sequence[Candidate],
        finalists: tuple[Finalist, ...],
    ) -> BestConfig:
        best, rival = own[0], own[1] if len(own) > 1 else None
        lead = race.lead(best, rival) if rival is not None else None
        spread = race.against_base(best)
        rounds = len(race.times[best])
        name = best.subject.name
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
            runner_up=rival.text if rival is not None else "",
            lead=lead.median if lead is not None else None,
            lead_low=lead.sure_low if lead is not None else None,
            lead_high=lead.sure_high if lead is not None else None,
            confidence=race.confidence(best, own),
            separated=race.ahead(best, own),
            screened=self._screened(),
            valid=self.outcome.plan.valid,
            finalists=finalists,
            when=now(),
        )


def _finalist(race: SuccessiveElimination[Candidate], rival: Candidate) -> Finalist:
    spread = race.against_base(rival)
    return Finalist(
        kernel=rival.subject.name,
        config=rival.text,
        us=statistics.median(race.times[rival]),
        ratio=spread.median,
        ratio_low=spread.low,
        ratio_high=spread.high,
    )

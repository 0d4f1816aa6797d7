"""The screening of a workload: each config is measured once, by this driver or by another one that
shares the store.

A driver claims a config before it measures it, and gives the claim back when it is interrupted. A
process that is killed from outside while it measures a config (SIGKILL of a worker or a driver, the
loss of a node) says nothing about the config:

    event                                        what becomes of the config
    ------------------------------------------   ----------------------------------------------
    its measuring worker is killed               it is tried again at once, and after three kills
                                                 left unmeasured
    its compile process is killed                `Compilers` try again at once; it is compiled once
                                                 more at the end, and then left unmeasured
    a driver died with it                        it is tried at the end
    another driver is measuring it               it is waited for at the end, as long as that
                                                 driver lives
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import cast

from outblas.autotune.measure.compile_pool import Ahead, Built, Compiled, Pool
from outblas.autotune.measure.isolated import Bench, Cancelled
from outblas.autotune.measure.progress import Progress
from outblas.autotune.measure.worker import Screened
from outblas.autotune.search.candidates import Candidate
from outblas.autotune.search.strategy import Search
from outblas.autotune.store.records import (
    BestConfig,
    Gpu,
    Identity,
    Status,
    Trial,
    Workload,
    now,
)
from outblas.autotune.store.store import Claim, Store
from outblas.autotune.sweeps.outcome import Outcome, Unmeasured
from outblas.base.processes import WorkerDied

MOST_KILLS = 3  # of the workers of one config in one sweep
POLL_SECONDS = 0.2  # between two looks at what other drivers are measuring
SAY_SECONDS = 1.0
# The statuses of trials that `retry_failed` does not measure again.
SETTLED: tuple[Status, ...] = ("ok", "wrong", "refused")


class JobView:
    """The trials of a store as one job sees them.

    Without `resume` the job sees only its own trials. With `retry_failed` it sees all trials except
    those that had failed before it started. Its results replace hidden ones. Only one thread may
    use a view.
    """

    def __init__(self, store: Store, workload: Workload, *, resume: bool, retry_failed: bool):
        self.store, self._workload, self._resume = store, workload, resume
        self._own: dict[Identity, Trial] = {}
        failed = store.trials(workload=workload) if resume and retry_failed else []
        self._hidden = {trial.identity: trial for trial in failed if trial.status not in SETTLED}

    def trials(self, gpu: Gpu) -> list[Trial]:
        """Returns the trials of the job's workload on a GPU."""
        stored = self.store.trials(workload=self._workload, gpu=gpu.key) if self._resume else []
        return [trial for trial in stored if self._hidden.get(trial.identity) != trial]

    def claim(self, identity: Identity) -> Claim:
        """Does what `Store.claim` does, for the trials that this job sees."""
        if identity in self._own:
            return Claim(trial=self._own[identity])
        hidden = self._hidden.get(identity)
        return self.store.claim(identity, again=not self._resume, besides=hidden)

    def add(self, trial: Trial) -> bool:
        """Stores a trial and ends its claim; returns whether it is new to the store."""
        replace = not self._resume or trial.identity in self._hidden
        added = self.store.add(trial, replace=replace)
        self._own[trial.identity] = trial
        self._hidden.pop(trial.identity, None)
        return added


@dataclass(eq=False)
class Attempt:
    """The state of a config during screening.

    Attributes:
        built: its compile; None where nothing is compiled ahead.
        recompiled: whether `built` is the second compile, after the first was killed.
    """

    candidate: Candidate
    built: Built | None
    recompiled: bool = False


@dataclass
class Screen:
    """Measures the configs of one workload on one GPU, and keeps what came of them in the outcome,
    the search and the progress.
    """

    view: JobView
    bench: Bench
    compilers: Pool | None
    outcome: Outcome
    search: Search
    progress: Progress
    say: Callable[[], None]
    stopped: Callable[[], bool]
    best: Trial | None = None

    def __post_init__(self) -> None:
        self.gpu, self.workload = self.outcome.gpu, self.outcome.job.workload

    def run(self, candidates: Sequence[Candidate], until: float | None) -> None:
        """Measures configs as their compiles finish: first the kernels' defaults, which every other
        config has to beat, then the others in their order, then those that were postponed.

        No postponed config is started after `until`, on the clock of `time.monotonic`. Raises
        WorkerDied where no operands can be made, Cancelled where the sweep was interrupted.
        """
        ordered = sorted(candidates, key=lambda candidate: not candidate.own)
        queue = Ahead(ordered, self.compilers, self.workload, self.gpu.arch, until)
        put_off: list[Attempt] = []
        for candidate, built in queue:
            self.progress.compiling, self.progress.compiled = queue.compiling, queue.ready
            attempt = Attempt(candidate, built)
            if not self._settle(attempt, at_end=False):
                put_off.append(attempt)
        self.progress.compiling = self.progress.compiled = 0
        self._run_put_off(put_off, until)

    def note(self, trial: Trial) -> None:
        """Takes a trial, which was measured now or earlier."""
        self.outcome.trials.append(trial)
        self.search.record(trial)
        if not trial.ok:
            self.progress.failures[trial.status] += 1
        elif trial.us is not None and (self.best is None or trial.us < (self.best.us or 0.0)):
            self.best = trial
            self.progress.lead(self.label(trial), trial.us, trial.ratio)

    def label(self, record: Trial | BestConfig) -> str:
        """Formats the kernel and the config of a record for the progress."""
        candidate = self.search.find(record.kernel, record.config)
        return candidate.brief if candidate else f"{record.kernel}[{record.config}]"

    def _run_put_off(self, put_off: list[Attempt], until: float | None) -> None:
        told = 0.0  # when the waiting was last reported
        while put_off:
            left = []
            for attempt in put_off:
                if self.stopped():
                    raise Cancelled
                if until is not None and time.monotonic() > until:
                    return
                if not self._settle(attempt, at_end=True):
                    left.append(attempt)
            put_off = left
            if put_off and time.monotonic() - told > SAY_SECONDS:
                self._say_waiting(
                    f"waiting for {len(put_off)} configs that other sweeps measure or that are "
                    "compiled again"
                )
                told = time.monotonic()
            if put_off:
                time.sleep(POLL_SECONDS)
        if told:
            self._say_waiting("")

    def _say_waiting(self, message: str) -> None:
        self.progress.message = message
        self.say()

    def _settle(self, attempt: Attempt, *, at_end: bool) -> bool:
        """Makes sure that a config gets a trial, or is left unmeasured; returns False if it must be
        tried later.
        """
        if attempt.built is not None and not attempt.built.done():
            return False  # it is compiled once more
        target, text = attempt.candidate.target, attempt.candidate.text
        identity = self.gpu, self.workload, target.name, target.fingerprint, text
        claim = self.view.claim(identity)
        if claim.held:
            return False
        result: Trial | Unmeasured | None = claim.trial
        new = False
        if claim.granted:
            try:
                postponed = claim.taken_over and not at_end
                result = None if postponed else self._result(attempt, identity)
                if isinstance(result, Trial):
                    new = self.view.add(result)
                else:
                    self.view.store.release(identity)
            except BaseException:
                self.view.store.release(identity)
                raise
        if isinstance(result, Trial):
            self.outcome.new += new
            self.progress.screened += 1
            self.note(result)
        elif result is not None:
            self.outcome.unmeasured.append(result)
            self.progress.failures["unmeasured"] += 1
        self.say()
        return result is not None

    def _result(self, attempt: Attempt, identity: Identity) -> Trial | Unmeasured | None:
        """Returns the result of a config whose claim is held; None if it must be tried later."""
        candidate = attempt.candidate
        compiled = attempt.built.result() if attempt.built is not None else Compiled()
        if compiled.status == "killed":
            if attempt.recompiled or self.compilers is None:
                reason = (
                    f"its compile process was killed from outside repeatedly: {compiled.reason}"
                )
                return Unmeasured(candidate.target.name, candidate.text, reason)
            attempt.built = self.compilers.submit(
                candidate.target, self.workload, candidate.text, self.gpu.arch
            )
            attempt.recompiled = True
            return None
        screened: Screened | Unmeasured = Screened(compiled.status, compiled.reason)
        if compiled.status == "ok":
            screened = self._screened(candidate)
            if isinstance(screened, Unmeasured):
                return screened
        gpu, workload, kernel, source, config = identity
        return Trial(
            gpu=gpu,
            workload=workload,
            kernel=kernel,
            source=source,
            config=config,
            predicted_us=candidate.predicted_us or None,
            compile_s=compiled.seconds,
            when=now(),
            **asdict(screened),
        )

    def _screened(self, candidate: Candidate) -> Screened | Unmeasured:
        """Measures a config. Raises WorkerDied where no operands can be made."""
        entry, reason = (candidate.target, candidate.text), ""
        for _ in range(MOST_KILLS):
            self._open()  # an error here is not the config's fault
            try:
                best_us = self.best.us if self.best else None
                return self.bench.screen(self.workload, entry, best_us)
            except WorkerDied as death:
                reason = str(death)
                if death.status != "killed":
                    return Screened(cast(Status, death.status), reason[:1000])
        reason = f"killed from outside {MOST_KILLS} times: {reason}"
        return Unmeasured(candidate.target.name, candidate.text, reason)

    def _open(self) -> None:
        """Makes the operands, again if the worker is a new one. Raises WorkerDied."""
        for tries in range(1, MOST_KILLS + 1):
            try:
                self.bench.open(self.workload)
                return
            except WorkerDied as death:
                if death.status != "killed" or tries == MOST_KILLS:
                    raise

"""The screening of a workload: each config is measured once, by this driver or by another one that
shares the store.

A driver claims a config before it measures it. What another one is measuring is waited for at the
end, as long as that driver lives. A process that is killed from outside while it measures or
compiles a config says nothing about the config: it is tried again, and after some kills left
unmeasured, for the next sweep.
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
from outblas.autotune.store.records import BestConfig, Identity, Status, Trial, now
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps.outcome import Outcome, Unmeasured
from outblas.base.processes import WorkerDied

MOST_KILLS = 3  # of the workers of one config in one sweep
POLL_SECONDS = 0.2  # between two looks at what other drivers are measuring
SAY_SECONDS = 1.0
# The statuses of trials that `retry_failed` does not measure again.
SETTLED: tuple[Status, ...] = ("ok", "wrong", "refused")


@dataclass
class Screen:
    """Measures the configs of one workload on one GPU, and keeps what came of them in the outcome,
    the search and the progress.

    Without `resume` it sees no trial of the store, with `retry_failed` those that had not failed
    before; its results replace what it does not see.
    """

    store: Store
    bench: Bench
    compilers: Pool | None
    outcome: Outcome
    search: Search
    progress: Progress
    say: Callable[[], None]
    stopped: Callable[[], bool]
    best: Trial | None = None

    def __post_init__(self) -> None:
        job = self.outcome.job
        self.gpu, self.workload, self.options = self.outcome.gpu, job.workload, job.options
        self.hidden: dict[Identity, Trial] = {}
        self.stored: dict[Identity, Trial] = {}
        if self.options.resume:
            for trial in self.store.trials(workload=self.workload, gpu=self.gpu.key):
                again = self.options.retry_failed and trial.status not in SETTLED
                (self.hidden if again else self.stored)[trial.identity] = trial

    def identity(self, candidate: Candidate) -> Identity:
        target = candidate.target
        return self.gpu, self.workload, target.name, target.fingerprint, candidate.text

    def run(self, candidates: Sequence[Candidate], until: float | None) -> None:
        """Measures configs as their compiles finish: first the kernels' defaults, which every other
        config has to beat, then the others in their order, then those that others had claimed.

        None of the last is started after `until`, on the clock of `time.monotonic`. Raises
        WorkerDied where no operands can be made, Cancelled where the sweep was interrupted.
        """
        ordered = sorted(candidates, key=lambda candidate: not candidate.own)
        queue = Ahead(ordered, self.compilers, self.workload, self.gpu.arch, until)
        held = []
        for candidate, built in queue:
            self.progress.compiling, self.progress.compiled = queue.compiling, queue.ready
            if not self._settle(candidate, built):
                held.append((candidate, built))
        self.progress.compiling = self.progress.compiled = 0
        self._await(held, until)

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

    def _await(self, held: list[tuple[Candidate, Built | None]], until: float | None) -> None:
        """Waits for the results of other drivers, or measures what they leave."""
        told = 0.0
        while held:
            if self.stopped():
                raise Cancelled
            if until is not None and time.monotonic() > until:
                break
            held = [attempt for attempt in held if not self._settle(*attempt)]
            if held and time.monotonic() - told > SAY_SECONDS:
                told = time.monotonic()
                self.progress.message = f"waiting for {len(held)} configs that other sweeps measure"
                self.say()
            time.sleep(POLL_SECONDS if held else 0.0)
        if told:
            self.progress.message = ""
            self.say()

    def _settle(self, candidate: Candidate, built: Built | None) -> bool:
        """Makes sure that a config gets a trial, or is left unmeasured; returns False while another
        driver has claimed it.
        """
        identity = self.identity(candidate)
        if not self.store.claim(identity):
            return False
        try:
            result: Trial | Unmeasured | None = self._of_others(identity)
            if result is None:
                result = self._result(candidate, built)
                if isinstance(result, Trial):
                    replace = not self.options.resume or identity in self.hidden
                    self.outcome.new += self.store.add(result, replace=replace)
        finally:
            self.store.release(identity)
        if isinstance(result, Trial):
            self.progress.screened += 1
            self.note(result)
        else:
            self.outcome.unmeasured.append(result)
            self.progress.failures["unmeasured"] += 1
        self.say()
        return True

    def _of_others(self, identity: Identity) -> Trial | None:
        """Returns the trial that another driver has added meanwhile."""
        trial = self.store.trial(identity) if self.options.resume else None
        return trial if trial != self.hidden.get(identity) else None

    def _result(self, candidate: Candidate, built: Built | None) -> Trial | Unmeasured:
        """Returns the result of a config that this driver has claimed."""
        target, text = candidate.target, candidate.text
        compiled = built.result() if built is not None else Compiled()
        if compiled.status == "killed" and self.compilers is not None:
            again = self.compilers.submit(target, self.workload, text, self.gpu.arch)
            compiled = again.result()
        if compiled.status == "killed":
            return Unmeasured(target.name, text, f"killed again and again: {compiled.reason}")
        screened: Screened | Unmeasured = Screened(compiled.status, compiled.reason)
        if compiled.status == "ok":
            screened = self._screened(candidate)
            if isinstance(screened, Unmeasured):
                return screened
        gpu, workload, kernel, source, config = self.identity(candidate)
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

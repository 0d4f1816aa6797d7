"""The screening of a workload: each config is measured once, by this driver or by another one that
shares the store.

A driver claims a config before it measures it, and gives the claim back when it is interrupted. A
process that is killed from outside while it measures a config (SIGKILL of a worker or a driver, the
loss of a node) says nothing about the config:

    event                                        what becomes of the config
    ------------------------------------------   ----------------------------------------------
    its measuring worker or compiler is killed   it is tried again at once (a compile: by
                                                 `Compilers`), again at the end, and then left
                                                 unmeasured
    a driver died with it                        it is tried at the end
    its machine went down with it                it is tried at the end; after two losses it is
                                                 recorded as a crash
    another driver is measuring it               it is waited for at the end, as long as that
                                                 driver lives
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol, cast

from outblas.autotune.measure.bench import Bench
from outblas.autotune.measure.compile_pool import Compiled
from outblas.autotune.measure.isolated import Cancelled
from outblas.autotune.measure.prefetch import Pool
from outblas.autotune.measure.processes import WorkerDied
from outblas.autotune.measure.worker import Screened
from outblas.autotune.search.candidates import Candidate
from outblas.autotune.store.claims import Claim
from outblas.autotune.store.records import Facts, Gpu, Status, Trial, Workload, now
from outblas.autotune.sweeps.job_view import JobView

# Kills of the workers of one config in one sweep: at the first try, its repetition, and at the end.
MOST_KILLS = 3
MOST_MACHINE_LOSSES = 2
POLL_SECONDS = 0.2  # between two looks at what other drivers are measuring
SAY_SECONDS = 1.0

Built = Future[Compiled]


@dataclass(frozen=True)
class Unmeasured:
    """A config without a result, because something else went wrong. The next sweep tries it
    again.
    """

    kernel: str
    config: str
    reason: str


@dataclass(eq=False)
class Attempt:
    """The state of a config during screening.

    Attributes:
        built: its compile; None where nothing is compiled ahead.
        compiled_again: whether `built` is the second compile, after the first was killed.
        kills: how often its worker was killed from outside; `reason` is that of the last time.
    """

    candidate: Candidate
    built: Built | None
    compiled_again: bool = False
    kills: int = 0
    reason: str = ""


class Watcher(Protocol):
    """What hears of a screening, and says how fast a config has to be."""

    def best_us(self) -> float | None:
        """Returns the best time so far."""

    def take(self, trial: Trial, new: bool) -> None:
        """Takes a trial, measured by this driver (`new`) or by another."""

    def leave_out(self, unmeasured: Unmeasured) -> None:
        """Takes a config that stays unmeasured."""

    def wait_for(self, count: int) -> None:
        """Hears now and then how many configs others are measuring."""

    def stopped(self) -> bool:
        """Returns whether the result is no longer needed."""


class Screen:
    """Measures the configs of one workload on one GPU."""

    def __init__(
        self,
        view: JobView,
        bench: Bench,
        compilers: Pool | None,
        gpu: Gpu,
        workload: Workload,
        watcher: Watcher,
    ) -> None:
        self.view, self.bench, self.compilers = view, bench, compilers
        self.gpu, self.workload, self.watcher = gpu, workload, watcher
        self._compiled_again: dict[Built, Built] = {}

    def run(self, queue: Iterable[tuple[Candidate, Built | None]], until: float | None) -> None:
        """Measures the configs as they come, then those that were postponed.

        No postponed config is started after `until`, on the clock of `time.monotonic`. Raises
        WorkerDied where no operands can be made, Cancelled where the sweep was interrupted.
        """
        put_off: list[Attempt] = []
        for candidate, built in queue:
            attempt = Attempt(candidate, built)
            if not self._settle(attempt, at_end=False):
                put_off.append(attempt)
        self._run_put_off(put_off, until)

    def _run_put_off(self, put_off: list[Attempt], until: float | None) -> None:
        told = 0.0  # when the watcher was last told
        while put_off:
            left = []
            for attempt in put_off:
                if self.watcher.stopped():
                    raise Cancelled
                if until is not None and time.monotonic() > until:
                    return
                if not self._settle(attempt, at_end=True):
                    left.append(attempt)
            put_off = left
            if put_off and time.monotonic() - told > SAY_SECONDS:
                self.watcher.wait_for(len(put_off))
                told = time.monotonic()
            if put_off:
                time.sleep(POLL_SECONDS)
        if told:
            self.watcher.wait_for(0)

    def _settle(self, attempt: Attempt, *, at_end: bool) -> bool:
        """Makes sure that a config gets a trial, or is left unmeasured; returns False if it must be
        tried later.
        """
        if attempt.built is not None and not attempt.built.done():
            return False  # it is compiled once more
        facts = self._facts(attempt)
        claim = self.view.claim(*facts)
        if claim.trial is not None:
            self.watcher.take(claim.trial, False)
            return True
        if claim.held:
            return False
        try:
            trial, settled = self._decide(attempt, claim, at_end=at_end)
            new = trial is not None and self.view.add(trial)
        except BaseException:
            self.view.release(*facts)
            raise
        if trial is None:
            self.view.release(*facts)
        else:
            self.watcher.take(trial, new)
        return settled

    def _decide(self, attempt: Attempt, claim: Claim, *, at_end: bool) -> tuple[Trial | None, bool]:
        """Returns the trial of a config whose claim is held, if it has one now, and whether the
        config is settled.
        """
        if claim.machine_losses >= MOST_MACHINE_LOSSES:
            reason = f"the machine went down {claim.machine_losses} times while it was measured"
            return self._trial(attempt, "crash", reason), True
        if not at_end and (claim.taken_over or claim.machine_losses):
            return None, False
        compiled = attempt.built.result() if attempt.built is not None else Compiled()
        if compiled.status == "killed":
            return self._compile_again(attempt, compiled.reason) if at_end else (None, False)
        if compiled.status != "ok":
            return self._trial(attempt, compiled.status, compiled.reason), True

        trial = self._measure(attempt)
        if trial is None and attempt.kills >= MOST_KILLS:
            return self._leave_out(
                attempt, f"killed from outside {attempt.kills} times: {attempt.reason}"
            )
        return trial, trial is not None

    def _leave_out(self, attempt: Attempt, reason: str) -> tuple[None, bool]:
        self.watcher.leave_out(
            Unmeasured(attempt.candidate.target.name, attempt.candidate.text, reason)
        )
        return None, True

    def _compile_again(self, attempt: Attempt, reason: str) -> tuple[None, bool]:
        """Compiles a config once more, in the background, after its compiler was killed."""
        if self.compilers is None or attempt.built is None or attempt.compiled_again:
            return self._leave_out(
                attempt, f"its compile process was killed from outside repeatedly: {reason}"
            )
        again = self._compiled_again.get(attempt.built)  # of a config that shares the compile
        if again is None:
            candidate = attempt.candidate
            again = self.compilers.submit(
                candidate.target, self.workload, candidate.text, self.gpu.arch
            )
            self._compiled_again[attempt.built] = again
        attempt.built, attempt.compiled_again = again, True
        return None, False

    def _measure(self, attempt: Attempt) -> Trial | None:
        """Measures a config; returns None where the worker was killed from outside.

        The first attempt tries twice, later ones once.
        """
        for _ in range(1 if attempt.kills else 2):
            self._open()  # an error here is not the config's fault
            try:
                screened = self.bench.screen(
                    self.workload,
                    (attempt.candidate.target, attempt.candidate.text),
                    self.watcher.best_us(),
                )
            except WorkerDied as death:
                if death.status != "killed":
                    return self._trial(attempt, cast(Status, death.status), str(death))
                attempt.kills += 1
                attempt.reason = str(death)
            else:
                return self._measured(attempt, screened)
        return None

    def _open(self) -> None:
        """Makes the operands, again if the worker is a new one. Raises WorkerDied."""
        for tries in range(1, MOST_KILLS + 1):
            try:
                self.bench.open(self.workload)
                return
            except WorkerDied as death:
                if death.status != "killed" or tries == MOST_KILLS:
                    raise

    def _measured(self, attempt: Attempt, screened: Screened) -> Trial:
        return replace(
            self._trial(attempt, screened.status, screened.reason),
            us=screened.us,
            ratio=screened.ratio,
            ratio_low=screened.ratio_low,
            ratio_high=screened.ratio_high,
            clock_mhz=screened.clock_mhz,
            compile_s=attempt.built.result().seconds if attempt.built is not None else None,
        )

    def _trial(self, attempt: Attempt, status: Status, reason: str = "") -> Trial:
        gpu, workload, kernel, source, config = self._facts(attempt)
        return Trial(
            gpu=gpu,
            workload=workload,
            kernel=kernel,
            source=source,
            config=config,
            status=status,
            reason=reason[:1000],
            predicted_us=attempt.candidate.predicted_us or None,
            when=now(),
        )

    def _facts(self, attempt: Attempt) -> Facts:
        """Returns the identity of this config's trial, in the form that stores take."""
        target, text = attempt.candidate.target, attempt.candidate.text
        return self.gpu, self.workload, target.name, target.fingerprint, text

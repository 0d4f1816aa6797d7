"""Runs the jobs of a sweep: each place where one can measure, a GPU here or on a cluster, has a
thread, and all threads take workloads from one queue.
"""

import math
import queue
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outblas.autotune.measure.compile_pool import Compilers, Pool
from outblas.autotune.measure.isolated import Bench, MeasureWorker
from outblas.autotune.measure.progress import Progress, Report
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps.options import SweepOptions
from outblas.autotune.sweeps.outcome import Failure, Job, Sweep
from outblas.autotune.sweeps.tuner import Tuning
from outblas.base.processes import WorkerDied

STOP_SECONDS = 10.0  # for an interrupted sweep to end
LEAST_SECONDS = 5.0  # minimum budget of a workload


@dataclass
class Place:
    """A GPU, or the CPU for Triton's interpreter: what measures there, and what compiles, if
    anything does. The GPUs of a machine share the compile processes.
    """

    bench: Bench
    compilers: Pool | None

    def cancel(self) -> None:
        """Ends what runs there, from another thread."""
        self.bench.cancel()
        if self.compilers is not None:
            self.compilers.close()


def run_local(
    jobs: Sequence[Job], gpus: Sequence[str], store: Store, report: Report, options: SweepOptions
) -> Sweep:
    """Tunes workloads on GPUs of this machine, or on ["cpu"]."""
    compilers = None if list(gpus) == ["cpu"] else Compilers(options.compile_workers)
    seconds = options.trial_seconds
    places = [Place(MeasureWorker(g, trial_seconds=seconds), compilers) for g in gpus]
    try:
        return Engine(jobs, places, store, report, options).run()
    finally:
        if compilers is not None:
            compilers.close()


@dataclass
class Engine:
    """Tunes workloads at places."""

    jobs: Sequence[Job]
    places: Sequence[Place]
    store: Store
    report: Report
    options: SweepOptions

    def __post_init__(self) -> None:
        self.report = one_at_a_time(self.report)
        self.budget = Budget(self.options.budget, len(self.jobs), len(self.places))
        self.waiting = queue.SimpleQueue[Job]()
        self.result = Sweep()
        self.lock = threading.Lock()  # protects `result`
        self.stop = threading.Event()
        self.errors: list[BaseException] = []

    def run(self) -> Sweep:
        """Runs all jobs. An exception of a job ends the sweep, and is raised here."""
        for job in self.jobs:
            self.waiting.put(job)
            self.report(Progress(job.workload))
        # Events report the end of threads, not `Thread.join`: an interrupt within `join` marks a
        # thread as stopped although it still runs (CPython issue 90882).
        started: list[threading.Event] = []
        try:
            for place in self.places:
                end = threading.Event()
                threading.Thread(target=self._drive, args=(place, end), daemon=True).start()
                started.append(end)
            for end in started:
                while not end.wait(0.2):  # lets an interrupt through
                    pass
        except BaseException:  # an interrupt: no thread may continue after this call
            self.stop.set()
            for place in self.places:
                place.cancel()
            for end in started:
                end.wait(STOP_SECONDS)
            raise
        if self.errors:
            raise self.errors[0]
        return self.result

    def _drive(self, place: Place, end: threading.Event) -> None:
        """Runs jobs at one place until none is left."""
        try:
            while not self.stop.is_set():
                self._run_job(self.waiting.get_nowait(), place)
        except queue.Empty:
            pass
        except BaseException as error:  # of this program, or of arguments that no kernel supports
            self.errors.append(error)
            self.stop.set()
        finally:
            place.bench.stop()
            end.set()

    def _run_job(self, job: Job, place: Place) -> None:
        try:
            gpu = place.bench.describe()
        except WorkerDied as death:
            reason = f"{place.bench.label}: {death}"
            self.report(Progress(job.workload, place.bench.label, "failed", message=reason))
            with self.lock:
                self.result.failures.append(Failure(job.workload, reason))
            return
        budget = self.options.budget
        if place.compilers is not None and budget is not None:
            # The first workload must not be charged for the start of the compilers.
            place.compilers.await_one(job.targets[0], budget / 4)
        job = replace(job, seconds=self.budget.share())
        outcome = Tuning(
            job,
            gpu,
            place.bench,
            place.compilers,
            self.store,
            self.report,
            place.bench.label,
            self.stop.is_set,
        ).run()
        with self.lock:
            self.result.add(outcome)


class Budget:
    """The seconds for many workloads on several workers; each workload gets an equal share of what
    is left.
    """

    def __init__(self, seconds: float | None, workloads: int, workers: int) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._left, self._workers = workloads, workers
        self._lock = threading.Lock()

    def share(self) -> float | None:
        """Returns the seconds for the next workload; None where it may take as long as it needs."""
        with self._lock:
            turns = max(1, math.ceil(self._left / self._workers))
            self._left -= 1
            if self._end is None:
                return None
            return max(LEAST_SECONDS, (self._end - time.monotonic()) / turns)


def one_at_a_time(report: Report) -> Report:
    """Wraps a report so that only one thread calls it at a time, with a copy that stays as it is,
    and never again after it raised.
    """
    lock, broken = threading.Lock(), threading.Event()

    def tell(progress: Progress) -> None:
        with lock:
            if broken.is_set():
                return
            try:
                report(replace(progress, failures=progress.failures.copy()))
            except Exception as error:
                broken.set()
                warnings.warn(f"progress is no longer reported: {error!r}", stacklevel=2)

    return tell

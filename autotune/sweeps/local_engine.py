"""Sweeps on the GPUs of this machine. Each GPU has a thread, and all threads take workloads from
one queue.
"""

import queue
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from ..measure.compile_pool import Compilers
from ..measure.isolated import MeasureWorker, WorkerDied
from ..measure.progress import Progress, Report
from ..store.store import Store
from .options import SweepOptions
from .outcome import Budget, Failure, Sweep, one_at_a_time
from .tuner import Job, tune

STOP_SECONDS = 10.0  # for an interrupted sweep to end


def run(
    jobs: Sequence[Job], gpus: Sequence[str], store: Store, report: Report, options: SweepOptions
) -> Sweep:
    """Tunes workloads on GPUs, named as in CUDA_VISIBLE_DEVICES, or on ["cpu"].

    All GPUs share the compile processes. An exception of a job ends the sweep, and is raised here.
    """
    return _Engine(jobs, gpus, store, report, options).run()


class _Engine:
    def __init__(
        self,
        jobs: Sequence[Job],
        gpus: Sequence[str],
        store: Store,
        report: Report,
        options: SweepOptions,
    ) -> None:
        self.jobs, self.gpus, self.store, self.options = jobs, list(gpus), store, options
        self.report = one_at_a_time(report)
        self.budget = Budget(options.budget, len(jobs), len(gpus))
        self.waiting = queue.SimpleQueue[Job]()
        self.found = Sweep()
        self.lock = threading.Lock()  # protects `found`
        self.stop = threading.Event()
        self.errors: list[BaseException] = []
        self.benches: list[MeasureWorker] = []

    def run(self) -> Sweep:
        for job in self.jobs:
            self.waiting.put(job)
            self.report(Progress(job.workload))
        with ExitStack() as stack:
            compilers = None
            if self.gpus != ["cpu"]:
                compilers = stack.enter_context(Compilers(self.options.compile_workers))
            self._run_threads(compilers)
        if self.errors:
            raise self.errors[0]
        return self.found

    def _run_threads(self, compilers: Compilers | None) -> None:
        """Runs a thread for each GPU, and returns when all have ended.

        Events report the end of threads, not `Thread.join`: an interrupt within `join` marks a
        thread as stopped although it still runs (CPython issue 90882). Nothing would wait for that
        thread then, and its last result could come after the store was closed.
        """
        started: list[threading.Event] = []
        try:
            for gpu in self.gpus:
                ended = threading.Event()
                arguments = (gpu, compilers, ended)
                threading.Thread(target=self._drive_and_tell, args=arguments, daemon=True).start()
                started.append(ended)
            for ended in started:
                while not ended.wait(0.2):  # lets an interrupt through
                    pass
        except BaseException:  # an interrupt: no thread may continue after this call
            self.stop.set()
            for bench in self.benches:
                bench.cancel()
            if compilers is not None:
                compilers.close()
            for ended in started:
                ended.wait(STOP_SECONDS)
            raise

    def _drive_and_tell(
        self, gpu: str, compilers: Compilers | None, ended: threading.Event
    ) -> None:
        try:
            self._drive(gpu, compilers)
        finally:
            ended.set()

    def _drive(self, gpu: str, compilers: Compilers | None) -> None:
        """Runs jobs on one GPU until none is left."""
        with MeasureWorker(gpu, trial_seconds=self.options.trial_seconds) as bench:
            self.benches.append(bench)
            try:
                while not self.stop.is_set():
                    try:
                        job = self.waiting.get_nowait()
                    except queue.Empty:
                        return
                    self._run_job(job, bench, gpu, compilers)
            # an error of this program, or of arguments that no kernel supports
            except BaseException as error:
                self.errors.append(error)
                self.stop.set()

    def _run_job(
        self, job: Job, bench: MeasureWorker, gpu: str, compilers: Compilers | None
    ) -> None:
        try:
            model = bench.describe()
        except WorkerDied as down:
            with self.lock:
                self.found.failures.append(Failure(job.workload, f"GPU {gpu}: {down}"))
            return
        budget = self.options.budget
        if compilers is not None and budget is not None:
            # The first workload must not be charged for the start of the compilers.
            compilers.await_one(job.targets[0], budget / 4)
        outcome = tune(
            replace(job, seconds=self.budget.share()),
            model,
            bench,
            compilers,
            self.store,
            self.report,
            label=gpu,
            stopped=self.stop.is_set,
        )
        with self.lock:
            self.found.add(outcome)

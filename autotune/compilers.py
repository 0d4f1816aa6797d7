"""Compiles configs ahead of their measurement, in processes that see no GPU."""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import Future, TimeoutError
from typing import Any

from pebble import ProcessExpired, ProcessPool

from ..configs import from_text
from . import prune
from .processes import Context, killed_from_outside, start
from .records import Status, Workload
from .subjects import Subject

TIMEOUT = 180.0  # seconds of one compile
MEMORY = 12 << 30  # bytes of private memory of one process
TASKS = 100  # compiles of one process: what compilers leak goes with it
UNBUILT: tuple[Status, ...] = ("compile timeout", "compile crash")
PER_WORKER = 2 << 30  # bytes of the machine's memory that a compile takes, for how many run at once


class Compilers:
    """A pool of processes that compile to the caches on disk. A config that hangs or crashes costs its own compile."""

    def __init__(self, workers: int | None = None, *, timeout: float = TIMEOUT, memory: int = MEMORY) -> None:
        self.workers = workers or default_workers()
        self._timeout = timeout
        self._given: list[Future[float]] = []
        self._first: Future[None] | None = None
        self._pool = ProcessPool(
            max_workers=self.workers,
            max_tasks=TASKS,
            initializer=start,
            initargs=({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}, memory),
            context=Context(),
        )

    def submit(self, subject: Subject, workload: Workload, config: str, arch: int) -> Future[float]:
        """The seconds it takes, once it is done; `outcome` tells what went wrong."""
        try:
            future: Future[float] = self._pool.schedule(
                _compile, args=(subject, workload, config, arch), timeout=self._timeout
            )
        except RuntimeError:  # the pool is broken
            future = Future()
            future.set_result(0.0)
        self._given = [*(given for given in self._given if not given.done()), future]
        return future

    def await_one(self, subject: Subject, seconds: float) -> None:
        """Waits until a process has imported the first kernel asked for and its DSL, so many seconds at most."""
        with contextlib.suppress(Exception):  # of which every compile will tell
            if self._first is None:
                self._first = self._pool.schedule(_import, args=(subject,), timeout=self._timeout)
            self._first.result(seconds)

    def close(self) -> None:
        """Ends the processes, whatever they are at; compiles that are not done never will be."""
        self._pool.stop()
        self._pool.join()
        for future in self._given:
            if future.cancel():
                with contextlib.suppress(RuntimeError):  # pebble's own has told them
                    future.set_running_or_notify_cancel()  # whoever waits hears of it

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def default_workers() -> int:
    """As many as there are cores but one, and memory for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(cores - 1, memory // PER_WORKER))


class CompileError(Exception):
    """A config does not compile: a status and a reason, which any process can read."""


def outcome(future: Future[Any]) -> tuple[str, str] | None:
    """What went wrong with a finished compile; None if nothing did, and where no compiler could be started: whoever
    measures compiles then."""
    error = future.exception()
    match error:
        case CompileError(args=(status, reason)):
            return status, reason
        case TimeoutError():
            return "compile timeout", f"not compiled in {TIMEOUT:g} s"
        case ProcessExpired() if killed_from_outside(error.exitcode):
            return "killed", f"the compiler's process ended with {error.exitcode}"
        case ProcessExpired():
            return "compile crash", f"the compiler's process ended with {error.exitcode}"
    return None


def seconds(future: Future[float]) -> float | None:
    """How long a compile took; None for one that was not done."""
    return None if future.exception() is not None else future.result()


def _import(subject: Subject) -> None:
    subject.load()


def _compile(subject: Subject, workload: Workload, config: str, arch: int) -> float:
    begun = time.perf_counter()
    try:
        module = subject.load()
        module.precompile(prune.problem(workload), from_text(module.Config, config), arch)
    except OSError:
        return 0.0  # nothing can be kept on disk: whoever measures compiles
    except MemoryError:
        raise CompileError("compile crash", "the compiler reached its memory bound") from None
    except Exception as error:  # may hold what cannot be sent
        raise CompileError("failed", f"{type(error).__name__}: {error}"[:1000]) from None
    return time.perf_counter() - begun

"""The driver's side of a measuring worker: a process that is killed and started again when a config takes it down."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, TimeoutError, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessPool

from .. import cache
from . import worker
from .processes import Context, killed_from_outside, start
from .records import Gpu, Workload
from .worker import Entry, Screened

T = TypeVar("T")

START_SECONDS = 300.0  # to import torch, wake the GPU and make operands
TRIAL_SECONDS = 20.0  # to load, check and time a config, besides its calls
TURNS = 200.0  # calls of cuBLAS's length that a trial may take, ten times as slow
LOCK_SECONDS = 900.0
RELEASE_SECONDS = 0.5  # after which whoever waits for a worker that was abandoned knows
STARTS = 3  # of a worker, before it counts as impossible


class Abandoned(Exception):
    """Nobody wants the answer any more: the sweep was interrupted."""


class Down(Exception):
    """The worker did not come back from a call; `status` says how it went."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Bench:
    """One worker on one GPU. `visible` is that GPU for CUDA_VISIBLE_DEVICES; "cpu" for the interpreter.

    Only one thread may use it. While it measures it holds a lock on the GPU, so that two sweeps take turns.
    """

    def __init__(self, visible: str, *, trial_seconds: float = TRIAL_SECONDS) -> None:
        self.visible = visible
        self.on_gpu = visible != "cpu"
        self.restarts = 0
        self._trial_seconds = trial_seconds
        self._abandoned = False
        self._pool: ProcessPool | None = None
        self._owning = threading.Lock()  # of the pool: two threads that join one close its pipes twice
        self._open: Workload | None = None
        self.cublas_us = 0.0

    def describe(self) -> Gpu:
        """The GPU it measures on. Raises Down."""
        return self._call(START_SECONDS, worker.describe)

    def open(self, workload: Workload) -> float:
        """Makes the operands of a workload; returns cuBLAS's µs a call. Raises Down."""
        if self._open != workload:
            with self._locked():
                try:
                    self.cublas_us = self._call(START_SECONDS, worker.open_bench, workload, self.on_gpu)
                except worker.NotOpen as error:
                    raise Down("failed", f"no operands: {error}") from None
            self._open = workload
        return self.cublas_us

    def screen(self, workload: Workload, entry: Entry, best_us: float | None) -> Screened:
        """Checks and times a config. Raises Down when the worker hung or died; the next call has a fresh one."""
        return self._ask(workload, worker.screen, entry, best_us)

    def enter(self, workload: Workload, entry: Entry) -> Screened:
        """Makes a config ready for `race`. Raises Down as `screen`."""
        return self._ask(workload, worker.enter, entry)

    def _ask(self, workload: Workload, function: Callable[..., Screened], *arguments: Any) -> Screened:
        for _ in range(2):
            self.open(workload)
            try:
                with self._locked():
                    found = self._call(self._limit(), function, *arguments)
            except worker.NotOpen:  # the one that had the operands died while nothing was asked of it
                self.restarts += self._open is not None
                self._open = None
                continue
            if found.lost:
                self.stop()
            return found
        raise Down("crash", "the worker died again and again")

    def race(self, entries: Sequence[Entry], rounds: int) -> tuple[list[float], list[list[float]]]:
        """µs a call of cuBLAS and of each entry, by round. Raises Down."""
        seconds = self._limit() + rounds * (len(entries) + 1)
        try:
            with self._locked():
                return self._call(seconds, worker.race, list(entries), rounds)
        except (Down, Abandoned):
            raise
        except Exception as error:  # of a config, or for want of them: what they leave is not to be trusted
            self.stop()
            raise Down("crash", f"{type(error).__name__}: {error}"[:1000]) from None

    def forget(self, entries: Sequence[Entry]) -> None:
        """Frees what was kept for configs that are out of the race. Raises Down."""
        if self._pool is not None and self._open is not None:
            self._call(START_SECONDS, worker.forget, list(entries))

    def abandon(self) -> None:
        """Ends the worker from another thread: whoever waits for an answer gets Abandoned, now and from now on."""
        self._abandoned = True
        self._end()

    def stop(self) -> None:
        """Ends the worker, whatever it is at."""
        self.restarts += self._end()
        self._open = None

    def _end(self) -> bool:
        """Whether there was a worker."""
        with self._owning:
            pool, self._pool = self._pool, None
            if pool is not None:
                pool.stop()
                pool.join()
            return pool is not None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _limit(self) -> float:
        return self._trial_seconds + TURNS * 10 * self.cublas_us / 1e6

    def _call(self, seconds: float, function: Callable[..., T], *arguments: Any) -> T:
        """Raises Down, Abandoned, and what the function does."""
        for _ in range(STARTS):
            try:
                future = self._scheduled(seconds, function, *arguments)
                while not wait([future], RELEASE_SECONDS).done:
                    if self._abandoned:
                        raise Abandoned
                found: T = future.result()
                return found
            except BaseException as error:
                if self._abandoned:
                    raise Abandoned from None
                if isinstance(error, TimeoutError):
                    self.stop()
                    raise Down("hang", f"not done in {seconds:.0f} s: the worker was killed") from None
                if isinstance(error, ProcessExpired):
                    self.stop()
                    status = "killed" if killed_from_outside(error.exitcode) else "crash"
                    raise Down(status, f"the worker died: {_cause(error.exitcode)}") from None
                if not isinstance(error, BrokenProcessPool):  # whose worker died before it took up the call
                    raise
                self.stop()
        raise Down("crash", "no worker can be started")

    def _scheduled(self, seconds: float, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """The call on its way to the worker, which is started if there is none. Raises BrokenProcessPool."""
        with self._owning:
            if self._abandoned:
                raise Abandoned
            if self._pool is None:
                environment = {"CUDA_VISIBLE_DEVICES": self.visible if self.on_gpu else ""}
                context, first = Context(), (environment, None)
                self._pool = ProcessPool(max_workers=1, initializer=start, initargs=first, context=context)
            pool = self._pool
        try:
            future: Future[T] = pool.schedule(function, args=arguments, timeout=seconds)
        except RuntimeError as error:
            raise BrokenProcessPool(str(error)) from None
        return future

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Other sweeps on this GPU wait; where locks cannot be had they do not."""
        folder = cache.directory()
        if not self.on_gpu or cache.unusable_reason(folder):
            yield
            return
        with cache.locked(folder / f"gpu-{self.visible.replace('/', '_')}.lock", LOCK_SECONDS):
            yield


def _cause(code: int | None) -> str:
    """What ended a process."""
    import signal

    if code is not None and code < 0:
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"
    return f"exit status {code}"

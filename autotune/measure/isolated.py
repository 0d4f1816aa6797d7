"""The driver's side of a measuring worker: a process that is killed and restarted when a config
hangs or crashes it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import filelock

from outblas.autotune.measure import worker
from outblas.autotune.measure.worker import Entry, Screened
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import Gpu, Workload
from outblas.base import cache
from outblas.base.processes import START_SECONDS, RemoteError, WorkerDied, WorkerProcess
from outblas.call import fallback

T = TypeVar("T")
Raced = tuple[list[float], list[list[float]]]  # µs per call of cuBLAS and of each entry, by round

TRIAL_SECONDS = 20.0  # to load, check and time a config, not counting its calls
TURNS = 200.0  # calls as long as cuBLAS's in a trial; a config may be ten times as slow
STARTS = 3  # failed starts of a worker before it counts as impossible
LOCK_SECONDS = 900.0
LOCK_PERIOD = 0.005  # seconds between two looks at the lock of a GPU
_NOT_OPEN = f"{worker.NotOpen.__module__}.{worker.NotOpen.__qualname__}"


class Cancelled(Exception):
    """The sweep was interrupted, so the answer is no longer needed."""


class Bench(Protocol):
    """A GPU's measuring worker: `MeasureWorker`, here or on a node of a cluster. Its methods raise
    WorkerDied.
    """

    @property
    def label(self) -> str: ...  # names the GPU to users
    @property
    def unlocked(self) -> str: ...
    def describe(self) -> Gpu: ...
    def open(self, workload: Workload) -> float: ...
    def screen(self, workload: Workload, entry: Entry, best_us: float | None) -> Screened: ...
    def race(self, workload: Workload, entries: Sequence[Entry], rounds: int) -> Raced: ...
    def cancel(self) -> None: ...
    def stop(self) -> None: ...


class MeasureWorker:
    """One worker on one GPU. `visible` is that GPU for CUDA_VISIBLE_DEVICES; "cpu" stands for the
    interpreter.

    Only one thread may use it. While it measures it holds a lock on the GPU, so that two sweeps
    take turns; if it measured without the lock, `unlocked` says why.

    A WorkerDied with status "killed" says nothing about the config: something else ended the
    worker, as Linux does when memory runs out, or no worker could be started. Other values are
    those of `records.Status`.
    """

    def __init__(self, visible: str, *, trial_seconds: float = TRIAL_SECONDS) -> None:
        self.label = visible
        self.on_gpu = visible != "cpu"
        self.unlocked = ""
        self.cublas_us = 0.0
        self._trial_seconds = trial_seconds
        self._cancelled = False
        self._process: WorkerProcess | None = None
        self._owning = threading.Lock()  # protects the process: another thread may cancel it
        self._gpu = _GpuLock(visible, lambda: self._cancelled) if self.on_gpu else None
        self._open: Workload | None = None
        self._loaded: set[TuneTarget] = set()  # by the current worker
        self._unloadable: dict[TuneTarget, str] = {}

    def describe(self) -> Gpu:
        """Returns the GPU that it measures on. Raises WorkerDied."""
        try:
            return self._call(START_SECONDS, worker.describe)
        except RemoteError as error:
            raise WorkerDied("failed", str(error)) from None

    def open(self, workload: Workload) -> float:
        """Makes the operands of a workload; returns cuBLAS's µs per call. Raises WorkerDied."""
        if self._open != workload:
            self._open = None
            try:
                with self._locked():
                    self.cublas_us = self._call(
                        START_SECONDS, worker.open_bench, workload, self.on_gpu
                    )
            except RemoteError as error:
                text = error.text if error.name == _NOT_OPEN else str(error)
                reason = f"the operands could not be made: {text}"
                raise WorkerDied("failed", reason) from None
            self._open = workload
        return self.cublas_us

    def screen(self, workload: Workload, entry: Entry, best_us: float | None) -> Screened:
        """Checks and times a config. Raises WorkerDied when the worker hung or died; the next call
        has a fresh one.
        """
        result = self._ask(workload, [entry], 0.0, worker.screen, entry, best_us)
        if result.lost:
            self.stop()
        return result

    def race(self, workload: Workload, entries: Sequence[Entry], rounds: int) -> Raced:
        """Returns the µs per call of cuBLAS and of each entry, by round. Raises WorkerDied like
        `screen`, for a config that raises as well.
        """
        seconds = len(entries) * self._limit() + rounds * (len(entries) + 1)
        return self._ask(workload, entries, seconds, worker.race, list(entries), rounds)

    def _ask(
        self,
        workload: Workload,
        entries: Sequence[Entry],
        seconds: float,
        function: Callable[..., T],
        *arguments: Any,
    ) -> T:
        """Calls a function of the worker with these entries, in one that has the operands. It may
        take so many seconds beyond the limit of a trial.
        """
        for _ in range(STARTS):
            try:
                for target in dict.fromkeys(target for target, _ in entries):
                    self._load(target)
                self.open(workload)
            except WorkerDied as death:  # the worker died before it touched the config
                raise WorkerDied("killed", f"the worker could not be made ready: {death}") from None
            try:
                with self._locked():
                    return self._call(seconds + self._limit(), function, *arguments)
            except RemoteError as error:
                if error.name != _NOT_OPEN:  # a config raised where it may not
                    self.stop()
                    raise WorkerDied("crash", str(error)[:1000]) from None
                self._open = None  # the worker that had the operands died while idle
        raise WorkerDied("killed", "the worker process died repeatedly")

    def _load(self, target: TuneTarget) -> None:
        """Makes the worker import a kernel and its DSL, so that no config is charged for that time.

        Raises WorkerDied. For a kernel that cannot be imported, all further calls raise at once.
        """
        if reason := self._unloadable.get(target):
            raise WorkerDied("killed", reason)
        if target in self._loaded and self._process is not None and self._process.alive:
            return
        try:
            self._call(START_SECONDS, worker.load, target)
        except RemoteError:  # every trial will report this error
            pass
        except WorkerDied as death:
            if death.status == "killed":
                raise
            reason = self._unloadable[target] = f"{target.name} cannot be imported: {death}"
            raise WorkerDied("killed", reason) from None
        self._loaded.add(target)

    def cancel(self) -> None:
        """Ends the worker from another thread: waiting and later calls raise Cancelled."""
        self._cancelled = True
        with self._owning:
            if self._process is not None:
                self._process.terminate()

    def stop(self) -> None:
        """Ends the worker, whatever it is doing."""
        with self._owning:
            process, self._process = self._process, None
        if process is not None:
            process.close()
        self._open = None

    def __enter__(self) -> MeasureWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _limit(self) -> float:
        return self._trial_seconds + TURNS * 10 * self.cublas_us / 1e6

    def _call(self, seconds: float, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function in the worker, in a fresh one where the worker ends before it reads the
        call. Raises WorkerDied, Cancelled and RemoteError.
        """
        reason = ""
        for _ in range(STARTS):
            try:
                return self._ready().call(seconds, function, *arguments)
            except WorkerDied as death:
                self.stop()
                if self._cancelled:
                    raise Cancelled from None
                if death.status != "idle":
                    raise
                reason = str(death)
        raise WorkerDied("killed", f"no worker process can be started: {reason}")

    def _ready(self) -> WorkerProcess:
        """Returns the worker, started if necessary. Raises WorkerDied."""
        if self._process is not None and not self._process.alive:
            self.stop()  # it died while idle
        with self._owning:
            if self._cancelled:
                raise Cancelled
            if self._process is None:
                self._loaded.clear()
                self._process = WorkerProcess(
                    [worker.__name__],
                    environment={"CUDA_VISIBLE_DEVICES": self.label if self.on_gpu else ""},
                )
            return self._process

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock on the GPU, so that other sweeps on it wait. Where the lock cannot be
        acquired, they do not wait, and the user is warned once.
        """
        reason = self._gpu.acquire() if self._gpu is not None else ""
        if reason:
            self.unlocked = f"{reason}; other sweeps on GPU {self.label} may disturb the times"
            fallback.warn_once(f"GPU {self.label} is measured without its lock: {self.unlocked}")
        try:
            yield
        finally:
            if self._gpu is not None:
                self._gpu.release()


class _GpuLock:
    """The lock on a GPU, a file in the cache, which the kernel frees when its process dies.

    Whoever has released it stays away for two looks of those who wait: otherwise one driver would
    have it all the time, because between two trials it is free for less than a look.
    """

    def __init__(self, visible: str, cancelled: Callable[[], bool]) -> None:
        folder = cache.directory()
        self._unusable = cache.unusable_reason(folder) or ""
        self._lock = filelock.FileLock(Path(folder, f"gpu-{visible.replace('/', '_')}.lock"))
        self._cancelled = cancelled
        self._released = 0.0  # when, on the clock of `time.monotonic`
        self._patience = LOCK_SECONDS

    def acquire(self) -> str:
        """Acquires the lock; returns why it failed, or "". Raises Cancelled."""
        if self._unusable:
            return f"the lock cannot be used: {self._unusable}"
        time.sleep(max(0.0, self._released + 2 * LOCK_PERIOD - time.monotonic()))
        try:
            self._lock.acquire(self._patience, LOCK_PERIOD, cancel_check=self._cancelled)
        except filelock.Timeout:
            if self._cancelled():
                raise Cancelled from None
            self._patience = LOCK_SECONDS / 100  # until it is free once
            return f"another process has held the lock of the GPU for {LOCK_SECONDS:g} s"
        except (OSError, RuntimeError) as error:
            return f"the lock cannot be used: {error}"
        self._patience = LOCK_SECONDS
        return ""

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self._lock.release(force=True)
        self._released = time.monotonic()

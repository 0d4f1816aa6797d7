"""The driver's side of a measuring worker: a process that is killed and restarted when a config
hangs or crashes it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ...core import cache
from ...runtime import fallback
from ..search.target import TuneTarget
from ..store.records import Gpu, Workload
from . import limits, worker
from .gpu_lock import GpuLock, LockCancelled
from .processes import RemoteError, WorkerExited, WorkerProcess, WorkerStartError, WorkerTimeout
from .worker import Entry, Screened

T = TypeVar("T")

START_SECONDS = 300.0  # to import torch, initialise the GPU and make operands
TRIAL_SECONDS = 20.0  # to load, check and time a config, not counting its calls
TURNS = 200.0  # calls as long as cuBLAS's in a trial; a config may be ten times as slow
LOCK_SECONDS = 900.0
STARTS = 3  # failed starts of a worker before it counts as impossible
MEMORY_SHARE = 0.5  # of the memory that this process may use, for a worker
_NOT_OPEN = f"{worker.NotOpen.__module__}.{worker.NotOpen.__qualname__}"


class Cancelled(Exception):
    """The sweep was interrupted, so the answer is no longer needed."""


class WorkerDied(Exception):
    """The worker did not return from a call: it died, hung, or could not be started. `status` tells
    which.

    "killed" says nothing about the config: something else ended the worker, as Linux does when
    memory runs out, or no worker could be started. All other values are those of `records.Status`.
    """

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class MeasureWorker:
    """One worker on one GPU. `visible` is that GPU for CUDA_VISIBLE_DEVICES; "cpu" stands for the
    interpreter.

    Only one thread may use it. While it measures it holds a lock on the GPU, so that two sweeps
    take turns; if it measured without the lock, `unlocked` says why. The worker may hold `memory`
    bytes of the host's memory, by default half of what this process may use.
    """

    def __init__(
        self, visible: str, *, trial_seconds: float = TRIAL_SECONDS, memory: int | None = None
    ) -> None:
        self.visible = visible
        self.on_gpu = visible != "cpu"
        self.restarts = 0
        self.unlocked = ""
        self.cublas_us = 0.0
        self._trial_seconds = trial_seconds
        self._memory = memory or int(MEMORY_SHARE * limits.memory())
        self._cancelled = False
        self._process: WorkerProcess | None = None
        self._owning = threading.Lock()  # protects the process: another thread may abandon it
        self._lock: GpuLock | None = None
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
            with self._locked():
                try:
                    self.cublas_us = self._call(
                        START_SECONDS, worker.open_bench, workload, self.on_gpu
                    )
                except RemoteError as error:
                    raise WorkerDied(
                        "failed",
                        "the operands could not be made: "
                        f"{error.text if _not_open(error) else error}",
                    ) from None
            self._open = workload
        return self.cublas_us

    def screen(self, workload: Workload, entry: Entry, best_us: float | None) -> Screened:
        """Checks and times a config. Raises WorkerDied when the worker hung or died; the next call
        has a fresh one.
        """
        return self._ask(workload, worker.screen, entry, best_us)

    def enter(self, workload: Workload, entry: Entry) -> Screened:
        """Makes a config ready for `race`. Raises WorkerDied like `screen`."""
        return self._ask(workload, worker.enter, entry)

    def _ask(
        self, workload: Workload, function: Callable[..., Screened], entry: Entry, *arguments: Any
    ) -> Screened:
        for _ in range(STARTS):
            try:
                self._load(entry[0])
                self.open(workload)
            except WorkerDied as death:  # the worker died before it touched the config
                raise WorkerDied("killed", f"the worker could not be made ready: {death}") from None
            try:
                with self._locked():
                    found = self._call(self._limit(), function, entry, *arguments)
            except RemoteError as error:
                if not _not_open(error):  # otherwise `worker` counts it as the config's result
                    self.stop()
                    raise WorkerDied("crash", str(error)[:1000]) from None
                # The worker that had the operands died while idle.
                self.restarts += self._open is not None
                self._open = None
                continue
            if found.lost:
                self.stop()
            return found
        raise WorkerDied("killed", "the worker process died repeatedly")

    def _load(self, target: TuneTarget) -> None:
        """Makes the worker import a kernel and its DSL, so that no config is charged for that time.

        Raises WorkerDied. For a kernel that cannot be imported, all further calls raise at once.
        """
        if reason := self._unloadable.get(target):
            raise WorkerDied("killed", reason)
        if target in self._loaded and self._process is not None and self._process.exit is None:
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

    def race(self, entries: Sequence[Entry], rounds: int) -> tuple[list[float], list[list[float]]]:
        """Returns the µs per call of cuBLAS and of each entry, by round. Raises WorkerDied."""
        seconds = self._limit() + rounds * (len(entries) + 1)
        try:
            with self._locked():
                return self._call(seconds, worker.race, list(entries), rounds)
        except RemoteError as error:
            # A config raised it, or there were no configs; the worker's state cannot be trusted.
            self.stop()
            raise WorkerDied("crash", str(error)[:1000]) from None

    def forget(self, entries: Sequence[Entry]) -> None:
        """Frees what was kept for configs that are out of the race. Raises WorkerDied."""
        if self._process is None or self._open is None:
            return
        try:
            self._call(START_SECONDS, worker.forget, list(entries))
        except RemoteError as error:
            self.stop()
            raise WorkerDied("crash", str(error)[:1000]) from None

    def cancel(self) -> None:
        """Ends the worker from another thread: waiting and later calls raise Cancelled."""
        self._cancelled = True
        with self._owning:
            process = self._process
        if process is not None:
            process.terminate()

    def stop(self) -> None:
        """Ends the worker, whatever it is doing."""
        with self._owning:
            process, self._process = self._process, None
        if process is not None:
            process.close()
            self.restarts += 1
        self._open = None

    def __enter__(self) -> MeasureWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _limit(self) -> float:
        return self._trial_seconds + TURNS * 10 * self.cublas_us / 1e6

    def _call(self, seconds: float, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function in the worker. Raises WorkerDied, Cancelled and RemoteError."""
        reason = ""
        for _ in range(STARTS):
            try:
                process = self._ready()
                return process.call(seconds, function, *arguments)
            except WorkerStartError as error:
                reason = str(error)
            except WorkerTimeout as late:
                reason = "it does not accept calls"
                if late.accepted:
                    self._stop_unless_cancelled()
                    raise WorkerDied(
                        "hang", f"not done in {seconds:.0f} s: the worker was killed"
                    ) from None
            except WorkerExited as died:
                reason = str(died)
                if died.accepted:
                    self._stop_unless_cancelled()
                    raise _death(died) from None
            self._stop_unless_cancelled()
        raise WorkerDied("killed", f"no worker process can be started: {reason}")

    def _stop_unless_cancelled(self) -> None:
        self.stop()
        if self._cancelled:
            raise Cancelled

    def _ready(self) -> WorkerProcess:
        """Returns the worker, started if necessary, and ready for a call. Raises
        WorkerStartError.
        """
        if self._process is not None and self._process.exit is not None:
            self.stop()  # it died while idle
        with self._owning:
            if self._cancelled:
                raise Cancelled
            if self._process is not None:
                return self._process
            self._loaded.clear()
            self._process = process = WorkerProcess(
                environment={"CUDA_VISIBLE_DEVICES": self.visible if self.on_gpu else ""},
                modules=[worker.__name__],
                memory=self._memory,
            )
        process.await_ready(START_SECONDS)
        return process

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock on the GPU, so that other sweeps on it wait. Where the lock cannot be
        acquired, they do not wait, and the user is warned once.
        """
        if not self.on_gpu:
            yield
            return
        folder = cache.directory()
        if reason := cache.unusable_reason(folder):
            self._bypass(f"the lock cannot be used: {reason}")
            yield
            return
        self._lock = self._lock or GpuLock(folder / f"gpu-{self.visible.replace('/', '_')}.lock")
        try:
            with self._lock.hold(LOCK_SECONDS, lambda: self._cancelled) as reason:
                if reason:
                    self._bypass(reason)
                yield
        except LockCancelled:
            raise Cancelled from None

    def _bypass(self, reason: str) -> None:
        self.unlocked = f"{reason}; other sweeps on GPU {self.visible} may disturb the times"
        fallback.warn_once(f"GPU {self.visible} is measured without its lock: {self.unlocked}")


def _not_open(error: RemoteError) -> bool:
    return error.name == _NOT_OPEN


def _death(died: WorkerExited) -> WorkerDied:
    """Returns what the end of a worker says about the config that it was measuring."""
    if died.exit.memory is not None:
        return WorkerDied(
            "out of memory", f"{died} on the host, more than its limit: the worker was killed"
        )
    return WorkerDied("killed" if died.exit.from_outside else "crash", f"the worker died: {died}")

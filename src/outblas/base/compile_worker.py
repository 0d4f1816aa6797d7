"""Compiles kernels onto disk in processes beside this one, while torch computes the calls that want
them.

A job is the key of one compile as JSON, `[class, field, ...]`. A process makes the key of it again
and compiles into the cache under the lock of that kernel, so that processes that want one kernel
compile it once. It answers with the digest of the facts that the kernel is found by. Any of these
ends a job, after which `compiling.generation` rises:

- It is on disk, where the caller finds it.
- It cannot be compiled, its process crashed or hung, or was killed twice: `request` raises
  CompileFailed from then on.
- It could not be saved, has other facts there, is not found on disk afterwards, or no process can
  be started: `request` returns, and the caller compiles it.

A process is started for a job, ends when there was none for a while, and dies with this process
(`serve`). A forked child begins with no job and no process.
"""

import atexit
import contextlib
import dataclasses
import functools
import importlib
import json
import operator
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from outblas.base import compiling, limits
from outblas.base.compiling import CompileFailed, CompilePending
from outblas.base.facts import Facts, digest
from outblas.base.processes import RemoteError, WorkerDied, WorkerProcess

SECONDS = 600.0  # for a compile, or to wait for another process that has begun it
IDLE_SECONDS = 60.0  # after which a process ends, which holds a gigabyte
ATTEMPTS = 2  # at a compile whose process is killed from outside, and to start a process
MOST = 8  # processes
NICENESS = 10

COMPILED, UNSAVED = "compiled", "unsaved"


class CompileKey(Protocol):
    """Identifies one compile: a dataclass, or a NamedTuple.

    keeper: the function, as "module:name", that compiles a key onto disk, without a GPU, and
        returns the facts. It raises OSError where the disk keeps nothing.
    """

    keeper: ClassVar[str]

    @property
    def cache_key_fields(self) -> Facts: ...


class CompileJob(NamedTuple):
    """path: where the kernel is to be on disk. kernel: what messages call it."""

    path: Path
    kernel: str
    key: str


class CompileWorker:
    """The jobs of a process, and threads with a worker process each. Calls' jobs go first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # protects all that follows
        self._wanted: dict[Path, CompileJob] = {}  # what waits for its turn
        self._ahead: dict[Path, CompileJob] = {}  # the same, and no call has asked for it yet
        self._running: set[Path] = set()
        self._ended: dict[Path, tuple[CompileJob, str]] = {}  # COMPILED, UNSAVED, or why it failed
        self._threads = self._idle = 0
        self._processes: set[WorkerProcess] = set()
        self._closed = False

    def request(self, key: CompileKey, path: Path, *, ahead: bool = False) -> None:
        """Begins a job, unless it has ended. Raises CompilePending until then, and CompileFailed
        where the kernel could not be compiled. Returns where the caller is to compile it.

        With `ahead` no call waits for it.
        """
        with self._changed:
            kernel = str(key.cache_key_fields.get("kernel"))
            if path in self._ended:
                outcome = self._ended[path][1]
                if outcome in (COMPILED, UNSAVED):
                    return
                raise CompileFailed(kernel, outcome)
            if path not in self._running and path not in self._wanted:
                job = self._ahead.pop(path, None) or self._described(key, path, kernel)
                if job is None or not self._has_thread():
                    return
                (self._ahead if ahead else self._wanted)[path] = job
                compiling.unfinished.add(path)
                self._changed.notify_all()
        raise CompilePending(kernel, path)

    def failures(self) -> dict[str, str]:
        """Returns the kernels that could not be compiled, with the reasons."""
        with self._changed:
            ended = list(self._ended.values())
        return {job.kernel: why for job, why in ended if why not in (COMPILED, UNSAVED)}

    def await_all(self, tell: Callable[[int], None]) -> None:
        """Waits until all jobs have ended, and tells how many have not whenever that changes."""
        with self._changed:
            while left := len(self._wanted) + len(self._ahead) + len(self._running):
                tell(left)
                self._changed.wait()

    def close(self) -> None:
        """Ends the processes, whatever they are doing. No job ends any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for process in self._processes:
                process.terminate()

    @staticmethod
    def _described(key: CompileKey, path: Path, kernel: str) -> CompileJob | None:
        """Returns a job; None for a key that is not data."""
        try:
            return CompileJob(path, kernel, json.dumps(described(key)))
        except TypeError:
            return None

    @functools.cached_property
    def _most(self) -> int:
        return min(MOST, limits.default_workers())

    def _has_thread(self) -> bool:
        """Starts a thread for one more job if all others have one and there may be more. Returns
        whether there is any.
        """
        waiting = len(self._wanted) + len(self._ahead)
        if not self._closed and waiting >= self._idle and self._threads < self._most:
            # Not where the interpreter ends, or there are too many.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._work, name="outblas-compiler", daemon=True).start()
                self._threads += 1
        return self._threads > 0 and not self._closed

    # What follows runs in the threads.
    def _work(self) -> None:
        process: WorkerProcess | None = None
        while job := self._next():
            try:
                outcome, process = self._outcome(job, process)
            except Exception as error:  # none is known; a job has to end
                outcome = f"{type(error).__name__}: {error}"
            with self._changed:
                self._running.discard(job.path)
                compiling.unfinished.discard(job.path)
                self._ended[job.path] = job, outcome
                compiling.end_generation()
                self._changed.notify_all()
        if process is not None:
            self._end(process)

    def _next(self) -> CompileJob | None:
        """Returns the next job; None, after which the thread has to end, where there was none for a
        while.
        """
        with self._changed:
            self._idle += 1
            self._changed.wait_for(
                lambda: self._closed or self._wanted or self._ahead, IDLE_SECONDS
            )
            self._idle -= 1
            jobs = self._wanted or self._ahead
            if self._closed or not jobs:
                self._threads -= 1
                return None
            job = jobs.pop(next(iter(jobs)))
            self._running.add(job.path)
            return job

    def _outcome(
        self, job: CompileJob, process: WorkerProcess | None
    ) -> tuple[str, WorkerProcess | None]:
        """Compiles in this thread's process, or in a new one. Returns how that ended, and the
        process for the next job.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                process = process or self._started()
                answer = process.call_by_name(
                    SECONDS, f"{__name__}:keep_here", job.key, str(job.path.parent.parent)
                )
                return (COMPILED if answer == job.path.stem else UNSAVED), process
            except RemoteError as error:
                return str(error)[:1000], process
            except WorkerDied as death:
                if process is not None:
                    self._end(process)
                process = None
                if death.status in ("hang", "crash"):
                    return str(death), None
                if attempt == ATTEMPTS:
                    return UNSAVED if death.status == "idle" else str(death), None
        raise AssertionError("the last attempt returns")

    def _started(self) -> WorkerProcess:
        process = WorkerProcess(environment={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
        with self._changed:
            self._processes.add(process)
            if self._closed:
                process.terminate()
        return process

    def _end(self, process: WorkerProcess) -> None:
        process.close()
        with self._changed:
            self._processes.discard(process)


def keep_here(key: str, folder: str) -> str:
    """Compiles in a worker process into the cache in a folder. Returns the digest of the facts, or
    UNSAVED.
    """
    os.environ["OUTBLAS_CACHE_DIR"] = folder
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    try:
        remade_key = remade(json.loads(key))
        return digest(_named(remade_key.keeper)(remade_key))
    except OSError:
        return UNSAVED


# ---- keys as data
def described(value: Any) -> Any:
    """Returns a key, or a value in it, as JSON. Raises TypeError for what is not data."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    kind, torch = type(value), sys.modules.get("torch")
    if torch is not None and kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if kind is tuple:
        return {"tuple": [*map(described, value)]}
    if dataclasses.is_dataclass(kind):
        fields = [getattr(value, field.name) for field in dataclasses.fields(kind)]
    elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
        fields = [*value]
    else:
        raise TypeError(f"{value!r} is not data")
    return [f"{kind.__module__}:{kind.__qualname__}", *map(described, fields)]


def remade(value: Any) -> Any:
    """Returns the value that `described` has described."""
    match value:
        case {"dtype": name}:
            return _named(f"torch:{name}")
        case {"tuple": values}:
            return tuple(map(remade, values))
        case [name, *fields]:
            return _named(name)(*map(remade, fields))
    return value


def _named(name: str) -> Any:
    """Returns what "module:name" names."""
    module, _, attribute = name.partition(":")
    return operator.attrgetter(attribute)(importlib.import_module(module))


# ---- the worker of this process
_worker = CompileWorker()


def request(key: CompileKey, path: Path, *, ahead: bool = False) -> None:
    """`CompileWorker.request` of this process."""
    _worker.request(key, path, ahead=ahead)


def failures() -> dict[str, str]:
    """`CompileWorker.failures` of this process."""
    return _worker.failures()


def await_all(tell: Callable[[int], None]) -> None:
    """`CompileWorker.await_all` of this process."""
    _worker.await_all(tell)


def _close() -> None:
    _worker.close()


def _begin_anew() -> None:
    """Leaves the worker to the parent; plans that wait for a kernel ask this process's own."""
    global _worker
    _worker = CompileWorker()
    compiling.unfinished.clear()
    compiling.end_generation()


atexit.register(_close)
os.register_at_fork(after_in_child=_begin_anew)

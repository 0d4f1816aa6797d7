"""Compiles configs ahead of their measurement, in processes that see no GPU."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ...core.configs import from_text
from ..search import prune
from ..search.target import TuneTarget
from ..store.records import Status, Workload
from . import limits
from .processes import (
    END_SECONDS,
    RemoteError,
    WorkerExited,
    WorkerProcess,
    WorkerStartError,
    WorkerTimeout,
)
from .serve import brief

TIMEOUT = 180.0  # seconds per compile
START_SECONDS = 300.0  # for a process to import the modules that it needs
# Bytes that a process and its children may hold together, and that each of them may allocate.
MEMORY = 12 << 30
MEMORY_SHARE = 0.75  # of the memory that this process may use, where that is less
TASKS = 100  # compiles per process; what compilers leak is freed with the process
ATTEMPTS = 2  # at a compile whose process is killed from outside
STARTS = 3  # failed starts in a row after which starting processes counts as impossible
PAUSE_SECONDS = 1.0  # until starts are tried again; doubled after each further failure
LONGEST_PAUSE = 60.0
UNBUILT: tuple[Status, ...] = ("compile timeout", "compile crash")
PER_WORKER = 2 << 30  # memory of the machine per compile, for choosing the number of processes

Failure = Status | Literal["killed"]


class CompileError(Exception):
    """The error of a config that does not compile: a status and a reason. "killed": something else
    ended its process, twice.
    """

    def __init__(self, status: Failure, reason: str) -> None:
        super().__init__(status, reason)
        self.status: Failure = status
        self.reason = reason


class Compilers:
    """A pool of processes that compile into the caches on disk.

    A config that hangs or crashes affects only its own compile. A process that dies is replaced; a
    compile whose process was killed from outside is started once more. Where no process can be
    started, nothing is compiled ahead; a warning says so, and starts are tried again later.
    """

    def __init__(
        self, workers: int | None = None, *, timeout: float = TIMEOUT, memory: int | None = None
    ) -> None:
        self.workers = workers or default_workers()
        self.timeout = timeout
        self.memory = memory or min(MEMORY, int(MEMORY_SHARE * limits.memory()))
        self.starts = _Starts()
        self._tasks = queue.SimpleQueue[_Task | None]()
        self._given: list[_Task] = []
        self._compilers: list[_Compiler] = []
        self._first: Future[Any] | None = None
        self._closed = False
        self._lock = threading.Lock()

    def submit(
        self, target: TuneTarget, workload: Workload, config: str, arch: int
    ) -> Future[float]:
        """Starts a compile. The future returns its seconds; `outcome` tells what went wrong.

        The future can be cancelled while the compile runs.
        """
        return self._schedule(_compile, target, workload, config, arch)

    def await_one(self, target: TuneTarget, seconds: float) -> None:
        """Waits, for at most `seconds`, until a process has imported the kernel and its DSL."""
        with contextlib.suppress(Exception):  # every compile will report this error
            if self._first is None:
                self._first = self._schedule(_import, target)
            self._first.result(seconds)

    def close(self) -> None:
        """Ends the processes, whatever they are doing; unfinished compiles stay unfinished."""
        with self._lock:
            self._closed = True
            given, compilers = self._given, self._compilers
            for _ in compilers:
                self._tasks.put(None)
        for task in given:
            task.cancel()
        for compiler in compilers:
            compiler.terminate()
        for compiler in compilers:
            compiler.join(2 * END_SECONDS)

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _schedule(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        task = _Task(function, arguments)
        with self._lock:
            if self._closed:
                task.cancel()
                return task.future
            self._given = [*(given for given in self._given if not given.future.done()), task]
            self._tasks.put(task)
            if len(self._compilers) < self.workers:
                self._compilers.append(_Compiler(self, self._tasks))
        return task.future


def default_workers() -> int:
    """Returns the default number of processes: the cores minus one, limited by memory, within the
    bounds of this process's control groups.
    """
    return max(1, min(limits.cores() - 1, limits.memory() // PER_WORKER))


def outcome(future: Future[Any]) -> tuple[Failure, str] | None:
    """Returns what went wrong with a finished compile: a status and a reason, or "killed" and how.

    Returns None if nothing did, or if no compiler could be started; the measuring process compiles
    then.
    """
    error = future.exception()
    return (error.status, error.reason) if isinstance(error, CompileError) else None


def seconds(future: Future[float]) -> float | None:
    """Returns how long a compile took; None for one that did not finish."""
    return None if future.exception() is not None else future.result()


@dataclass(eq=False)
class _Task:
    """A call for a process. Its future stays pending while the call runs, so that it can be
    cancelled.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    future: Future[Any] = field(default_factory=Future)
    process: WorkerProcess | None = None  # the process that runs it now
    lock: threading.Lock = field(default_factory=threading.Lock)
    settling: threading.Lock = field(default_factory=threading.Lock)
    settled: bool = False

    def __post_init__(self) -> None:
        self.future.add_done_callback(self._on_done)

    def cancel(self) -> None:
        """Fails the task's future; its waiters are notified."""
        if self.future.cancel():
            self._settle()

    def begin(self, process: WorkerProcess) -> bool:
        """Marks the task as running in a process if it is still wanted, and returns whether it
        is.
        """
        with self.lock:
            if self.future.cancelled():
                return False
            self.process = process
            return True

    def leave(self) -> bool:
        """Marks the call as finished; returns whether the task is still wanted. From here on,
        cancelling the task does not end the process.
        """
        with self.lock:
            self.process = None
            return not self.future.cancelled()

    def succeed(self, value: Any) -> None:
        if self._settle():
            self.future.set_result(value)

    def fail(self, error: BaseException) -> None:
        if self._settle():
            self.future.set_exception(error)

    @property
    def wanted(self) -> bool:
        """Returns whether the task has not been cancelled."""
        return not self.future.cancelled() or self._settle()

    def _settle(self) -> bool:
        """Returns whether the task was not cancelled; from here on it cannot be.

        Waiters of a cancelled task are notified here. Only the first call asks the future, because
        a second one would log a critical error.
        """
        with self.settling:
            if self.settled:
                return False
            self.settled = True
            return self.future.set_running_or_notify_cancel()

    def _on_done(self, future: Future[Any]) -> None:
        if not future.cancelled():
            return
        with self.lock:
            if self.process is not None:
                self.process.terminate()


class _Starts:
    """Tracks whether starting a process is worth trying: after several failures in a row it is not,
    for a while.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed = 0
        self._until = 0.0
        self._warned = False

    def possible(self) -> bool:
        with self._lock:
            return self._failed < STARTS or time.monotonic() >= self._until

    def succeeded(self) -> None:
        with self._lock:
            self._failed = 0

    def failed(self, reason: str) -> None:
        with self._lock:
            self._failed += 1
            pause = PAUSE_SECONDS * 2.0 ** min(10, max(0, self._failed - STARTS))
            self._until = time.monotonic() + min(pause, LONGEST_PAUSE)
            if self._failed < STARTS or self._warned:
                return
            self._warned = True
        warnings.warn(
            f"outblas: compile processes cannot be started ({reason}), so configs are compiled in "
            "the process that measures them",
            RuntimeWarning,
            stacklevel=2,
        )


class _Compiler:
    """One process of the pool, and the thread that gives it its tasks."""

    def __init__(self, pool: Compilers, tasks: queue.SimpleQueue[_Task | None]) -> None:
        self._pool, self._tasks = pool, tasks
        self._process: WorkerProcess | None = None
        self._calls = 0  # of the current process
        self._imported: set[str] = set()  # kernels that the current process has imported
        self._closed = False
        self._lock = threading.Lock()  # protects the process against `terminate`
        self._thread = threading.Thread(target=self._run, name="outblas-compiler", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                self._do(task)
            except BaseException as error:  # an error of this program, which waiters must receive
                self._retire()
                task.fail(error)
        self._retire()

    def terminate(self) -> None:
        """Ends the process, and lets it start no other. May be called from another thread."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.terminate()

    def _do(self, task: _Task) -> None:
        """Runs a task to its end, in another process where the first one ends before it starts the
        task.
        """
        kills = deaths = 0
        while task.wanted:
            process = self._ready()
            if process is None:
                task.succeed(0.0)
                return
            begun = False
            try:
                self._import(process, task)
                begun = task.begin(process)
                if begun:
                    task.succeed(self._call(process, task))
                return
            except (WorkerExited, WorkerTimeout) as gone:
                kills += gone.accepted and _killed(gone)
                deaths += not gone.accepted
                if kills < ATTEMPTS and deaths < STARTS and (not gone.accepted or _killed(gone)):
                    continue
                task.fail(_failure(gone, self._pool.timeout))
                return
            except CompileError as error:
                task.fail(error)
                return
            finally:
                if not task.leave() and begun:
                    self._retire()

    def _import(self, process: WorkerProcess, task: _Task) -> None:
        """Imports the kernel and its DSL, which takes seconds, before a process's first compile of
        it. A task that is cancelled meanwhile leaves the process to the next one. Raises
        WorkerExited or WorkerTimeout, after which the process is gone.
        """
        target = task.arguments[0]
        if target.name in self._imported:
            return
        try:
            with contextlib.suppress(RemoteError):  # the compile reports it
                process.call(START_SECONDS, _import, target)
        except (WorkerExited, WorkerTimeout):
            self._retire()
            raise
        self._imported.add(target.name)

    def _call(self, process: WorkerProcess, task: _Task) -> Any:
        """Returns the result of a call. Raises WorkerExited or WorkerTimeout, after which the
        process is gone, and CompileError.
        """
        try:
            found = process.call(self._pool.timeout, task.function, *task.arguments)
        except RemoteError as error:
            raise CompileError("failed", str(error)[:1000]) from None
        except (WorkerExited, WorkerTimeout):
            self._retire()
            raise
        self._calls += 1
        if self._calls >= TASKS:
            self._retire()
        if isinstance(found, _CompileFailure):
            raise CompileError(found.status, found.reason)
        return found

    def _ready(self) -> WorkerProcess | None:
        """Returns a process that can take a call; None where none can be started."""
        if self._process is not None and self._process.exit is not None:
            self._retire()  # it died while idle
        while self._pool.starts.possible():
            try:
                with self._lock:
                    if self._closed:
                        return None
                    if self._process is not None:
                        return self._process
                    self._process = WorkerProcess(
                        environment={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                        modules=[__name__],
                        memory=self._pool.memory,
                        data_limit=self._pool.memory,
                    )
                self._process.await_ready(START_SECONDS)
                self._pool.starts.succeeded()
                return self._process
            except WorkerStartError as error:
                self._retire()
                if not self._closed:
                    self._pool.starts.failed(str(error))
        return None

    def _retire(self) -> None:
        """Ends the process, if there is one."""
        with self._lock:
            process, self._process = self._process, None
        self._calls = 0
        self._imported.clear()
        if process is not None:
            process.close()


def _killed(gone: WorkerExited | WorkerTimeout) -> bool:
    return isinstance(gone, WorkerExited) and gone.exit.from_outside


def _failure(gone: WorkerExited | WorkerTimeout, timeout: float) -> CompileError:
    """Returns the error of a compile whose process ended this way."""
    if not gone.accepted:
        return CompileError("killed", f"compile processes end before they start to work: {gone}")
    if isinstance(gone, WorkerTimeout):
        return CompileError("compile timeout", f"not compiled in {timeout:g} s")
    if gone.exit.from_outside:
        return CompileError(
            "killed", f"the compile process was killed from outside {ATTEMPTS} times: {gone}"
        )
    if gone.exit.memory is not None:
        return CompileError(
            "compile crash", f"{gone}, more than the memory limit of a compile process"
        )
    code = gone.exit.status if gone.exit.signal is None else -gone.exit.signal
    return CompileError("compile crash", f"the compile process ended with {code}")


# Runs in the process.
@dataclass(frozen=True)
class _CompileFailure:
    """A config that does not compile."""

    status: Status
    reason: str


def _import(target: TuneTarget) -> None:
    target.load()


def _compiled_of(workload: Workload) -> tuple[Workload, ...]:
    """Returns the workloads to compile for a workload. The bare product is included, because a
    config is checked on it bit for bit before its epilogue is checked.
    """
    bare = replace(workload, epilogue="")
    return (workload,) if bare == workload else (workload, bare)


def _compile(
    target: TuneTarget, workload: Workload, config: str, arch: int
) -> float | _CompileFailure:
    start = time.perf_counter()
    try:
        module = target.load()
        for each in _compiled_of(workload):
            module.precompile(prune.described(each), from_text(module.Config, config), arch)
    except OSError:
        return 0.0  # the disk keeps nothing, so the measuring process compiles
    except MemoryError:
        return _CompileFailure(
            "compile crash", "out of memory: the compile process reached its limit"
        )
    except BaseException as error:  # a config may raise anything
        return _CompileFailure("failed", brief(error))
    return time.perf_counter() - start

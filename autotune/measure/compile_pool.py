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

TIMEOUT = 180.0  # seconds of one compile
START_SECONDS = 300.0  # for a process to import what it needs
# Bytes that a process may hold with its children, and that each of them may allocate.
MEMORY = 12 << 30
MEMORY_SHARE = 0.75  # of what this process may use of the machine, where that is less
TASKS = 100  # compiles of one process: what compilers leak goes with it
ATTEMPTS = 2  # at a compile whose process is killed from outside
STARTS = 3  # in a row that fail, before processes count as impossible
PAUSE_SECONDS = 1.0  # until they are tried again; twice as long after each further failure
LONGEST_PAUSE = 60.0
UNBUILT: tuple[Status, ...] = ("compile timeout", "compile crash")
PER_WORKER = 2 << 30  # bytes of the machine's memory that a compile takes, for how many run at once

Failure = Status | Literal["killed"]


class CompileError(Exception):
    """A config does not compile: a status and a reason. "killed": somebody else ended its process,
    twice.
    """

    def __init__(self, status: Failure, reason: str) -> None:
        super().__init__(status, reason)
        self.status: Failure = status
        self.reason = reason


class Compilers:
    """A pool of processes that compile to the caches on disk.

    A config that hangs or crashes costs its own compile. A process that dies is replaced; a compile
    whose process was killed from outside is begun once more. Where no process can be started
    nothing is compiled ahead, which is said in a warning, and tried again after a while.
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
        """The seconds it takes, once it is done; `outcome` tells what went wrong.

        It can be cancelled while it runs.
        """
        return self._schedule(_compile, target, workload, config, arch)

    def await_one(self, target: TuneTarget, seconds: float) -> None:
        """Waits until a process has imported the first kernel asked for and its DSL, so many
        seconds at most.
        """
        with contextlib.suppress(Exception):  # of which every compile will tell
            if self._first is None:
                self._first = self._schedule(_import, target)
            self._first.result(seconds)

    def close(self) -> None:
        """Ends the processes, whatever they are at; compiles that are not done never will be."""
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
    """As many as there are cores but one, and memory for, within the bounds of this process's
    control groups.
    """
    return max(1, min(limits.cores() - 1, limits.memory() // PER_WORKER))


def outcome(future: Future[Any]) -> tuple[Failure, str] | None:
    """What went wrong with a finished compile: a status and a reason, or "killed" and how.

    None if nothing did, and where no compiler could be started: whoever measures compiles then.
    """
    error = future.exception()
    return (error.status, error.reason) if isinstance(error, CompileError) else None


def seconds(future: Future[float]) -> float | None:
    """How long a compile took; None for one that was not done."""
    return None if future.exception() is not None else future.result()


@dataclass(eq=False)
class _Task:
    """A call for a process. Its future counts as pending until it is over, so that it can be
    cancelled as it runs.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    future: Future[Any] = field(default_factory=Future)
    process: WorkerProcess | None = None  # that runs it now
    lock: threading.Lock = field(default_factory=threading.Lock)
    settling: threading.Lock = field(default_factory=threading.Lock)
    settled: bool = False

    def __post_init__(self) -> None:
        self.future.add_done_callback(self._on_done)

    def cancel(self) -> None:
        """Whoever waits hears of it."""
        if self.future.cancel():
            self._settle()

    def begin(self, process: WorkerProcess) -> bool:
        """Whether it is still wanted."""
        with self.lock:
            self.process = process
            return not self.future.cancelled()

    def leave(self) -> bool:
        """After a call: whether it is still wanted; from here on nobody ends the process for its
        sake.
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
        """Whether nobody has cancelled it."""
        return not self.future.cancelled() or self._settle()

    def _settle(self) -> bool:
        """Whether it was not cancelled; from here on nobody can cancel it.

        Whoever waits for one that was cancelled hears of it here. Only the first call asks the
        future: a second one would log a critical error.
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
    """Whether starting a process is worth while: after several in a row that failed it is not, for
    a while.
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
        self._calls = 0  # of this process
        self._closed = False
        self._lock = threading.Lock()  # of the process, for `terminate`
        self._thread = threading.Thread(target=self._run, name="outblas-compiler", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                self._do(task)
            except BaseException as error:  # of this program: whoever waits must hear of it
                self._retire()
                task.fail(error)
        self._retire()

    def terminate(self) -> None:
        """Ends its process, and lets it start no other, from another thread."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.terminate()

    def _do(self, task: _Task) -> None:
        """Runs a task to its end, in another process where the first one does not come to it."""
        kills = deaths = 0
        while task.wanted:
            process = self._ready()
            if process is None:
                task.succeed(0.0)
                return
            try:
                if task.begin(process):
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
                if not task.leave():
                    self._retire()

    def _call(self, process: WorkerProcess, task: _Task) -> Any:
        """What the call returns. Raises WorkerExited and WorkerTimeout, after which there is no
        process, and CompileError.
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
        """A process that can take a call; None where none can be started."""
        if self._process is not None and self._process.exit is not None:
            self._retire()  # it died when nothing was asked of it
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
        if process is not None:
            process.close()


def _killed(gone: WorkerExited | WorkerTimeout) -> bool:
    return isinstance(gone, WorkerExited) and gone.exit.from_outside


def _failure(gone: WorkerExited | WorkerTimeout, timeout: float) -> CompileError:
    """What became of a compile whose process went so."""
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


# In the process.
@dataclass(frozen=True)
class _CompileFailure:
    """A config does not compile."""

    status: Status
    reason: str


def _import(target: TuneTarget) -> None:
    target.load()


def _compiled_of(workload: Workload) -> tuple[Workload, ...]:
    """What is compiled for a workload: the product alone too, by which a config is checked bit for
    bit before its epilogue is.
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
            module.precompile(prune.problem(each), from_text(module.Config, config), arch)
    except OSError:
        return 0.0  # nothing can be kept on disk: whoever measures compiles
    except MemoryError:
        return _CompileFailure(
            "compile crash", "out of memory: the compile process reached its limit"
        )
    except BaseException as error:  # a config may raise anything
        return _CompileFailure("failed", brief(error))
    return time.perf_counter() - start

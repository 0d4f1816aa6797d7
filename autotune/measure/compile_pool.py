"""Compiles configs ahead of their measurement, in processes that see no GPU, and chooses which is
measured next: one whose compile has finished, while others compile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from outblas.autotune.search import prune
from outblas.autotune.search.candidates import Candidate
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import Status, Workload
from outblas.base import limits
from outblas.base.configs import from_text
from outblas.base.processes import START_SECONDS, RemoteError, WorkerDied, WorkerProcess
from outblas.base.serve import brief
from outblas.call import fallback

TIMEOUT = 180.0  # seconds per compile
MEMORY = 12 << 30  # bytes that a process may allocate
MEMORY_SHARE = 0.75  # of the memory that this process may use, where that is less
CALLS = 100  # compiles per process; what compilers leak is freed with the process
STARTS = 3  # failed starts of processes after which nothing is compiled ahead
UNBUILT: tuple[Status, ...] = ("compile timeout", "compile crash")


@dataclass(frozen=True)
class Compiled:
    """How a compile ended. "killed": something else ended its process. "ok" without
    `seconds`: no process could be started, so the measuring process compiles.
    """

    status: Status | Literal["killed"] = "ok"
    reason: str = ""
    seconds: float | None = None


class Compilers:
    """A pool of threads with a process each, which compiles into the caches on disk.

    A config that hangs or crashes affects only its own compile. A process that dies is replaced.
    Where no process can be started, nothing is compiled ahead, and a warning says so.
    """

    def __init__(
        self, workers: int | None = None, *, timeout: float = TIMEOUT, memory: int | None = None
    ) -> None:
        self.workers = workers or limits.default_workers()
        self.timeout = timeout
        self.memory = memory or min(MEMORY, int(MEMORY_SHARE * limits.memory()))
        self._threads = ThreadPoolExecutor(self.workers, "outblas-compiler")
        self._own = threading.local()  # the process of a thread, and the calls that it has had
        self._processes: set[WorkerProcess] = set()  # of all threads
        self._closed = False
        self._failed_starts = 0
        self._lock = threading.Lock()  # protects the three above

    def submit(
        self, target: TuneTarget, workload: Workload, config: str, arch: int
    ) -> Future[Compiled]:
        """Starts a compile. A future that is cancelled before its turn compiles nothing."""
        return self._threads.submit(self._compile, target, workload, config, arch)

    def await_one(self, target: TuneTarget, seconds: float) -> None:
        """Waits, for at most `seconds`, until a process has imported the kernel and its DSL."""
        with contextlib.suppress(TimeoutError, WorkerDied):  # every compile will report the latter
            self._threads.submit(self._loaded, target).result(seconds)

    def close(self) -> None:
        """Ends the processes, whatever they are doing; unfinished compiles stay unfinished."""
        with self._lock:
            self._closed = True
            processes = list(self._processes)
        for process in processes:
            process.terminate()
        self._threads.shutdown()  # what waits for its turn compiles nothing now
        for process in processes:
            process.close()

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What follows runs in the threads of the pool.
    def _compile(self, target: TuneTarget, workload: Workload, config: str, arch: int) -> Compiled:
        """Runs a compile in this thread's process, or in one that takes the call."""
        reason = ""
        for _ in range(STARTS):
            try:
                process = self._loaded(target)
                if process is None:
                    return Compiled()
                return process.call(self.timeout, _compile, target, workload, config, arch)
            except RemoteError as error:
                return Compiled("failed", str(error)[:1000])
            except WorkerDied as death:
                reason = str(death)
                if death.status == "hang":
                    return Compiled("compile timeout", f"not compiled in {self.timeout:g} s")
                if death.status == "crash":
                    return Compiled("compile crash", reason)
                if self._closed or death.status == "killed":
                    break
        return Compiled("killed", f"its compile process ended: {reason}")

    def _loaded(self, target: TuneTarget) -> WorkerProcess | None:
        """Returns a process that has imported a kernel and its DSL, which takes seconds. Raises
        WorkerDied.
        """
        process = self._process()
        if process is not None and target not in self._own.loaded:
            with contextlib.suppress(RemoteError):  # the compile reports it
                process.call(START_SECONDS, _load, target)
            self._own.loaded.add(target)
        return process

    def _process(self) -> WorkerProcess | None:
        """Returns this thread's process, ready for a call; None where none can be started."""
        process: WorkerProcess | None = getattr(self._own, "process", None)
        if process is not None:
            self._own.calls += 1
            if process.alive and self._own.calls < CALLS:
                return process
            with self._lock:
                self._processes.discard(process)
            process.close()
            self._own.process = None
        while not self._closed and self._failed_starts < STARTS:
            try:
                return self._started()
            except WorkerDied as death:
                with self._lock:
                    self._failed_starts += not self._closed
                    impossible = self._failed_starts == STARTS
                if impossible:
                    fallback.warn_once(
                        f"compile processes cannot be started ({death}), so configs are compiled "
                        "in the process that measures them"
                    )
        return None

    def _started(self) -> WorkerProcess:
        with self._lock:
            if self._closed:
                raise WorkerDied("idle", "the pool is closed")
            process = WorkerProcess(
                [__name__],
                environment={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                memory=self.memory,
            )
            self._processes.add(process)
        self._own.process, self._own.calls, self._own.loaded = process, 0, set()
        process.await_ready()
        return process


# Runs in the process.
def _load(target: TuneTarget) -> None:
    target.load()


def _compile(target: TuneTarget, workload: Workload, config: str, arch: int) -> Compiled:
    """Compiles a config for a workload, and for the bare product, on which a config is checked bit
    for bit before its epilogue is checked.
    """
    start = time.perf_counter()
    try:
        module = target.load()
        for compiled in dict.fromkeys((workload, replace(workload, epilogue=""))):
            module.precompile(prune.described(compiled), from_text(module.Config, config), arch)
    except OSError:
        return Compiled()  # the disk keeps nothing, so the measuring process compiles
    except MemoryError:
        return Compiled("compile crash", "out of memory: the compile process reached its limit")
    except BaseException as error:  # a config may raise anything
        return Compiled("failed", brief(error))
    return Compiled(seconds=time.perf_counter() - start)


Built = Future[Compiled]
AHEAD = 3  # finished compiles per process that may wait for their measurement


class Pool(Protocol):
    """What compiles ahead: `Compilers`, here or on a node of a cluster."""

    @property
    def workers(self) -> int: ...
    def submit(
        self, target: TuneTarget, workload: Workload, config: str, arch: int
    ) -> Future[Compiled]: ...
    def await_one(self, target: TuneTarget, seconds: float) -> None: ...
    def close(self) -> None: ...


class Ahead:
    """Candidates in the order in which their compiles finish; only a limited number is compiled
    ahead of measurement.

    Configs that share a compile are yielded together. Without compilers nothing is compiled ahead.
    After `until`, on the clock of `time.monotonic`, no more are yielded, except the first if it is
    compiled by then.
    """

    def __init__(
        self,
        candidates: Iterable[Candidate],
        compilers: Pool | None,
        workload: Workload,
        arch: int,
        until: float | None = None,
    ) -> None:
        groups: dict[tuple[str, str], list[Candidate]] = {}
        for candidate in candidates:
            groups.setdefault((candidate.target.name, candidate.compile_key), []).append(candidate)
        self._waiting = deque(groups.values())
        self._running: dict[Built, list[Candidate]] = {}
        self._ready: deque[tuple[Candidate, Built | None]] = deque()
        self._compilers, self._workload, self._arch, self._until = compilers, workload, arch, until

    @property
    def compiling(self) -> int:
        """The number of configs whose compile has not finished, including those that have not
        started.
        """
        return sum(map(len, self._waiting)) + sum(map(len, self._running.values()))

    @property
    def ready(self) -> int:
        return len(self._ready)

    def _drop(self) -> None:
        for future in self._running:
            future.cancel()
        self._waiting.clear()
        self._running.clear()
        self._ready.clear()

    def __iter__(self) -> Iterator[tuple[Candidate, Built | None]]:
        begun = False
        while True:
            self._feed()
            while self._running and not self._ready:
                left = None if self._until is None else max(0.0, self._until - time.monotonic())
                wait(self._running, timeout=left, return_when=FIRST_COMPLETED)
                self._collect()
                if self._late():
                    break
            if self._late() and (begun or not self._ready):
                self._drop()
            if not self._ready:
                return
            begun = True
            yield self._ready.popleft()

    def _late(self) -> bool:
        return self._until is not None and time.monotonic() > self._until

    def _feed(self) -> None:
        if self._compilers is None:
            while self._waiting:
                self._ready += [(candidate, None) for candidate in self._waiting.popleft()]
            return
        self._collect()
        room = AHEAD * self._compilers.workers - len(self._running) - len(self._ready)
        while self._waiting and room > 0:
            group = self._waiting.popleft()
            first = group[0]
            future = self._compilers.submit(first.target, self._workload, first.text, self._arch)
            self._running[future] = group
            room -= 1

    def _collect(self) -> None:
        for future in [future for future in self._running if future.done()]:
            self._ready += [(candidate, future) for candidate in self._running.pop(future)]

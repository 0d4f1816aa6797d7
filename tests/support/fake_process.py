"""Worker processes that are played, for tests of what measures and compiles in them."""

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outblas.autotune.measure import compile_pool, worker
from outblas.autotune.measure.processes import (
    Exit,
    RemoteError,
    WorkerExited,
    WorkerStartError,
    WorkerTimeout,
)
from outblas.autotune.measure.worker import Screened
from support.sweeps import H100

Ending = WorkerExited | WorkerTimeout

# How a process may end before it has taken up a call,
BEFORE: dict[str, Ending] = {
    "killed": WorkerExited(Exit(signal=signal.SIGKILL), accepted=False),
    "stuck": WorkerTimeout(accepted=False),
}
# and while it is at a call.
DURING: dict[str, Ending] = {
    "late": WorkerTimeout(accepted=True),
    "SIGSEGV": WorkerExited(Exit(signal=signal.SIGSEGV), accepted=True),
    "SIGABRT": WorkerExited(Exit(signal=signal.SIGABRT), accepted=True),
    "status 3": WorkerExited(Exit(status=3), accepted=True),
    "connection closed": WorkerExited(Exit(detail="it closed its connection"), accepted=True),
    "out of memory": WorkerExited(Exit(memory=1 << 30), accepted=True),
    "SIGKILL": WorkerExited(Exit(signal=signal.SIGKILL), accepted=True),
    "SIGTERM": WorkerExited(Exit(signal=signal.SIGTERM), accepted=True),
    "SIGINT": WorkerExited(Exit(signal=signal.SIGINT), accepted=True),
    "SIGHUP": WorkerExited(Exit(signal=signal.SIGHUP), accepted=True),
}
COMPILE_SECONDS = 1.5


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass
class FakeProcesses:
    """Stands for the class `WorkerProcess`: starts processes that answer as a test says.

    `unready`: so many of the next ones cannot be started. `endings`: how the next calls end without
    an answer, or None for each that is answered; the import of a kernel always is. While they are
    `stuck`, a call ends only when its process is terminated.
    """

    unready: int = 0
    endings: list[Ending | None] = field(default_factory=list)
    stuck: bool = False
    importing: threading.Event = field(default_factory=_set)  # imports wait while it is not set
    started: int = 0
    calls: list[Callable[..., Any]] = field(default_factory=list)  # that any of them was given

    def __call__(self, **_: object) -> "FakeProcess":
        self.started += 1
        return FakeProcess(self)


class FakeProcess:
    """One of them."""

    exit = None

    def __init__(self, processes: FakeProcesses) -> None:
        self._processes = processes
        self._has_operands = False
        self._ended = threading.Event()

    def await_ready(self, seconds: float) -> None:
        if self._processes.unready:
            self._processes.unready -= 1
            raise WorkerStartError("no luck")

    def call(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
        processes = self._processes
        if function is compile_pool._import:
            processes.importing.wait()
            if self._ended.is_set():
                raise BEFORE["killed"]
            return None
        processes.calls.append(function)
        if self._ended.is_set():
            raise BEFORE["killed"]
        if function is worker.load:
            return None
        if processes.stuck:
            self._ended.wait()
            raise DURING["SIGKILL"]
        ending = processes.endings.pop(0) if processes.endings else None
        if ending is not None:
            raise ending
        return self._answer(function)

    def _answer(self, function: Callable[..., Any]) -> Any:
        if function.__module__ == compile_pool.__name__:
            return COMPILE_SECONDS
        if function is worker.describe:
            return H100
        if function is worker.open_bench:
            self._has_operands = True
            return 100.0
        if not self._has_operands:
            raise RemoteError(f"{worker.NotOpen.__module__}.NotOpen", "")
        return Screened("ok")

    def terminate(self) -> None:
        self._ended.set()

    kill = close = terminate

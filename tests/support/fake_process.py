"""Worker processes that are played, for tests of what measures and compiles in them."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from outblas.autotune.measure import compile_pool, isolated, worker
from outblas.autotune.measure.compile_pool import Compiled
from outblas.autotune.measure.worker import Screened
from outblas.base.processes import RemoteError, WorkerDied
from support.sweeps import H100

COMPILE_SECONDS = 1.5


@dataclass
class FakeProcesses:
    """Stands for the class `WorkerProcess`: starts processes that answer as a test says.

    `unready`: so many of the next ones cannot be started. `endings`: with which status the next
    calls end without an answer ("raises": with an error), or None for each that is answered; the
    import of a kernel always is, unless it is `unloadable`. While they are `stuck`, a call ends
    only when its process is terminated. `limits` has the seconds of the last call of each function.
    """

    unready: int = 0
    endings: list[str | None] = field(default_factory=list)
    stuck: bool = False
    unloadable: bool = False
    limits: dict[Callable[..., Any], float] = field(default_factory=dict)
    started: int = 0
    calls: list[Callable[..., Any]] = field(default_factory=list)  # that any of them was given

    def __call__(self, *_: object, **__: object) -> "FakeProcess":
        if self.unready:
            self.unready -= 1
            raise WorkerDied("idle", "no luck")
        self.started += 1
        return FakeProcess(self)


class FakeProcess:
    """One of them."""

    def __init__(self, processes: FakeProcesses) -> None:
        self._processes = processes
        self._has_operands = False
        self._ended = threading.Event()

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    def await_ready(self) -> None:
        pass

    def call(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
        processes = self._processes
        if self._ended.is_set():
            raise WorkerDied("idle", "it has ended")
        processes.limits[function] = seconds
        if function in (worker.load, compile_pool._load):
            if processes.unloadable:
                self._ended.set()
                raise WorkerDied("crash", "a bad day")
            return None
        processes.calls.append(function)
        if processes.stuck:
            self._ended.wait()
            raise WorkerDied("killed", "it was terminated")
        status = processes.endings.pop(0) if processes.endings else None
        if status == "raises":
            raise RemoteError("builtins.ValueError", "no luck")
        if status is not None:
            self._ended.set()
            raise WorkerDied(status, "a bad day")
        return self._answer(function)

    def _answer(self, function: Callable[..., Any]) -> Any:
        if function.__module__ == compile_pool.__name__:
            return Compiled(seconds=COMPILE_SECONDS)
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


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> FakeProcesses:
    """What starts processes meanwhile: none is a real one."""
    processes = FakeProcesses()
    for module in (isolated, compile_pool):
        monkeypatch.setattr(module, "WorkerProcess", processes)
    return processes

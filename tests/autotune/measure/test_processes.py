"""Worker processes as their driver sees them: what functions do there, how workers start and end,
and deadlines.
"""

import itertools
import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import chores
from support.sweeps import gone, soon
from support.worker_processes import SECONDS, started

from outblas.autotune.measure import processes
from outblas.autotune.measure.processes import (
    Deadline,
    RemoteError,
    WorkerExited,
    WorkerProcess,
    WorkerStartError,
    WorkerTimeout,
)

pytest_plugins = ("support.worker_fixtures",)

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes"),
]

# ---- waits of the driver
real_poll = select.poll


class WatchedPoll:
    """Stands for what `select.poll` returns: something is done before and after each wait."""

    def __init__(self, before_wait: Callable[[], None], after_wait: Callable[[], None]) -> None:
        self._real = real_poll()
        self._before_wait, self._after_wait = before_wait, after_wait

    def register(self, file: Any, events: int) -> None:
        self._real.register(file, events)

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        self._before_wait()
        ready = self._real.poll(milliseconds)
        self._after_wait()
        return ready


def nothing() -> None:
    """What is done where nothing is to be done."""


INTERRUPTED_WAITS = {"before it is sent": 0, "before it is accepted": 1, "at once": 2, "later": 3}


@pytest.mark.parametrize("wait", INTERRUPTED_WAITS.values(), ids=INTERRUPTED_WAITS)
def test_an_interrupt_of_the_driver_ends_the_worker(
    worker: WorkerProcess, wait: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its late answer would be on the line when the next call is made."""
    process = worker.call(SECONDS, os.getpid)
    waits = itertools.count()

    def interrupt() -> None:
        if next(waits) == wait:
            raise KeyboardInterrupt

    monkeypatch.setattr(processes, "STEP_SECONDS", 0.1)
    monkeypatch.setattr(select, "poll", lambda: WatchedPoll(interrupt, nothing))
    with pytest.raises(KeyboardInterrupt):
        worker.call(SECONDS, time.sleep, 1000)
    monkeypatch.undo()

    assert gone(process)
    with pytest.raises(WorkerExited):
        worker.call(SECONDS, os.getpid)


def test_a_driver_that_was_stopped_takes_the_answer_that_came_meanwhile(
    lasting_worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is over when it looks again, and the answer is there."""
    monkeypatch.setattr(select, "poll", lambda: WatchedPoll(nothing, lambda: time.sleep(0.4)))

    assert lasting_worker.call(0.3, chores.returns, 7) == 7


# ---- what functions do
RAISED = ["str", "spite", "surrogate", "name", "interrupt", "exit", "generator"]


@pytest.mark.parametrize("name", RAISED)
def test_whatever_a_function_raises_is_told_in_plain_text(
    lasting_worker: WorkerProcess, name: str
) -> None:
    with pytest.raises(RemoteError) as told:
        lasting_worker.call(SECONDS, chores.raises, name)

    assert type(told.value.name) is type(told.value.text) is str
    told.value.text.encode()


@pytest.mark.parametrize("name", RAISED)
def test_whatever_a_function_raises_its_worker_goes_on(
    lasting_worker: WorkerProcess, name: str
) -> None:
    process = lasting_worker.call(SECONDS, os.getpid)

    with pytest.raises(RemoteError):
        lasting_worker.call(SECONDS, chores.raises, name)

    assert lasting_worker.call(SECONDS, os.getpid) == process


def test_a_result_that_cannot_be_sent_is_an_error(lasting_worker: WorkerProcess) -> None:
    with pytest.raises(RemoteError, match="stays here"):
        lasting_worker.call(SECONDS, chores.returns_spite)


def test_a_call_that_cannot_be_sent_is_an_error_here(lasting_worker: WorkerProcess) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError)):  # by the version of Python
        lasting_worker.call(SECONDS, lambda: None)


def test_a_large_result_comes_whole(lasting_worker: WorkerProcess) -> None:
    large = b"x" * (8 << 20)

    assert lasting_worker.call(SECONDS, chores.returns, large) == large


@pytest.mark.parametrize(
    ("how", "told", "from_outside"),
    [
        (signal.SIGKILL, "signal SIGKILL", True),
        (signal.SIGTERM, "signal SIGTERM", True),
        (signal.SIGINT, "signal SIGINT", True),
        (signal.SIGHUP, "signal SIGHUP", True),
        (signal.SIGSEGV, "signal SIGSEGV", False),
        (signal.SIGABRT, "signal SIGABRT", False),
        (signal.SIGBUS, "signal SIGBUS", False),
        (0, "exit status 0", False),
        (3, "exit status 3", False),
    ],
)
def test_how_a_worker_ended_is_told(
    worker: WorkerProcess, how: signal.Signals | int, told: str, from_outside: bool
) -> None:
    with pytest.raises(WorkerExited) as died:
        worker.call(SECONDS, chores.end, how)

    assert str(died.value) == told
    assert died.value.exit.from_outside is from_outside
    assert died.value.accepted


def test_a_worker_that_dies_when_nothing_is_asked_begins_no_call(worker: WorkerProcess) -> None:
    worker.call(SECONDS, chores.end_soon, 0.1)
    assert soon(lambda: worker.exit is not None)

    with pytest.raises(WorkerExited) as died:
        worker.call(SECONDS, os.getpid)

    assert not died.value.accepted


def test_a_worker_that_is_stuck_when_nothing_is_asked_begins_no_call_and_is_ended(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not read a long call, of which the sending must not wait for it either."""
    monkeypatch.setattr(processes, "ACCEPT_SECONDS", 0.5)
    process = worker.call(SECONDS, os.getpid)
    os.kill(process, signal.SIGSTOP)

    with pytest.raises(WorkerTimeout) as late:
        worker.call(SECONDS, chores.returns, b"x" * (8 << 20))

    assert not late.value.accepted
    assert gone(process)


# ---- what a worker is given
@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """What a worker says of itself whose driver ignores Ctrl-C and blocks other signals."""
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
    try:
        with started(environment={"MARKER": "x"}) as worker:
            return worker.call(SECONDS, chores.facts)
    finally:
        signal.signal(signal.SIGINT, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def test_a_worker_is_in_a_session_of_its_own(facts: dict[str, Any]) -> None:
    """Ctrl-C does not reach it."""
    assert facts["session"] == facts["process"]


def test_a_worker_has_none_of_its_drivers_ways_with_signals(facts: dict[str, Any]) -> None:
    assert facts["interrupt"], "SIGINT does not end it"
    assert facts["blocked"] == set()


def test_a_worker_is_a_fresh_process_that_reads_nothing(facts: dict[str, Any]) -> None:
    assert (facts["main"], facts["input"]) == ("serve.py", "/dev/null")


def test_a_worker_has_its_own_environment(facts: dict[str, Any]) -> None:
    assert facts["marker"] == "x"


def test_a_worker_looks_for_modules_where_its_driver_does(facts: dict[str, Any]) -> None:
    assert facts["path"] == [folder or str(Path.cwd()) for folder in sys.path]


def test_the_drivers_main_module_stays_where_it_is() -> None:
    """Other threads pickle what is defined there, while workers start."""
    main, seen, done = sys.modules["__main__"], [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(sys.modules["__main__"] is main)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started().close()
    done.set()
    watcher.join()

    assert all(seen)


def test_a_worker_outlives_the_thread_that_started_it() -> None:
    with ThreadPoolExecutor(1) as thread:
        worker = thread.submit(started).result()

    with worker:
        time.sleep(0.3)
        assert worker.call(SECONDS, os.getpid) > 0


# ---- starts
def test_a_worker_whose_modules_are_not_there_cannot_start() -> None:
    with pytest.raises(WorkerStartError, match="exit status 1"):
        started(modules=["no_such_module"])


def test_a_worker_that_may_have_no_memory_cannot_start() -> None:
    with pytest.raises(WorkerStartError):
        started(data_limit=1 << 20)


def test_a_worker_that_is_not_ready_in_time_cannot_start(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(100)")

    with pytest.raises(WorkerStartError, match=r"not ready in 0\.3 s"):
        WorkerProcess(modules=["this"], program=str(script)).await_ready(0.3)


def test_a_worker_without_an_interpreter_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes.spawn, "get_executable", lambda: str(tmp_path / "python"))

    with pytest.raises(WorkerStartError, match="No such file"):
        started()


# ---- ends by another thread
def kill_from_threads(worker: WorkerProcess) -> None:
    """Ends a worker from two threads at once."""
    with ThreadPoolExecutor(2) as threads:
        for killed in [threads.submit(worker.kill) for _ in range(2)]:
            killed.result(SECONDS)


def test_a_worker_that_other_threads_end_at_its_start_is_not_ready() -> None:
    with WorkerProcess(modules=["json"]) as worker:
        kill_from_threads(worker)

        with pytest.raises(WorkerStartError):
            worker.await_ready(SECONDS)


def test_a_worker_that_other_threads_end_in_a_call_does_not_answer(worker: WorkerProcess) -> None:
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(worker.call, SECONDS, time.sleep, 1000)
        time.sleep(0.1)
        kill_from_threads(worker)

        with pytest.raises(WorkerExited):
            waiting.result(SECONDS)


def test_a_worker_that_other_threads_have_ended_takes_no_calls(worker: WorkerProcess) -> None:
    kill_from_threads(worker)

    with pytest.raises(WorkerExited):
        worker.call(SECONDS, os.getpid)


# ---- deadlines
@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that this process's own clock says, which a test changes."""
    clock = [100.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock[0])
    return clock


def test_a_deadline_comes_nearer_with_time(clock: list[float]) -> None:
    deadline = Deadline(20.0)

    clock[0] += 3

    assert deadline.left == 17


def test_a_deadline_is_hardly_moved_by_what_this_process_does_not_see(clock: list[float]) -> None:
    deadline = Deadline(20.0)

    clock[0] += 3600  # stopped for an hour

    assert deadline.left == 15


def test_a_deadline_is_over_at_some_time(clock: list[float]) -> None:
    deadline = Deadline(20.0)
    left = []

    for _ in range(6):
        clock[0] += 4
        left.append(deadline.left)

    assert left == [16, 12, 8, 4, 0, 0]

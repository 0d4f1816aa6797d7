"""Worker processes as their driver sees them: what functions do there, and that nothing is left of
a worker or of its descendants, whoever ends.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support import chores
from support.stored import BARE
from support.sweeps import gone, soon

from outblas.base import processes
from outblas.base.processes import RemoteError, WorkerDied, WorkerProcess

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

SECONDS = 20.0  # for what takes milliseconds


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    """A worker of the test's own, which it may end."""
    with WorkerProcess() as worker:
        yield worker


@pytest.fixture(scope="module")
def lasting_worker() -> Iterator[WorkerProcess]:
    """A worker that outlives each test of a module."""
    with WorkerProcess(environment={"MARKER": "here"}) as worker:
        yield worker


def test_a_worker_is_a_fresh_process(lasting_worker: WorkerProcess) -> None:
    facts = lasting_worker.call(SECONDS, chores.facts)

    assert facts["process"] == facts["session"] != os.getpid()
    assert facts["interrupt"], "SIGINT raises an exception there"
    assert facts["blocked"] == set()
    assert facts["main"] == "serve.py", "it has imported the caller's script"
    assert facts["input"] == "/dev/null"
    assert facts["path"] == [folder or os.getcwd() for folder in sys.path]
    assert facts["marker"] == "here"


def test_a_function_that_is_called_by_name_takes_and_returns_json(
    lasting_worker: WorkerProcess,
) -> None:
    assert lasting_worker.call_by_name(SECONDS, "math:fsum", [0.5, 0.25]) == 0.75
    with pytest.raises(RemoteError, match="AttributeError"):
        lasting_worker.call_by_name(SECONDS, "math:no_such_function")
    with pytest.raises(RemoteError, match="not JSON serializable"):
        lasting_worker.call_by_name(SECONDS, "pathlib:Path", "/")
    assert lasting_worker.call_by_name(SECONDS, "math:floor", 1.5) == 1


@pytest.mark.parametrize("name", ["str", "spite", "surrogate", "name", "interrupt", "exit"])
def test_whatever_a_function_raises_its_worker_goes_on(
    lasting_worker: WorkerProcess, name: str
) -> None:
    process = lasting_worker.call(SECONDS, os.getpid)

    with pytest.raises(RemoteError) as told:
        lasting_worker.call(SECONDS, chores.raises, name)

    assert type(told.value.name) is type(told.value.text) is str
    told.value.text.encode()
    assert lasting_worker.call(SECONDS, os.getpid) == process


def test_what_cannot_be_sent_is_an_error(lasting_worker: WorkerProcess) -> None:
    with pytest.raises(RemoteError, match="stays here"):
        lasting_worker.call(SECONDS, chores.returns_spite)
    with pytest.raises((AttributeError, pickle.PicklingError)):  # by the version of Python
        lasting_worker.call(SECONDS, lambda: None)
    large = b"x" * (8 << 20)
    assert lasting_worker.call(SECONDS, chores.returns, large) == large


@pytest.mark.parametrize(
    ("function", "argument", "status", "reason"),
    [
        (chores.end, signal.SIGKILL, "killed", "signal SIGKILL"),
        (chores.end, signal.SIGTERM, "killed", "signal SIGTERM"),
        (chores.end, signal.SIGINT, "killed", "signal SIGINT"),
        (chores.end, signal.SIGSEGV, "crash", "signal SIGSEGV"),
        (chores.end, 3, "crash", "exit status 3"),
        (time.sleep, 1000, "hang", "not done in 1 s"),
        (chores.hold_gil, 1000, "hang", "not done in 1 s"),
        (os.closerange, (3, 100), "crash", "exit status 0"),
    ],
)
def test_how_a_worker_ends_in_a_call(
    worker: WorkerProcess,
    function: Any,
    argument: Any,
    status: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "END_SECONDS", 1.0)
    family = worker.call(SECONDS, chores.family)
    arguments = argument if isinstance(argument, tuple) else (argument,)

    with pytest.raises(WorkerDied, match=reason) as death:
        worker.call(1.0, function, *arguments)

    assert death.value.status == status
    assert soon(lambda: all(map(gone, family)))
    assert not worker.alive


def test_a_worker_that_ends_while_it_is_idle_is_not_the_next_calls_fault(
    worker: WorkerProcess,
) -> None:
    worker.call(SECONDS, chores.end_soon, 0.1)
    assert soon(lambda: not worker.alive)

    with pytest.raises(WorkerDied) as death:
        worker.call(SECONDS, os.getpid)

    assert death.value.status == "idle"


def test_a_worker_that_cannot_start_says_why() -> None:
    with (
        WorkerProcess(["no.such.module"]) as worker,
        pytest.raises(WorkerDied, match="exit status 1") as death,
    ):
        worker.await_ready(SECONDS)

    assert death.value.status == "idle"


def test_a_process_may_allocate_so_many_bytes() -> None:
    with WorkerProcess(memory=1 << 30) as worker, pytest.raises(RemoteError, match="MemoryError"):
        worker.call(SECONDS, chores.eat, 2048)


def test_a_driver_that_was_stopped_takes_the_answer_that_came_meanwhile(
    lasting_worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is over when it looks again, and the answer is there."""
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600 * clock())

    assert lasting_worker.call(5, chores.returns, 7) == 7


def test_an_interrupt_of_the_driver_ends_the_worker(worker: WorkerProcess) -> None:
    """Else its late answer would be taken for that of the next call."""
    process = worker.call(SECONDS, os.getpid)
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        worker.call(SECONDS, time.sleep, 1000)

    assert gone(process)


# Imports outblas without torch.
DRIVER = f"""{BARE}
sys.path[:] = {sys.path!r}
from outblas.base.processes import WorkerProcess
from support import chores
worker = WorkerProcess()
print(worker._supervisor.pid, *worker.call(20, chores.family), flush=True)
worker.call(1000, chores.hold_gil, 1000)
"""


@pytest.mark.parametrize("killed", ["driver", "supervisor"])
def test_nothing_outlives_a_killed_driver_or_supervisor(killed: str) -> None:
    """The worker holds Python's lock, and its children ignore signals."""
    command = [sys.executable, "-c", DRIVER]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert driver.stdout is not None
    supervisor, worker, *children = map(int, driver.stdout.readline().split())
    assert len(children) == 3

    os.kill(driver.pid if killed == "driver" else supervisor, signal.SIGKILL)

    expected = [supervisor, worker, *children] if killed == "driver" else [supervisor, worker]
    assert soon(lambda: all(map(gone, expected)))
    driver.kill()
    driver.wait()
    for child in children:
        if not gone(child):
            os.kill(child, signal.SIGKILL)

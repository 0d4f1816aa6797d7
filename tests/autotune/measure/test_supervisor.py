"""What watches a worker process: nothing of the worker is left when it ends, dies, holds too much
memory or loses its driver.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support import chores
from support.paths import TESTS
from support.sweeps import gone, soon
from support.worker_processes import SECONDS, started

from outblas.autotune.measure import processes, supervisor
from outblas.autotune.measure.processes import WorkerExited, WorkerProcess

pytest_plugins = ("support.worker_fixtures",)

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes"),
]
MIB = 1 << 20


def end_left(family: Sequence[int], seconds: float = 5.0) -> list[int]:
    """The processes that there still are after some seconds, which it ends."""
    soon(lambda: all(map(gone, family)), seconds)
    left = [process for process in family if not gone(process)]
    for process in left:
        os.kill(process, signal.SIGKILL)
    return left


# ---- memory
def test_a_worker_that_eats_memory_is_ended_for_that() -> None:
    with started(memory=200 * MIB) as worker, pytest.raises(WorkerExited) as died:
        worker.call(SECONDS, chores.eat, 400)

    assert died.match(r"out of memory: it held 0\.\d GiB")
    assert not died.value.exit.from_outside


def test_what_a_worker_starts_counts_as_its_memory() -> None:
    code = f"import time; x = b'x' * {400 * MIB}; time.sleep(1000)"
    command = [sys.executable, "-S", "-c", code]

    with started(memory=200 * MIB) as worker, pytest.raises(WorkerExited, match="out of memory"):
        worker.call(SECONDS, subprocess.run, command)


# ---- ends of the worker
def test_nothing_of_a_worker_is_left_when_it_ends(worker: WorkerProcess) -> None:
    family = worker.call(SECONDS, chores.family)

    worker.close()

    assert all(map(gone, family))


def test_nothing_of_a_worker_is_left_when_it_dies(worker: WorkerProcess) -> None:
    family = worker.call(SECONDS, chores.family)

    os.kill(family[0], signal.SIGKILL)

    assert end_left(family) == []


# ---- ends of those that watch it
def supervising(worker: WorkerProcess) -> dict[str, int]:
    """The two processes that watch a worker."""
    supervisor = worker.call(SECONDS, os.getppid)
    return {"guard": chores.parent(supervisor), "supervisor": supervisor}


def kill_while_it_works(worker: WorkerProcess, killed: Sequence[int]) -> WorkerExited:
    """How the call of a worker ends of which these watching processes are killed."""

    def kill() -> None:
        for process in killed:
            os.kill(process, signal.SIGKILL)

    timer = threading.Timer(0.2, kill)
    timer.start()
    with pytest.raises(WorkerExited) as died:
        worker.call(SECONDS, time.sleep, 1000)
    timer.join()
    return died.value


@pytest.mark.parametrize("which", ["guard", "supervisor"])
def test_nothing_is_left_where_a_supervising_process_is_killed(
    worker: WorkerProcess, which: str
) -> None:
    family = worker.call(SECONDS, chores.family)

    kill_while_it_works(worker, [supervising(worker)[which]])

    assert end_left(family) == []


def test_a_worker_goes_where_both_supervising_processes_are_killed(worker: WorkerProcess) -> None:
    """Of what it has started nothing is sure then."""
    itself, *children = worker.call(SECONDS, chores.family)

    kill_while_it_works(worker, list(supervising(worker).values()))

    assert end_left([itself]) == []
    end_left(children, 0)


@pytest.mark.parametrize("killed", [["guard"], ["supervisor"], ["guard", "supervisor"]], ids=str)
def test_the_kill_of_a_supervising_process_is_no_doing_of_a_config(
    worker: WorkerProcess, killed: list[str]
) -> None:
    """It looks like the kernel's killer."""
    processes = supervising(worker)

    died = kill_while_it_works(worker, [processes[name] for name in killed])

    assert died.exit.from_outside


# ---- ends of the driver
DRIVER = f"""
import os, signal, sys, types
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has its children ignore it
lean = types.ModuleType("lean")  # the package without what its __init__ imports
lean.__path__ = [{str(Path(processes.__file__).parent)!r}]
sys.modules["lean"] = lean
sys.path.insert(0, {str(TESTS)!r})
from lean.processes import WorkerProcess
from support import chores
worker = WorkerProcess()
worker.await_ready(60)
supervisor = worker.call(60, os.getppid)
print(*worker.call(60, chores.family), supervisor, chores.parent(supervisor), flush=True)
if "busy" in sys.argv:
    worker.call(60, chores.hold_gil, 1000)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("state", "end"),
    [
        ("idle", signal.SIGKILL),
        ("idle", signal.SIGTERM),
        ("idle", None),
        ("busy", signal.SIGKILL),
        ("busy", signal.SIGTERM),
        ("busy", signal.SIGHUP),
    ],
    ids=lambda given: given if isinstance(given, str) else given.name if given else "its own end",
)
def test_nothing_of_a_worker_is_left_when_its_driver_goes(
    state: str, end: signal.Signals | None
) -> None:
    """Neither of an idle one nor of one that holds Python's lock."""
    command = [sys.executable, "-S", "-c", DRIVER, state]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as driver:
        family = [int(process) for process in driver.stdout.readline().split()]
        time.sleep(0.2)  # for a busy one to take the lock
        if end is None:
            driver.stdin.close()
        else:
            driver.send_signal(end)
        driver.wait(10)

    assert len(family) == 6
    assert end_left(family) == []


# ---- what the kernel tells of processes
@pytest.fixture
def child() -> Iterator[int]:
    """A process that this one has started."""
    child = chores.start_child()
    yield child
    os.kill(child, signal.SIGKILL)


def test_a_child_is_in_the_kernels_list(child: int) -> None:
    assert child in supervisor._listed_children(os.getpid())


def test_a_child_is_found_where_the_kernel_has_no_list(child: int) -> None:
    assert child in supervisor._searched_children()(os.getpid())


def test_a_child_is_a_descendant(child: int) -> None:
    assert child in supervisor._descendants(os.getpid())


def test_a_process_holds_memory(child: int) -> None:
    assert supervisor._memory(child) > 0

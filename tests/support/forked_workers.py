"""Worker processes without the second of processor time that the import of torch takes: each is a
fork of this process, which has imported it.

Guard, supervisor and worker are processes as they are for a user, and die, hang and are killed as
those do. Only two things differ: there is no `exec`, and what this process has imported is there.
So tests of what befalls a start itself, such as a bound on memory that it cannot meet, need workers
that are not forks.
"""

import contextlib
import faulthandler
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import pytest
import torch

from outblas.autotune.measure import processes, serve, supervisor, worker

_start_guard = processes.start_guard


class ForkedGuard:
    """The guard of a worker, with what `processes` uses of a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()  # nobody signals a number that was freed by another's wait

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
            return self.returncode

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("guard", timeout)
            time.sleep(0.002)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            with self._lock, contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def fork_guard(
    order: Sequence[int],
    command: Sequence[str],
    environment: Mapping[str, str],
    sockets: Sequence[int],
) -> ForkedGuard:
    """Stands for `processes.start_guard`."""
    environment = dict(environment)
    pid = os.fork()
    if pid:
        return ForkedGuard(pid)
    try:
        _become_program(environment, sockets)
        os.execv = _serve  # type: ignore[assignment]
        sys.argv = [supervisor.__file__, *map(str, order), *command]
        supervisor.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _become_program(environment: Mapping[str, str], sockets: Sequence[int]) -> None:
    """Gives up what an `exec` would take from this fork: its session, files, and handlers."""
    gc.freeze()  # the parent's objects are not to close files whose numbers this process reuses
    os.setsid()
    faulthandler.disable()
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in sockets:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(number)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for each in sockets:
        os.set_inheritable(each, True)
    os.environ.clear()
    os.environ.update(environment)


def _serve(_: str, command: Sequence[str]) -> NoReturn:
    """Runs the worker's script, where its process would begin with it."""
    try:
        worker._bench = None
        torch.set_num_threads(1)  # a fork has none of its parent's threads
        sys.argv = [serve.__file__, *command[command.index(serve.__file__) + 1 :]]
        serve.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


@contextlib.contextmanager
def forking(forked: bool = True) -> Iterator[None]:
    """Within, workers of this process are forks of it, or not even where they were."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "start_guard", fork_guard if forked else _start_guard)
        yield

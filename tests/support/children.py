"""Forked children: functions that run in a copy of the test's process."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

SECONDS = 15.0  # for a child to be done


def start(function: Callable[[], object]) -> int:
    """Forks a child that calls `function`, and ends with 0 where that returns something true;
    returns the child's process id.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if function() else 1
        finally:
            os._exit(status)
    return child


def wait(child: int, seconds: float = SECONDS) -> int:
    """Waits for a child, and returns its exit status. TimeoutError for one that takes too long.

    A child that takes too long is killed, and so is one for which this wait is interrupted.
    """
    end = time.monotonic() + seconds
    done, status = 0, 0
    try:
        while not done:
            done, status = os.waitpid(child, os.WNOHANG)
            if not done and time.monotonic() > end:
                raise TimeoutError(f"the child was not done in {seconds:g} s")
            time.sleep(0 if done else 0.002)
    finally:
        if not done:
            kill(child)
    return os.waitstatus_to_exitcode(status)


def succeeds(function: Callable[[], object]) -> bool:
    """Whether `function` returns something true in a child. TimeoutError where it hangs."""
    return wait(start(function)) == 0


def kill(child: int) -> None:
    """Kills a child, and waits until it is gone."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@contextlib.contextmanager
def staying(function: Callable[[Callable[[], None]], object]) -> Iterator[int]:
    """A child that has come to where `function` calls what it is given, and stays there. It is
    killed at the end.
    """
    reading, writing = os.pipe()

    def stay() -> None:
        os.write(writing, b"x")
        time.sleep(4 * SECONDS)

    child = start(lambda: function(stay))
    os.close(writing)
    try:
        assert os.read(reading, 1), "the child ended before it came to where it was to stay"
        yield child
    finally:
        os.close(reading)
        kill(child)

"""Ends a process that hangs, and says where."""

import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_deadlines: list[float] = []  # of the watchdogs that are active, the outermost first


@cache
def real_stderr() -> int:
    """A file descriptor of the standard error as it is at the first call, for good.

    Call it before anything redirects descriptor 2 (for pytest: in `pytest_configure`), or a dump
    goes down with the temporary file that captures it.
    """
    return os.dup(2)


@contextmanager
def watchdog(seconds: float, label: str) -> Iterator[None]:
    """If the body takes longer, dump the stacks of all threads to the real standard error and exit
    with status 1.

    The dump comes from a thread of faulthandler that needs no GIL, so it also ends a body that
    hangs inside a C call; `label` is written from a Python thread and is missing from the report if
    that call holds the GIL. Watchdogs nest, in one thread. They share one timer with
    `faulthandler.dump_traceback_later` (pytest's faulthandler_timeout).
    """
    message = f"watchdog: {label} did not end within {seconds:g} s\n".encode()
    says = threading.Timer(seconds, os.write, (real_stderr(), message))
    says.daemon = True
    _deadlines.append(time.monotonic() + seconds)
    says.start()
    _arm()
    try:
        yield
    finally:
        says.cancel()
        _deadlines.pop()
        faulthandler.cancel_dump_traceback_later()
        _arm()


def _arm() -> None:
    if _deadlines:
        # The label goes first; the dump ends the process.
        left = max(0.0, min(_deadlines) - time.monotonic()) + 0.2
        faulthandler.dump_traceback_later(left, exit=True, file=real_stderr())

"""Ends a process that hangs, and says where."""

import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_deadlines: list[float] = []  # of the active watchdogs, the outermost first


@cache
def real_stderr() -> int:
    """Returns a file descriptor for the standard error as it was at the first call.

    Call it before anything redirects descriptor 2 (in pytest: in `pytest_configure`); otherwise a
    dump is lost with the temporary file that captures it.
    """
    return os.dup(2)


@contextmanager
def watchdog(seconds: float, label: str) -> Iterator[None]:
    """Dumps the stacks of all threads to the real standard error, and exits with status 1, if the
    body takes longer than `seconds`.

    The dump comes from a thread of faulthandler that needs no GIL, so it also ends a body that
    hangs inside a C call. `label` is written from a Python thread, and is missing from the report
    if that C call holds the GIL. Watchdogs can be nested within one thread. They share one timer
    with `faulthandler.dump_traceback_later` (pytest's faulthandler_timeout).
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

"""The lock on a GPU, which makes sweeps in several processes take turns."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock

NEXT_SECONDS = 0.005  # between two tries of the process that is next
QUEUE_SECONDS = 0.02  # between two tries of all other processes at the turnstile
BYPASSED_SECONDS = 10.0  # to wait after the lock was bypassed once


class LockCancelled(Exception):
    """The waiting process no longer needs the lock."""


class GpuLock:
    """A fair lock: a turnstile in front of it ensures that the process that releases the lock is
    not the next to get it.

    A file lock alone is unfair: between two trials, its holder releases it for less time than
    passes between two tries of the waiting processes. Here one waiting process holds the turnstile,
    which is a file lock too, and tries often. The holder must pass through the turnstile again, and
    finds it taken. A process that had to wait also stays away from the turnstile for as long as
    another one may need to try it. The kernel frees both locks when their process dies.

    Only one thread may use an object. Several objects on one path exclude each other, within a
    process and between processes.
    """

    def __init__(self, path: Path) -> None:
        self._lock = filelock.FileLock(path)
        self._turnstile = filelock.FileLock(path.with_name(f"{path.name}.next"))
        self._bypassed = False  # whether it was bypassed at the last request
        self._back = 0.0  # when to return to the turnstile, on the clock of `time.monotonic`

    @contextlib.contextmanager
    def hold(self, seconds: float, cancelled: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Holds the lock and yields "". If the lock cannot be acquired in time or at all, continues
        without it and yields the reason.

        Raises LockCancelled.
        """
        patience = min(seconds, BYPASSED_SECONDS) if self._bypassed else seconds
        time.sleep(max(0.0, min(self._back - time.monotonic(), 2 * QUEUE_SECONDS)))
        start, waited = time.monotonic(), False
        try:
            reason = self._acquire(start + patience, patience, cancelled)
            self._bypassed = reason != ""
            waited = time.monotonic() - start > NEXT_SECONDS / 2
            yield reason
        finally:
            self._back = time.monotonic() + 2 * QUEUE_SECONDS if waited else 0.0
            for lock in (self._turnstile, self._lock):
                with contextlib.suppress(OSError):
                    lock.release(force=True)

    def _acquire(self, until: float, patience: float, cancelled: Callable[[], bool]) -> str:
        """Acquires the lock; returns why it failed, or "" if it is held."""
        try:
            if not _wait_for(self._turnstile, QUEUE_SECONDS, until, cancelled):
                # The process in the turnstile makes no progress, but the GPU may be free.
                return "" if _try(self._lock) else _late(patience)
            held = _wait_for(self._lock, NEXT_SECONDS, until, cancelled)
            self._turnstile.release()
            return "" if held else _late(patience)
        except (OSError, NotImplementedError, RuntimeError) as error:
            return f"the lock cannot be used: {error}"


def _wait_for(
    lock: filelock.BaseFileLock, period: float, until: float, cancelled: Callable[[], bool]
) -> bool:
    """Returns whether the lock could be acquired in time."""
    while not _try(lock):
        if cancelled():
            raise LockCancelled
        if time.monotonic() >= until:
            return False
        # random, so that no process is always the last to try
        time.sleep(random.uniform(0.5, 1.5) * period)
    return True


def _try(lock: filelock.BaseFileLock) -> bool:
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return False
    return True


def _late(seconds: float) -> str:
    return f"another process has held the lock of the GPU for {seconds:g} s"

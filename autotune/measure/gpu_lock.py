"""The lock on a GPU, under which sweeps in several processes take turns."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock

NEXT_SECONDS = 0.005  # between two looks at the GPU's lock, of whoever is next
QUEUE_SECONDS = 0.02  # between two looks at the turnstile, of everybody else
BYPASSED_SECONDS = 10.0  # to wait once the lock has been passed by


class LockCancelled(Exception):
    """Whoever waited for the lock does not want it any more."""


class GpuLock:
    """A lock with a turnstile before it, so that whoever lets go of it is not the next to have it.

    A file lock alone is unfair: its holder lets go between two trials for less time than passes
    between two looks of those who wait. Here one of them stands in the turnstile, which is locked
    too, and looks often; the holder has to come through the turnstile again, and finds it taken.
    Whoever had to wait for its turn also stays away from the turnstile for as long as another may
    take to look at it. The kernel frees both locks when their process dies.

    One thread uses it. Several objects on one path exclude each other, in one process as in
    several.
    """

    def __init__(self, path: Path) -> None:
        self._lock = filelock.FileLock(path)
        self._turnstile = filelock.FileLock(path.with_name(f"{path.name}.next"))
        self._bypassed = False  # when it was last wanted
        self._back = 0.0  # on the clock of `time.monotonic`, when to come back to the turnstile

    @contextlib.contextmanager
    def hold(self, seconds: float, cancelled: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Holds the lock, and yields ""; or, where it cannot be had in time or at all, goes on and
        yields why.

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
        """Why the lock is not held; nothing if it is."""
        try:
            if not _wait_for(self._turnstile, QUEUE_SECONDS, until, cancelled):
                # Somebody stands in it and does not move on: the GPU may be free for all that.
                return "" if _try(self._lock) else _late(patience)
            held = _wait_for(self._lock, NEXT_SECONDS, until, cancelled)
            self._turnstile.release()
            return "" if held else _late(patience)
        except (OSError, NotImplementedError, RuntimeError) as error:
            return f"the lock cannot be used: {error}"


def _wait_for(
    lock: filelock.BaseFileLock, period: float, until: float, cancelled: Callable[[], bool]
) -> bool:
    """Whether it could be locked in time."""
    while not _try(lock):
        if cancelled():
            raise LockCancelled
        if time.monotonic() >= until:
            return False
        time.sleep(random.uniform(0.5, 1.5) * period)  # so that nobody is always the last to look
    return True


def _try(lock: filelock.BaseFileLock) -> bool:
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return False
    return True


def _late(seconds: float) -> str:
    return f"another process has held the lock of the GPU for {seconds:g} s"

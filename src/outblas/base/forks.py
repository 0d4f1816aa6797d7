"""Locks that a forked child can acquire, whatever the parent's threads held.

A forked child has one thread and a copy of every lock in its state at the fork: a lock that another
thread held stays locked for ever. There are two kinds of locks here:

- A renewed lock (the default) is free in the child. The state that it guards may be half updated
  there, so this kind suits tables and compilers that the child rebuilds.
- A `held` lock is acquired before every fork, so that no thread is in the middle of a change at the
  fork. This kind suits changes to the whole process that last for a while.
"""

import os
import threading
import weakref

WAIT_SECONDS = 60.0  # how long a fork waits for the holder of a lock before it goes on without it


class Lock:
    """A reentrant lock for `with`.

    With `held`, a fork waits until the lock is free, `WAIT_SECONDS` at most, so that the child
    finds the guarded state complete. Otherwise the child finds the lock free.
    """

    def __init__(self, *, held: bool = False) -> None:
        self._lock = threading.RLock()
        if held:
            _held.append(self)
        else:
            _renewed.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def acquire(self, seconds: float) -> bool:
        """Acquires the lock within this many seconds; returns whether it did."""
        return self._lock.acquire(timeout=seconds)

    def release(self) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Frees the lock from threads that no longer exist. Call it only where no other thread is
        left.
        """
        if self._lock.acquire(blocking=False):
            self._lock.release()  # it was free, or this thread held it
        else:
            self._lock = threading.RLock()


_held: list[Lock] = []  # never removed: these locks belong to modules
_renewed: weakref.WeakSet[Lock] = weakref.WeakSet()


class _Forking(threading.local):
    """The locks that the forking thread has taken."""

    def __init__(self) -> None:
        self.taken: list[Lock] = []


_forking = _Forking()


def _before() -> None:
    _forking.taken = [lock for lock in _held if lock.acquire(WAIT_SECONDS)]


def _in_parent() -> None:
    for lock in _taken():
        lock.release()


def _in_child() -> None:
    taken = _taken()
    for lock in taken:
        lock.release()
    for lock in (*_held, *_renewed):
        if lock not in taken:
            lock.renew()


def _taken() -> list[Lock]:
    taken, _forking.taken = _forking.taken, []
    return taken


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)

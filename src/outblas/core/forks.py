"""Locks that a forked child can take, whatever the threads of its parent held.

A forked child has one thread, and a copy of every lock as it was: one that another thread held is
held for ever. `renewed` locks are free in a child. What they guard may be half done there: that
suits tables and compilers that a child makes anew. `held` locks are taken before a fork, and so
nobody is in the midst of what they guard: that suits what changes the whole process for a while.
"""

import os
import threading
import weakref

WAIT_SECONDS = 60.0  # of a fork for the holder of a lock, before it goes on without


class Lock:
    """A lock for `with`, which one thread may take several times.

    `held`: a fork waits until it is free, `WAIT_SECONDS` at most, and the child finds what it
    guards as it should be. Else the child finds it free.
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
        """Takes it if that can be done in so many seconds."""
        return self._lock.acquire(timeout=seconds)

    def release(self) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Frees it from threads that are gone. Only where no other thread is left."""
        if self._lock.acquire(blocking=False):
            self._lock.release()  # nobody held it, or this thread does
        else:
            self._lock = threading.RLock()


_held: list[Lock] = []  # for good: these are modules' own
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

"""A forked child can use the package, whatever other threads of its parent were doing."""

import ast
import os
import signal
import threading
import time

import pytest
import torch
from support.paths import ROOT

import outblas
from outblas.core import forks

pytestmark = [pytest.mark.long, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")]

SECONDS = 15.0  # for a child to be done


def in_child(function):
    """Whether `function` returns something true in a forked child; TimeoutError where it hangs."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if function() else 1
        finally:
            os._exit(status)
    end = time.monotonic() + SECONDS
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimeoutError("the child hangs")
        time.sleep(0.002)


class Holder:
    """A thread that holds a lock until it is told to let go."""

    def __init__(self, lock) -> None:
        self._let_go, self._holding = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, args=(lock,), daemon=True)

    def __enter__(self):
        self._thread.start()
        assert self._holding.wait(SECONDS)
        return self

    def __exit__(self, *_) -> None:
        self.let_go()
        self._thread.join(SECONDS)

    def let_go(self) -> None:
        self._let_go.set()

    def _hold(self, lock) -> None:
        with lock:
            self._holding.set()
            self._let_go.wait(4 * SECONDS)


@pytest.mark.interpreter
def test_fork_while_another_thread_runs_the_interpreter() -> None:
    a, b = torch.randn(16, 32), torch.randn(32, 16)

    def call():
        return outblas.matmul(a, b, kernel="portable")

    expected, stop = call(), threading.Event()

    def loop():
        while not stop.is_set():
            call()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        for _ in range(4):
            time.sleep(0.01)
            assert in_child(lambda: torch.equal(call(), expected))
    finally:
        stop.set()
        thread.join(SECONDS)
    assert torch.equal(call(), expected)


def taken(lock, seconds=5.0):
    """Whether the lock can be had, from another thread: who forked may take it again in
    any case.
    """
    got = []

    def take():
        got.append(lock.acquire(seconds))
        if got[0]:
            lock.release()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return got == [True]


def test_a_lock_that_another_thread_holds_is_free_in_the_child() -> None:
    lock = forks.Lock()
    with Holder(lock):
        assert in_child(lambda: taken(lock))
        assert not taken(lock, 0.01)  # of the parent's it is still
    assert taken(lock)


def test_what_the_forking_thread_holds_it_holds_in_the_child_too() -> None:
    """It forked in the midst of it, and the child goes on there."""
    lock = forks.Lock()

    def goes_on():
        with lock:  # again
            free = taken(lock, 0.01)
        lock.release()
        return not free and taken(lock)

    with lock:
        assert in_child(goes_on)
        assert not taken(lock, 0.01)
    assert taken(lock)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forks, "_held", [])
    return forks.Lock(held=True)


def test_a_fork_waits_for_who_holds_a_lock(held) -> None:
    states = []
    with Holder(held) as holder:
        threading.Timer(0.2, lambda: (states.append("let go"), holder.let_go())).start()
        assert in_child(lambda: states == ["let go"] and taken(held))
    assert taken(held)


def test_a_fork_does_not_wait_for_ever(held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "WAIT_SECONDS", 0.1)
    with Holder(held):
        assert in_child(lambda: taken(held))
        assert not taken(held, 0.01)
    assert taken(held)


def test_who_holds_a_lock_can_fork(held) -> None:
    """Triton starts programs while it compiles."""
    with held:
        assert in_child(lambda: True)
        assert not taken(held, 0.01)
    assert taken(held)


def test_no_module_has_a_lock_that_a_child_may_find_held() -> None:
    """Locks of modules are `forks.Lock`; those of objects that a child makes anew may be others."""
    bad = []
    for folder in ("src/outblas", "autotune", "hopper", "kernels", "turing"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for statement in ast.parse(path.read_text(encoding="utf-8")).body:
                value = getattr(statement, "value", None)
                name = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
                kind = name.rpartition(".")[2]
                if kind in ("Lock", "RLock", "Condition", "Semaphore") and name != "forks.Lock":
                    bad.append(f"{path.relative_to(ROOT)}: {ast.unparse(statement)}")
    assert bad == []

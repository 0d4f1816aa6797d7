"""A forked child can use the package, whatever other threads of its parent were doing."""

import ast
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support import children
from support.paths import PACKAGES, ROOT

import outblas
from outblas.base import forks

pytestmark = [pytest.mark.long, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")]


@contextlib.contextmanager
def thread_runs(function: Callable[[], object]) -> Iterator[None]:
    """A thread that calls `function` again and again until the end."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            function()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(children.SECONDS)


@contextlib.contextmanager
def thread_holds(lock: forks.Lock) -> Iterator[threading.Event]:
    """A thread that holds a lock until the end, or until the event is set."""
    let_go, holding = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            holding.set()
            let_go.wait(4 * children.SECONDS)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    try:
        assert holding.wait(children.SECONDS)
        yield let_go
    finally:
        let_go.set()
        thread.join(children.SECONDS)


def free(lock: forks.Lock, seconds: float = 5.0) -> bool:
    """Whether other threads can take the lock within so many seconds. Who forked may take it again
    in any case; and so may one thread of a child, which has got the number of the thread that held
    the lock in the parent. Two that live at once have different numbers.
    """
    taken: list[bool] = []
    both_live = threading.Barrier(2)

    def take() -> None:
        both_live.wait()
        got = lock.acquire(seconds)
        if got:
            lock.release()
        taken.append(got)

    threads = [threading.Thread(target=take, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(children.SECONDS)
    return taken == [True, True]


def held_by_another(lock: forks.Lock) -> bool:
    return not free(lock, 0.01)


# The interpreter.


@pytest.fixture
def product() -> Callable[[], torch.Tensor]:
    """A call that Triton's interpreter runs."""
    a, b = torch.randn(16, 32), torch.randn(32, 16)
    return lambda: outblas.matmul(a, b, kernel="portable")


@pytest.mark.interpreter
def test_a_child_computes_while_a_thread_of_its_parent_runs_the_interpreter(
    product: Callable[[], torch.Tensor],
) -> None:
    expected = product()

    with thread_runs(product):
        for _ in range(2):
            time.sleep(0.01)
            assert children.succeeds(lambda: torch.equal(product(), expected))


# Locks that a child finds free.


def test_a_lock_that_another_thread_holds_is_free_in_the_child() -> None:
    lock = forks.Lock()

    with thread_holds(lock):
        assert children.succeeds(lambda: free(lock))


def test_a_lock_of_the_forking_thread_is_held_in_the_child_until_it_lets_go() -> None:
    """It forked in the midst of what the lock guards, and the child goes on there."""
    lock = forks.Lock()

    def goes_on() -> bool:
        with lock:  # again
            was_held = held_by_another(lock)
        lock.release()
        return was_held and free(lock)

    with lock:
        assert children.succeeds(goes_on)


# Locks that a fork takes first.


@pytest.fixture
def held() -> forks.Lock:
    """A lock that forks wait for. They do so for good: what stays of it after a test is free, and
    costs a fork nothing.
    """
    return forks.Lock(held=True)


def test_a_fork_waits_for_who_holds_a_lock_but_not_for_ever(
    held: forks.Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []

    def finish(let_go: threading.Event) -> None:
        done.append("what the lock guards")
        let_go.set()

    with thread_holds(held) as let_go:
        threading.Timer(0.2, finish, (let_go,)).start()

        assert children.succeeds(lambda: done == ["what the lock guards"] and free(held))

    assert free(held)
    monkeypatch.setattr(forks, "WAIT_SECONDS", 0.1)
    with thread_holds(held):
        assert children.succeeds(lambda: free(held))


def test_who_holds_a_lock_can_fork(held: forks.Lock) -> None:
    """Triton starts programs while it compiles."""
    with held:
        assert children.succeeds(lambda: True)
        assert held_by_another(held)

    assert free(held)


# The locks of this package.


def other_locks(path: Path) -> list[str]:
    """The locks of a module that a child may find held: those that are no `forks.Lock`."""
    found = []
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        value = getattr(statement, "value", None)
        maker = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        kind = maker.rpartition(".")[2]
        if kind in ("Lock", "RLock", "Condition", "Semaphore") and maker != "forks.Lock":
            found.append(f"{path.relative_to(ROOT)}: {ast.unparse(statement)}")
    return found


def test_no_module_has_a_lock_that_a_child_may_find_held() -> None:
    """Those of objects that a child makes anew may be others."""
    modules = [path for folder in PACKAGES.values() for path in (ROOT / folder).rglob("*.py")]

    assert len(modules) > 100
    assert [line for path in modules for line in other_locks(path)] == []

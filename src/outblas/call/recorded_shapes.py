"""Tells whoever records which products a program calls (`shape_recorder`) of those that are
planned.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from outblas.base import forks
from outblas.call.problem import Problem

if TYPE_CHECKING:
    from outblas.call.grouped import GroupedProblem


class Recorder(Protocol):
    """One who records."""

    def _note(self, problem: Problem) -> None: ...

    def _note_groups(self, problem: "GroupedProblem", top: int) -> None: ...


lock = forks.Lock()  # of what recorders hold
_active: list[Recorder] = []
_chosen = threading.local()


@contextlib.contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Tells a recorder of the products that are planned meanwhile."""
    with lock:
        _active.append(recorder)
    try:
        yield
    finally:
        with lock:
            _active.remove(recorder)


def is_recording() -> bool:
    """Returns whether anybody records."""
    return bool(_active)


def note(problem: Problem) -> None:
    """Tells everybody who records of a product that is planned."""
    if not _active:
        return
    with lock:
        for recorder in _active:
            recorder._note(problem)


def note_groups(problem: "GroupedProblem") -> None:
    """Tells everybody who records of a product that groups divide."""
    with lock:
        for recorder in _active:
            recorder._note_groups(problem, getattr(_chosen, "top", 0))


@contextlib.contextmanager
def chosen_by_tokens(top: int) -> Iterator[None]:
    """Says of the products that this thread plans meanwhile that their rows are tokens, each of
    which chooses so many groups.
    """
    _chosen.top = top
    try:
        yield
    finally:
        _chosen.top = 0

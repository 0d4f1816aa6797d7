"""Progress of long operations: code counts its steps, and a listener shows them.

Without a listener, counting costs nothing and changes nothing. A step may count steps itself; the
listener receives all levels: "2 of 11 4096 nt: 3 of 26 hopper.persistent".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class _Level:
    """The current step of one operation."""

    text: str = ""


@dataclass
class _Listener:
    """`levels`: the running operations, each of which is a step of the previous one."""

    hear: Callable[[str], None]
    levels: list[_Level] = field(default_factory=list)

    def tell(self, last: str = "") -> None:
        texts = [*(level.text for level in self.levels), last]
        self.hear(": ".join(filter(None, texts)))


_listener: ContextVar[_Listener | None] = ContextVar("progress", default=None)


@contextlib.contextmanager
def heard(hear: Callable[[str], None]) -> Iterator[None]:
    """Calls `hear` with each step that is counted inside this context, in the thread that counts
    it.
    """
    token = _listener.set(_Listener(hear))
    try:
        yield
    finally:
        _listener.reset(token)


def counted(items: Sequence[T], name: Callable[[T], str] = str) -> Iterator[T]:
    """Yields the items, and tells the listener "3 of 26" and the item's name before each."""
    listener = _listener.get()
    if listener is None:
        yield from items
        return
    level = _Level()
    listener.levels.append(level)
    try:
        for number, item in enumerate(items, 1):
            level.text = f"{number} of {len(items)} {name(item)}".rstrip()
            listener.tell()
            yield item
    finally:  # also where the loop is left early: another level may stand above this one then
        listener.levels.remove(level)


def say(text: str) -> None:
    """Tells the listener what is done within the current step."""
    if listener := _listener.get():
        listener.tell(text)

"""A flag that is on or off within a context, and costs calls nothing until it was first used."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar


class ContextFlag:
    """A flag of the thread, or the asyncio task, that enters a context.

    Attributes:
        ever: Whether a context was ever entered in this process. Until then calls look no further,
            and Dynamo, which guards on this, knows the answer.
        requested: Returns the value within the current context. Dynamo cannot trace it.
    """

    def __init__(self, name: str) -> None:
        self._value: ContextVar[bool] = ContextVar(name, default=False)
        self.requested = self._value.get
        self.ever = False

    def within(self, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager within which the flag has this value. Raises TypeError."""
        check_bool(enabled, "enabled")
        return self._within(enabled)

    @contextlib.contextmanager
    def _within(self, enabled: bool) -> Iterator[None]:
        self.ever = self.ever or enabled
        token = self._value.set(enabled)
        try:
            yield
        finally:
            self._value.reset(token)


def check_bool(value: object, name: str) -> None:
    """Raises TypeError for an argument that is no bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {type(value).__name__}, expected a bool")

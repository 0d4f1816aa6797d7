"""Programs that sweep, as forks of this process: a test interrupts and kills them as a user's."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self


class Driver:
    """A process that runs a function, which is given a connection to say things on.

    It ends as any program does: an exception ends it with a traceback and status 1.
    """

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        fork = multiprocessing.get_context("fork")  # torch is there
        self._said, say = fork.Pipe(duplex=False)
        self._process = fork.Process(target=function, args=(say, *arguments))
        self._process.start()
        say.close()

    def said(self) -> Iterator[Any]:
        """What it says, as it says it, until it has ended."""
        while True:
            try:
                yield self._said.recv()
            except EOFError:
                return

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self, seconds: float = 60.0) -> int:
        """Its exit status, or less than 0 for a signal."""
        self._process.join(seconds)
        assert self._process.exitcode is not None, f"the driver has not ended in {seconds:g} s"
        return self._process.exitcode

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._said.close()


__all__ = ["Connection", "Driver"]

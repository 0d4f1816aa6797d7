"""Programs that sweep, in processes that a test interrupts and kills as a user's."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

# Drivers are forks of a process that has torch and has run no test: it holds no threads of
# libraries, which a fork would lack. It starts with the first driver, and ends with the tests.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch", "outblas.autotune"])


class Driver:
    """A process that runs a function of a module, which is given a connection to say things on.

    It ends as any program does: an exception ends it with a traceback and status 1.
    """

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        self._said, say = _processes.Pipe(duplex=False)
        self._process = _processes.Process(
            target=_run, args=(dict(os.environ), os.getcwd(), function, say, *arguments)
        )
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


def _run(
    environment: Mapping[str, str], folder: str, function: Callable[..., None], *arguments: Any
) -> None:
    """Runs a function as it would run in the process that asked for it."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    function(*arguments)

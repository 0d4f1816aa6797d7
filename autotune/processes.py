"""Processes that a sweep starts: fresh interpreters that do not import the caller's script, and that end with it."""

import contextlib
import multiprocessing.context
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_starting = threading.Lock()


def killed_from_outside(exitcode: int | None) -> bool:
    """STUB, to be replaced: whether a process ended by a signal that says nothing about what it was at."""
    return exitcode in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """Spawned processes import the main module, and run a script that has no `if __name__ == "__main__"` again."""
    with _starting:
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


class _Process(multiprocessing.context.SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with _no_main():
            return multiprocessing.context.SpawnProcess._Popen(process_obj)


class Context(multiprocessing.context.SpawnContext):
    """Starts processes by `spawn`: a forked one could not use CUDA."""

    Process = _Process


def start(environment: dict[str, str], data_limit: int | None) -> None:
    """What every worker does first: its environment, its memory bound in bytes, and a watch on its parent."""
    os.environ.update(environment)
    if data_limit is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (data_limit, data_limit))
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()


def _follow(parent: int) -> None:
    """Ends this process when its parent is gone, whatever the GPU is doing."""
    while os.getppid() == parent:
        time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)

"""Worker processes: fresh interpreters that do not import the caller's script, and that leave
nothing behind.

A worker runs below a supervisor (see `serve`), which ends the worker with all its descendants when
the driver requests it or is gone. Nothing here needs the main thread or depends on the wall clock.
A worker is in a session of its own, so Ctrl-C reaches only the driver.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from outblas.base import serve

T = TypeVar("T")

START_SECONDS = 300.0  # to import torch and the modules that calls need, on a busy machine
ACCEPT_SECONDS = 60.0  # to read a call; a worker that hangs while it is idle never does
END_SECONDS = 10.0  # for the supervisor to end a worker
# Signals by which something else ends a worker, as the kernel does when memory runs out.
_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class WorkerDied(Exception):
    """The worker did not return from a call: it died, hung, or could not be started.

    Attributes:
        status: "hang" or "crash", which count for the call; "killed", where something else ended
            the worker or none could be started; "idle", where it ended before it read the call.
    """

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class RemoteError(Exception):
    """A function raised an error in the worker, which continues. It holds the qualified name of the
    error's class, and its text.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name.rpartition('.')[2]}: {text}")
        self.name = name
        self.text = text


class WorkerProcess:
    """One process that answers one call at a time. It is gone after a call that raises anything
    except RemoteError.

    One thread uses it; any other thread may `terminate` it, which ends a call too.

    Args:
        modules: modules that it imports before it is ready.
        environment: variables that it gets in addition to those of this process.
        memory: bytes that each of its processes may allocate; beyond that Python raises
            MemoryError. A process that uses CUDA needs far more than it holds.

    Raises WorkerDied with status "idle" where no process can be started.
    """

    def __init__(
        self,
        modules: Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
        memory: int = 0,
    ) -> None:
        if sys.platform != "linux" or getattr(sys, "frozen", False):
            raise WorkerDied("idle", f"worker processes need Python on Linux, not {sys.platform}")
        ours, theirs = socket.socketpair()
        here = ""  # "" in the path of modules is the current folder, which may be gone
        with contextlib.suppress(FileNotFoundError):
            here = os.getcwd()
        folders = [folder or here for folder in sys.path if isinstance(folder, str)]
        folders = [folder for folder in folders if folder]
        order = [os.getpid(), theirs.fileno(), json.dumps(folders), memory, *modules]
        with theirs:
            try:
                self._supervisor = subprocess.Popen(
                    [sys.executable, "-P", serve.__file__, *map(str, order)],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **(environment or {})},
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                ours.close()
                raise WorkerDied("idle", str(error)) from None
        self._connection = Connection(ours.detach())
        self._ready = False

    @property
    def alive(self) -> bool:
        """Whether it has not ended. Another thread may ask while a call runs."""
        return self._supervisor.poll() is None

    def await_ready(self, seconds: float = START_SECONDS) -> None:
        """Waits until it can take calls. Raises WorkerDied with status "idle"."""
        if not self._ready:
            self._receive(seconds, accepted=False)
            self._ready = True

    def call(self, seconds: float, function: Callable[..., T], *arguments: Any) -> T:
        """Returns what the function returns in the worker, within `seconds` after the worker
        accepted the call.

        Raises WorkerDied, RemoteError, and any error of pickling the call.
        """
        result: T = self._answer(seconds, pickle.dumps((function, arguments)), pickle.loads)
        return result

    def call_by_name(self, seconds: float, function: str, *arguments: Any) -> Any:
        """As `call`, of a function "module:name" whose arguments and result are JSON: neither side
        unpickles anything.
        """
        return self._answer(seconds, json.dumps((function, arguments)).encode(), json.loads)

    def _answer(self, seconds: float, request: bytes, read: Callable[[bytes], Any]) -> Any:
        self.await_ready()
        with contextlib.suppress(OSError):  # it has ended, which the next line reports
            self._connection.send_bytes(request)
        self._receive(ACCEPT_SECONDS, accepted=False)
        answer = self._receive(seconds, accepted=True)
        try:
            returned, value = read(answer)
        except Exception as error:
            self.kill()
            raise WorkerDied("crash", f"its answer cannot be read: {error}") from None
        if not returned:
            raise RemoteError(*value)
        return value

    def _receive(self, seconds: float, *, accepted: bool) -> bytes:
        """Returns the next message. Raises WorkerDied, after which the process is gone.

        The seconds are counted in looks of a second at most: a driver that was stopped meanwhile
        must not take that time for the worker's.
        """
        looks = max(1, math.ceil(seconds))
        try:
            for _ in range(looks):
                if self._connection.poll(seconds / looks):
                    return self._connection.recv_bytes()
        except (EOFError, OSError):
            raise self._death(accepted) from None
        except BaseException:
            # This process was interrupted. The answer may still arrive, and must not be taken for
            # that of the next call.
            self.kill()
            raise
        self.kill()
        if accepted:
            raise WorkerDied("hang", f"not done in {seconds:.0f} s: the worker was killed")
        raise WorkerDied("idle", f"the worker did nothing for {seconds:.0f} s")

    def _death(self, accepted: bool) -> WorkerDied:
        """Waits for the end of a worker that has closed its connection, and tells how that was."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(END_SECONDS)
        code = self._supervisor.returncode
        self.kill()
        if code is None:
            reason = "it closed its connection"
        elif code < 0:
            reason = f"the worker died: signal {signal.Signals(-code).name}"
        else:
            reason = f"the worker died: exit status {code}"
        if not accepted:
            return WorkerDied("idle", reason)
        outside = code is not None and -code in _OUTSIDE
        return WorkerDied("killed" if outside else "crash", reason)

    def terminate(self) -> None:
        """Requests the end of the process and its descendants, without waiting. Any thread may call
        this.
        """
        self._supervisor.terminate()

    def kill(self) -> None:
        """Ends the process and its descendants; returns when they are gone.

        A process that the kernel cannot end at once, for example one that waits for a GPU's driver,
        is left to its supervisor.
        """
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(END_SECONDS)

    def close(self) -> None:
        """Kills the process, and frees what this process holds of it. No other thread may be using
        it.
        """
        self.kill()
        self._connection.close()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

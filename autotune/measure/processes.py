"""Worker processes: fresh interpreters that do not import the caller's script, and that leave
nothing behind.

A worker runs `serve.py` below a `supervisor.py`. The supervisor ends the worker with all its
descendants when the driver requests it or is gone, and when the worker holds too much memory.
Nothing here needs the main thread, depends on the wall clock or touches the driver's own modules. A
worker is in a separate session, so Ctrl-C reaches only the driver.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import Any, TypeVar

from . import serve
from .serve import ACCEPTED, CALL, ERROR, READY, RESULT, Frame, Reader

T = TypeVar("T")

# For a worker to read a call; a worker that hangs while it is idle never does.
ACCEPT_SECONDS = 60.0
END_SECONDS = 10.0  # for the guard and the supervisor to end a worker
STEP_SECONDS = 1.0  # between two looks at events that are not announced
_MOST_COUNTED = 5.0  # seconds of a deadline that count between two looks at it
_PIECE = 1 << 16
_OUTSIDE = [
    number for number in signal.Signals if number.name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
]
_QUIETLY = getattr(socket, "MSG_NOSIGNAL", 0)  # otherwise SIGPIPE could end a program
# The supervisor is started by its path, and not imported.
_SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))


@dataclass(frozen=True)
class Exit:
    """How a worker ended: by a signal, with an exit status, because of the memory that it held, or
    as `detail` says.
    """

    signal: int | None = None
    status: int | None = None
    memory: int | None = None
    detail: str = ""

    @property
    def from_outside(self) -> bool:
        """Whether something else ended it, as the kernel does when memory runs out. This is not the
        fault of its work.
        """
        return self.signal in _OUTSIDE

    def __str__(self) -> str:
        if self.memory is not None:
            return f"out of memory: it held {self.memory / 2**30:.1f} GiB"
        if self.status is not None:
            return f"exit status {self.status}"
        if self.signal is not None:
            return f"signal {_signal_name(self.signal)}" + (
                f" ({self.detail})" if self.detail else ""
            )
        return self.detail


class WorkerStartError(Exception):
    """A worker cannot be started, or does not become ready in time."""


class WorkerTimeout(Exception):
    """A call was not finished in time. `accepted`: whether the worker had started it."""

    def __init__(self, accepted: bool) -> None:
        super().__init__("not done in time")
        self.accepted = accepted


class WorkerExited(Exception):
    """The worker ended before it answered. `accepted`: whether it had started the call."""

    def __init__(self, exit: Exit, accepted: bool) -> None:
        super().__init__(str(exit))
        self.exit = exit
        self.accepted = accepted


class RemoteError(Exception):
    """A function raised an error in the worker, which continues. It holds the qualified name of the
    error's class, and its text.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name.rpartition('.')[2]}: {text}")
        self.name = name
        self.text = text


class Deadline:
    """A deadline that counts only time in which this process ran.

    A process that is stopped, frozen with its container or starved cannot see how much time its
    worker really had. Therefore the time between two looks counts for a few seconds at most.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._seen = time.monotonic()

    @property
    def left(self) -> float:
        """The seconds left, at least 0. It must be read every second."""
        now = time.monotonic()
        self._left -= min(now - self._seen, _MOST_COUNTED)
        self._seen = now
        return max(0.0, self._left)


class WorkerProcess:
    """One process that answers one call at a time. It is gone after a call that raises anything
    except RemoteError.

    One thread uses it. Any other thread may `terminate` or `kill` it; a thread that waits for an
    answer is notified at once.

    Args:
        environment: variables that it gets in addition to those of this process.
        modules: modules that it imports before it is ready.
        memory: bytes that it may hold together with all its descendants; beyond that it is killed.
        data_limit: bytes that each of its processes may allocate; beyond that Python raises
            MemoryError. A process that uses CUDA needs far more than it holds.
        program: the script that serves.

    Raises WorkerStartError.
    """

    def __init__(
        self,
        *,
        environment: Mapping[str, str] | None = None,
        modules: Sequence[str] = (),
        memory: int | None = None,
        data_limit: int | None = None,
        program: str = serve.__file__,
    ) -> None:
        if not hasattr(os, "fork"):
            raise WorkerStartError(
                f"worker processes need a POSIX system, and this is {sys.platform}"
            )
        self._reader = Reader()
        self._ready = False
        self._number = 0  # of the last call
        self._said = b""  # from the supervisor, not yet a whole line
        self._exit: Exit | None = None
        self._connection, connection = socket.socketpair()
        self._control, control = socket.socketpair()
        with connection, control:
            order = [
                os.getpid(),
                control.fileno(),
                connection.fileno(),
                memory or 0,
                data_limit or 0,
            ]
            command = [
                *_python(),
                program,
                str(connection.fileno()),
                json.dumps(_search_path()),
                *modules,
            ]
            try:
                self._guard = subprocess.Popen(
                    [command[0], "-S", "-P", "-s", _SUPERVISOR, *map(str, order), *command],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **(environment or {})},
                    pass_fds=(control.fileno(), connection.fileno()),
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                self._connection.close()
                self._control.close()
                raise WorkerStartError(str(error)) from None
        self._connection.setblocking(False)
        self._control.setblocking(False)

    @property
    def exit(self) -> Exit | None:
        """How it ended, if it has. Read this only while no call runs."""
        self._listen()
        return self._exit

    def await_ready(self, seconds: float) -> None:
        """Waits until it can take calls. Raises WorkerStartError, after which the process is
        gone.
        """
        deadline = Deadline(seconds)
        try:
            while not self._ready:
                ended = self._exit
                self._ready = any(frame.kind == READY for frame in self._receive())
                if self._ready:
                    return
                if ended is not None:
                    raise WorkerStartError(str(ended))
                if self._exit is None and not deadline.left:
                    raise WorkerStartError(f"not ready in {seconds:g} s")
                self._wait(deadline.left)
        except BaseException:
            self.kill()
            raise

    def call(self, seconds: float, function: Callable[..., T], *arguments: Any) -> T:
        """Returns what the function returns in the worker, within `seconds` after the worker
        accepted the call.

        Raises WorkerTimeout, WorkerExited, RemoteError, and any error of pickling the call.
        """
        self._number += 1
        body = pickle.dumps((function, arguments))
        try:
            answer = self._exchange(Frame(CALL, self._number, body), seconds)
            found = pickle.loads(answer.body)
        except (WorkerTimeout, WorkerExited):
            self.kill()
            raise
        except Exception as error:  # what arrived is not a valid answer
            self.kill()
            raise WorkerExited(
                Exit(detail=f"it sent an answer that cannot be read: {error}"), accepted=True
            ) from None
        except BaseException:
            # This process was interrupted. The answer may still arrive, and must not be taken for
            # that of the next call.
            self.kill()
            raise
        if answer.kind == ERROR:
            raise RemoteError(*found)
        value: T = found
        return value

    def terminate(self) -> None:
        """Requests the end of the process and its descendants, without waiting. Any thread may call
        this.
        """
        self._guard.terminate()

    def kill(self) -> None:
        """Ends the process and its descendants; returns when they are gone. Any thread may call
        this.

        A process that the kernel cannot end at once, for example one that waits for a GPU's driver,
        is left to its supervisor.
        """
        self.terminate()
        try:
            self._guard.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(END_SECONDS)
        self._await_supervisor()

    def _await_supervisor(self) -> None:
        """Waits for the supervisor, where the guard was killed. The supervisor does the guard's
        work then, and closes its end last.
        """
        if self._control.fileno() >= 0:
            poll = select.poll()
            poll.register(self._control, 0)
            poll.poll(1000 * END_SECONDS)

    def close(self) -> None:
        """Kills the process, and frees what this process holds of it. No other thread may be using
        it.
        """
        self.kill()
        self._connection.close()
        self._control.close()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The exchange.
    def _exchange(self, call: Frame, seconds: float) -> Frame:
        """Sends a call and returns its answer."""
        outgoing, accepted = bytes(call), False
        deadline = Deadline(ACCEPT_SECONDS)
        while True:
            ended = self._exit  # everything that will arrive has arrived by then
            for frame in self._receive():
                if frame.number != call.number:
                    continue
                if frame.kind == ACCEPTED:
                    accepted, deadline = True, Deadline(seconds)
                elif frame.kind in (RESULT, ERROR):
                    return frame
            if ended is not None:
                raise WorkerExited(ended, accepted)
            if self._exit is None and not deadline.left:
                raise WorkerTimeout(accepted)
            outgoing = self._wait(deadline.left, outgoing)

    def _wait(self, seconds: float, outgoing: bytes = b"") -> bytes:
        """Waits until something happens, a second at most. Sends what can be sent, and returns the
        rest.
        """
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._connection, select.POLLIN | (select.POLLOUT if outgoing else 0))
        ready = dict(poll.poll(math.ceil(1000 * min(seconds, STEP_SECONDS))))
        if ready.get(self._connection.fileno(), 0) & select.POLLOUT:
            with contextlib.suppress(OSError):  # the supervisor reports its end
                outgoing = outgoing[self._connection.send(outgoing, _QUIETLY) :]
        self._listen()
        return outgoing

    def _receive(self) -> list[Frame]:
        """Returns the frames that have arrived."""
        frames: list[Frame] = []
        while True:
            try:
                piece = self._connection.recv(_PIECE)
            except BlockingIOError:
                return frames
            except OSError:
                piece = b""
            if not piece:
                if not frames:
                    self._await_exit()
                return frames
            frames += self._reader.feed(piece)
            if self._reader.damaged:
                self._exit = Exit(detail="it sent an answer that cannot be read")
                return frames

    def _await_exit(self) -> None:
        """After the worker has closed its connection: waits for its end, which the supervisor
        reports.
        """
        deadline = Deadline(END_SECONDS)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        while self._exit is None and deadline.left:
            poll.poll(math.ceil(1000 * min(deadline.left, STEP_SECONDS)))
            self._listen()
        if self._exit is None:
            self._exit = Exit(detail="it closed its connection")

    def _listen(self) -> None:
        """Reads what the supervisor reports."""
        if self._exit is not None:
            return
        gone = self._guard.poll() is not None
        try:
            while piece := self._control.recv(_PIECE):
                self._said += piece
            gone = True
        except BlockingIOError:
            pass
        except OSError:
            gone = True
        *lines, self._said = self._said.split(b"\n")
        for line in lines:
            self._note(*line.decode().split(" ", 1))
        if gone and self._exit is None:
            self._exit = Exit(signal=signal.SIGKILL, detail="of its supervisor")

    def _note(self, word: str, rest: str) -> None:
        if word == "exit":
            self._exit = Exit(status=int(rest))
        elif word == "signal":
            self._exit = Exit(signal=int(rest))
        elif word == "memory":
            self._exit = Exit(memory=int(rest))
        else:
            self._exit = Exit(detail=rest)


def _python() -> list[str]:
    """Returns the interpreter, with the options of this process."""
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [os.fsdecode(spawn.get_executable()), *options, "-P"]


def _search_path() -> list[str]:
    """Returns where this process looks for modules, with its current folder as a path."""
    return [folder or str(Path.cwd()) for folder in sys.path if isinstance(folder, str)]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)

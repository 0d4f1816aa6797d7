"""A small process between the driver and a worker, which leaves nothing behind when either of them ends.

The driver starts this file as a script (see `processes`), with the plain interpreter and the standard library only. It
starts the worker in a session of its own, tells the driver over a socket how the worker ended, and kills the worker
with all its descendants

- when the worker has ended,
- when the driver closes the socket, sends SIGTERM, or is gone,
- when the worker and its descendants hold more memory than they may.

It does not depend on the worker's cooperation, so a worker that holds Python's global lock, ignores signals or hangs in
a driver's call ends too. As a subreaper it inherits orphans of the worker, in whatever session they are. Where it is
itself killed, the kernel kills the worker (PR_SET_PDEATHSIG, which is safe here: this process has one thread).

What it says to the driver, a line each:

    exit STATUS        it ended with an exit status
    signal NUMBER      it ended by a signal
    memory BYTES       it was killed because it held so many bytes
    failed REASON      it could not be started
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

MEMORY_PERIOD = 0.25  # seconds between two looks at the memory
DRIVER_PERIOD = 0.5  # seconds between two looks at the driver, where its end is not announced
KILL_SECONDS = 60.0  # after which what cannot be killed is left alone
_PDEATHSIG, _SUBREAPER = 1, 36  # of prctl
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # signals on which the worker is ended
_COUNTED = ("RssAnon:", "RssShmem:", "VmSwap:")  # in /proc/PID/status, what a process holds


class Order:
    """What the driver asks for: its own process, the two sockets, bounds in bytes (0: none), the worker's command."""

    def __init__(self, arguments: list[str]) -> None:
        numbers = map(int, arguments[:5])
        self.driver, self.control, self.connection, self.memory, self.data_limit = numbers
        self.command = arguments[5:]


class Supervisor:
    """Watches one worker from its start to its end."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.control = socket.socket(fileno=order.control)
        self.control.set_inheritable(False)
        self.control.setblocking(False)
        self.worker = 0
        self.status: int | None = None  # of the worker, as waitpid gives it
        self.held = 0  # bytes, if it was killed for them
        self.end_wanted = False

    def run(self) -> None:
        """Starts the worker, waits for the end of it, reports that and kills what is left."""
        prctl = _prctl()
        prctl(_SUBREAPER, 1)
        wakeups = self._listen()
        if os.getppid() != self.order.driver:
            return
        try:
            self.worker = self._start(prctl)
        except OSError as error:
            self._say(f"failed {error}")
            return
        os.close(self.order.connection)
        self._watch(wakeups)
        if self.held:
            self._say(f"memory {self.held}")
        elif self.status is not None:
            self._report(self.status)
        self._end_all()

    def _listen(self) -> int:
        """Lets signals wake this process through a pipe, whose reading end it returns."""
        wakeups, written = os.pipe()
        os.set_blocking(written, False)
        os.set_blocking(wakeups, False)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in _ENDS:
            signal.signal(number, self._on_end)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        return wakeups

    def _on_end(self, *_: object) -> None:
        self.end_wanted = True

    def _start(self, prctl: Callable[[int, int], None]) -> int:
        """Forks the worker; the child does not come back from here."""
        supervisor = os.getpid()
        child = os.fork()
        if child:
            return child
        try:
            os.setsid()
            prctl(_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:
                os._exit(1)
            self._prepare_worker()
            os.execv(self.order.command[0], self.order.command)
        finally:
            os._exit(127)

    def _prepare_worker(self) -> None:
        """What the worker inherits: signals as they are by default, its bound, and its place with the kernel's killer.

        SIGINT must end the process and not become an exception: what comes from outside is no config's doing.
        """
        signal.set_wakeup_fd(-1)
        for number in (*_ENDS, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        if self.order.data_limit:
            import resource

            resource.setrlimit(resource.RLIMIT_DATA, (self.order.data_limit, self.order.data_limit))
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("500")  # when memory runs out, a worker shall go before its driver

    def _watch(self, wakeups: int) -> None:
        """Returns when the worker has ended, or has to."""
        poll = select.poll()
        poll.register(wakeups, select.POLLIN)
        poll.register(self.control, select.POLLIN)
        driver = _open_process(self.order.driver)
        if driver is not None:
            poll.register(driver, select.POLLIN)
        periods = [MEMORY_PERIOD] * bool(self.order.memory) + [DRIVER_PERIOD] * (driver is None)
        timeout = min(periods) * 1000 if periods else None
        while self.status is None and not self.end_wanted and not self._too_much_memory():
            ready = dict(poll.poll(timeout))
            if wakeups in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wakeups, 4096)
            if self.control.fileno() in ready and self._closed():
                self.end_wanted = True
            if driver in ready or os.getppid() != self.order.driver:
                self.end_wanted = True
            self._reap()

    def _closed(self) -> bool:
        """Whether the driver has closed its end of the socket; it never writes to it."""
        try:
            return self.control.recv(64) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _too_much_memory(self) -> bool:
        if not self.order.memory:
            return False
        held = sum(map(_memory, [self.worker, *_descendants(self.worker)]))
        self.held = held if held > self.order.memory else 0
        return self.held > 0

    def _reap(self) -> None:
        """Takes note of children that have ended, orphans of the worker among them."""
        with contextlib.suppress(ChildProcessError):
            while True:
                child, status = os.waitpid(-1, os.WNOHANG)
                if child == 0:
                    return
                if child == self.worker:
                    self.status = status

    def _report(self, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        self._say(f"exit {code}" if code >= 0 else f"signal {-code}")

    def _end_all(self) -> None:
        """Kills the worker and all that it has started, until nothing of it is left."""
        if self.status is None:
            _kill(self.worker)
            with contextlib.suppress(OSError):  # where nobody can be asked for descendants
                os.killpg(self.worker, signal.SIGKILL)
        until = time.monotonic() + KILL_SECONDS
        pause = 0.002
        while time.monotonic() < until:
            for process in _descendants(os.getpid()):
                _kill(process)
            self._reap()
            if not _has_children():
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.2)

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the driver is gone
            self.control.send(f"{line}\n".encode())


def _prctl() -> Callable[[int, int], None]:
    """The system call of that name, or nothing where there is none."""
    if not sys.platform.startswith("linux"):
        return lambda option, value: None
    try:
        import ctypes

        function = ctypes.CDLL(None, use_errno=True).prctl
    except (ImportError, OSError, AttributeError):
        return lambda option, value: None
    return lambda option, value: function(option, value, 0, 0, 0) and None


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, signal.SIGKILL)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _open_process(process: int) -> int | None:
    """A descriptor that can be read once the process has ended; None where the kernel has none."""
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):
        return None


def _descendants(process: int) -> list[int]:
    """Children of a process, their children, and so on; nothing where there is no /proc."""
    children = _listed_children if os.path.exists(_children_file(os.getpid(), os.getpid())) else _searched_children()
    found: list[int] = []
    waiting = [process]
    while waiting:
        here = children(waiting.pop())
        found += here
        waiting += here
    return found


def _children_file(process: int, thread: int | str) -> str:
    return f"/proc/{process}/task/{thread}/children"


def _listed_children(process: int) -> list[int]:
    """As the kernel lists them."""
    try:
        threads = os.listdir(f"/proc/{process}/task")
    except OSError:
        return []
    return [int(child) for thread in threads for child in _read(_children_file(process, thread)).split()]


def _searched_children() -> Callable[[int], list[int]]:
    """The same from all processes there are, for kernels that keep no such lists."""
    found: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for name in filter(str.isdecimal, os.listdir("/proc")):
            facts = _read(f"/proc/{name}/stat").rpartition(")")[2].split()
            if facts:
                found.setdefault(int(facts[1]), []).append(int(name))
    return lambda process: found.get(process, [])


def _memory(process: int) -> int:
    """Bytes that a process holds for itself."""
    lines = _read(f"/proc/{process}/status").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(_COUNTED))


def _read(path: str) -> str:
    """What a file of /proc says; nothing once its process has ended."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


if __name__ == "__main__":
    Supervisor(Order(sys.argv[1:])).run()
    os._exit(0)

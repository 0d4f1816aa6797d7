"""Two small processes between the driver and a worker, which leave nothing behind when any of the
four ends.

The driver starts this file as a script (see `processes`), with the plain interpreter and only the
standard library. That process is the guard; it forks the supervisor. The supervisor starts the
worker in a separate session, reports over a socket to the driver how the worker ended, and kills
the worker with all its descendants

- when the worker has ended,
- when the driver closes the socket, sends SIGTERM to the guard, or is gone,
- when the worker and its descendants hold more memory than allowed.

Neither process depends on the worker's cooperation, so even a worker that holds Python's global
lock, ignores signals or hangs in a driver's call is ended. As subreapers they inherit orphans of
the worker, whatever session those are in. Where one of the two is killed, the other one does its
work, and the kernel kills the worker of a supervisor that is gone (PR_SET_PDEATHSIG, which is safe
here because these processes have one thread).

The supervisor sends one line to the driver before it closes the socket:

    exit STATUS        the worker ended with an exit status
    signal NUMBER      it ended by a signal
    memory BYTES       it was killed because it held this many bytes
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

MEMORY_PERIOD = 0.25  # seconds between two checks of the memory
PARENT_PERIOD = 0.5  # seconds between two checks of the parent, where its end is not announced
END_SECONDS = 5.0  # for the supervisor to end the worker, before the guard does
KILL_SECONDS = 60.0  # after which a process that cannot be killed is left alone
_PDEATHSIG, _SUBREAPER = 1, 36  # arguments of prctl
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # signals that request the end of the worker
# in /proc/PID/status: memory that only this process holds
_COUNTED = ("RssAnon:", "RssShmem:", "VmSwap:")


class Order:
    """The driver's order: its process, the two sockets, limits in bytes (0: none), and the worker's
    command.
    """

    def __init__(self, arguments: list[str]) -> None:
        numbers = map(int, arguments[:5])
        self.driver, self.control, self.connection, self.memory, self.data_limit = numbers
        self.command = arguments[5:]


class Signals:
    """Signals to this process, which wake it through a pipe. `end_wanted`: one of them requests the
    end.
    """

    def __init__(self) -> None:
        self.end_wanted = False
        self.open_pipe()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in _ENDS:
            signal.signal(number, self._on_end)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

    def open_pipe(self) -> None:
        """Opens the pipe. It must also be called after a fork, because two processes that share a
        pipe would take each other's notifications.
        """
        self.wakeups, written = os.pipe()
        os.set_blocking(self.wakeups, False)
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)

    def _on_end(self, *_: object) -> None:
        self.end_wanted = True

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakeups, 4096)


class Guard:
    """Watches the driver and the supervisor, and does the supervisor's work if that is killed."""

    def __init__(self, order: Order, signals: Signals, supervisor: int) -> None:
        self.order, self.signals, self.supervisor = order, signals, supervisor

    def run(self) -> None:
        os.close(self.order.control)  # so that the socket closes when the supervisor ends
        os.close(self.order.connection)
        poll = select.poll()
        poll.register(self.signals.wakeups, select.POLLIN)
        driver = _open_process(self.order.driver)
        if driver is not None:
            poll.register(driver, select.POLLIN)
        period = PARENT_PERIOD * 1000 if driver is None else None
        while not self._ended() and not self.signals.end_wanted:
            ready = dict(poll.poll(period))
            self.signals.clear()
            if driver in ready or os.getppid() != self.order.driver:
                self.signals.end_wanted = True

        until = time.monotonic() + END_SECONDS
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.supervisor, signal.SIGTERM)
        while not self._ended() and time.monotonic() < until:
            time.sleep(0.005)
        _end_descendants()

    def _ended(self) -> bool:
        """Returns whether the supervisor has ended."""
        try:
            return os.waitpid(self.supervisor, os.WNOHANG)[0] != 0
        except ChildProcessError:
            return True


class Supervisor:
    """Watches one worker from its start to its end."""

    def __init__(self, order: Order, signals: Signals, guard: int) -> None:
        self.order, self.signals, self.guard = order, signals, guard
        self.control = socket.socket(fileno=order.control)
        self.control.set_inheritable(False)
        self.control.setblocking(False)
        self.worker = 0
        self.status: int | None = None  # of the worker, from waitpid
        self.held = 0  # bytes that it held, if it was killed for them

    def run(self, prctl: Callable[[int, int], None]) -> None:
        """Starts the worker, waits for its end, reports that, and kills its remaining
        descendants.
        """
        prctl(_SUBREAPER, 1)  # a fork does not inherit this
        prctl(_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != self.guard:
            return
        try:
            self.worker = self._start(prctl)
        except OSError as error:
            self._say(f"failed {error}")
            return
        os.close(self.order.connection)
        self._watch()
        if self.held:
            self._say(f"memory {self.held}")
        elif self.status is not None:
            self._report(self.status)
        else:
            _kill(self.worker)
        _end_descendants()

    def _start(self, prctl: Callable[[int, int], None]) -> int:
        """Forks the worker; the child never returns from here."""
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
        """Sets what the worker inherits: default signal handlers, its memory limit, and its score
        for the kernel's OOM killer.

        SIGINT must end the process instead of raising an exception, because a signal from outside
        is not the fault of a config.
        """
        signal.set_wakeup_fd(-1)
        for number in (*_ENDS, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        if self.order.data_limit:
            import resource

            resource.setrlimit(resource.RLIMIT_DATA, (self.order.data_limit, self.order.data_limit))
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("500")  # when memory runs out, the worker is killed before its driver

    def _watch(self) -> None:
        """Returns when the worker has ended, or must end."""
        poll = select.poll()
        poll.register(self.signals.wakeups, select.POLLIN)
        poll.register(self.control, select.POLLIN)
        announced = sys.platform.startswith("linux")
        periods = [MEMORY_PERIOD] * bool(self.order.memory) + [PARENT_PERIOD] * (not announced)
        timeout = min(periods) * 1000 if periods else None
        while self.status is None and not self.signals.end_wanted and not self._too_much_memory():
            ready = dict(poll.poll(timeout))
            self.signals.clear()
            if self.control.fileno() in ready and self._closed():
                self.signals.end_wanted = True
            if os.getppid() != self.guard:
                self.signals.end_wanted = True
            self._reap()

    def _closed(self) -> bool:
        """Returns whether the driver has closed its end of the socket; it never writes to it."""
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
        """Notes children that have ended, including orphans of the worker."""
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

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the driver is gone
            self.control.send(f"{line}\n".encode())


def _prctl() -> Callable[[int, int], None]:
    """Returns the system call prctl, or a function that does nothing where it does not exist."""
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


def _end_descendants() -> None:
    """Kills all descendants of this process, until none is left."""
    until = time.monotonic() + KILL_SECONDS
    pause = 0.002
    while time.monotonic() < until:
        for process in _descendants(os.getpid()):
            _kill(process)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


def _open_process(process: int) -> int | None:
    """Returns a descriptor that becomes readable when the process ends; None where the kernel has
    none.
    """
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):
        return None


def _descendants(process: int) -> list[int]:
    """Returns the children of a process, their children, and so on; nothing where there is no
    /proc.
    """
    children = (
        _listed_children
        if os.path.exists(_children_file(os.getpid(), os.getpid()))
        else _searched_children()
    )
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
    """Returns the children of a process as the kernel lists them."""
    try:
        threads = os.listdir(f"/proc/{process}/task")
    except OSError:
        return []
    return [
        int(child) for thread in threads for child in _read(_children_file(process, thread)).split()
    ]


def _searched_children() -> Callable[[int], list[int]]:
    """Returns a function that finds children by searching all processes, for kernels without such
    lists.
    """
    found: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for name in filter(str.isdecimal, os.listdir("/proc")):
            facts = _read(f"/proc/{name}/stat").rpartition(")")[2].split()
            if facts:
                found.setdefault(int(facts[1]), []).append(int(name))
    return lambda process: found.get(process, [])


def _memory(process: int) -> int:
    """Returns the bytes that only this process holds."""
    lines = _read(f"/proc/{process}/status").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(_COUNTED))


def _read(path: str) -> str:
    """Returns the contents of a file in /proc; "" once its process has ended."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def main() -> None:
    """Becomes the guard, and in a fork the supervisor."""
    order = Order(sys.argv[1:])
    prctl = _prctl()
    prctl(_SUBREAPER, 1)
    signals = Signals()
    if os.getppid() != order.driver:
        return
    guard = os.getpid()
    supervisor = os.fork()
    if supervisor:
        Guard(order, signals, supervisor).run()
    else:
        signals.open_pipe()
        Supervisor(order, signals, guard).run(prctl)


if __name__ == "__main__":
    try:
        main()
    finally:
        os._exit(0)

"""The program of a worker process: a supervisor, and below it the worker that answers calls.

The driver starts this file by its path (see `processes`), because `-m` would import the package,
and torch with it, into a process that only waits. It imports the standard library alone; the
worker imports the modules that calls need before it reports that it is ready.

The supervisor forks the worker and waits. It kills the worker with all its descendants when the
worker has ended, when the driver sends SIGTERM, and when the driver is gone. Then it ends as the
worker ended, so its exit status tells the driver how that was. It needs no cooperation of the
worker, which may hold Python's global lock, ignore signals or hang in a call of the GPU's driver.
As a subreaper it inherits orphans of the worker, whatever session they are in. The kernel kills the
worker of a supervisor that is killed (PR_SET_PDEATHSIG, which is safe here because the supervisor
has one thread).

Messages are pickled, or JSON where the driver calls a function by its name, and each call has its
answer before the next one is sent:

    worker to driver   READY            it can take calls
    driver to worker   function, arguments
    worker to driver   ACCEPTED         the call has been read; a later death counts for the call
    worker to driver   True, result     or False, name and text of an exception
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pickle
import signal
import sys
import time
from multiprocessing.connection import Connection

READY, ACCEPTED = b"ready", b"accepted"
PERIOD = 0.25  # seconds between two looks for the driver
KILL_SECONDS = 60.0  # after which a process that cannot be killed is left alone
_PDEATHSIG, _SUBREAPER = 1, 36  # arguments of prctl
_ENDS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_AWAITED = _ENDS | {signal.SIGCHLD}


def describe_error(error: BaseException) -> tuple[str, str]:
    """Returns the qualified name of an error's class, and its text, as plain strings, whatever the
    class's methods do.
    """
    try:
        name = f"{type(error).__module__}.{type(error).__qualname__}"
    except BaseException:
        name = "an error without a name"
    try:
        text = _plain(str(error))
    except BaseException:
        text = "an error that cannot be shown"
    return _plain(name), text


def brief(error: BaseException) -> str:
    """Returns the class of an error and the first line of its text, at most 1000 characters."""
    name, text = describe_error(error)
    return f"{name.rpartition('.')[2]}: {text.strip().partition(chr(10))[0]}"[:1000]


def _plain(text: str) -> str:
    """Returns the text as an exact str that any encoder accepts; subclasses of str and lone
    surrogates may fail to encode.
    """
    return text.encode("utf-8", "backslashreplace").decode()


def serve(connection: Connection) -> None:
    """Answers calls until the driver closes its end."""
    connection.send_bytes(READY)
    while True:
        request = connection.recv_bytes()
        connection.send_bytes(ACCEPTED)
        connection.send_bytes(_answer(request))


def _answer(request: bytes) -> bytes:
    named = request.startswith(b"[")

    def encoded(*answer: object) -> bytes:
        return json.dumps(answer).encode() if named else pickle.dumps(answer)

    try:
        function, arguments = json.loads(request) if named else pickle.loads(request)
        if named:
            module, _, name = function.partition(":")
            function = getattr(importlib.import_module(module), name)
        return encoded(True, function(*arguments))
    except BaseException as error:  # any error is an answer, and this process continues
        return encoded(False, describe_error(error))


def work(connection: Connection, search_path: list[str], modules: list[str], memory: int) -> None:
    """Prepares this process and answers calls; never returns."""
    # A signal from outside must end the process, and not look like an error of a config.
    for number in _AWAITED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
    if memory:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("500")  # when memory runs out, the worker is killed before its driver
    sys.path[:] = search_path
    gc.disable()  # imported objects stay; scanning them took a fifth of the CPU time of a start
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    with contextlib.suppress(EOFError, OSError):  # the driver is gone
        serve(connection)
    os._exit(0)  # does not wait for threads that configs may have left


def supervise(driver: int, worker: int) -> int | None:
    """Waits until the worker ends, and returns its status as `os.waitpid` has it; None where it
    must be ended.
    """
    while os.getppid() == driver:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # orphans of the worker, too
                if ended[0] == worker:
                    return ended[1]
        arrived = signal.sigtimedwait(_AWAITED, PERIOD)
        if arrived is not None and arrived.si_signo in _ENDS:
            return None
    return None


def end_descendants() -> None:
    """Kills the children of this process until none is left; theirs become its own meanwhile."""
    until = time.monotonic() + KILL_SECONDS
    while time.monotonic() < until:
        for process in _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def _children() -> list[int]:
    """Returns the children of this process."""
    parents = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat") as file:
            parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    return [process for process, parent in parents.items() if parent == os.getpid()]


def end_like(status: int | None) -> None:
    """Ends this process as the worker ended."""
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


def main() -> None:
    """Runs a supervisor and its worker. The command line has the driver's process, a socket's
    number, the module search path as JSON, the bytes that a process may allocate (0: any number),
    and the modules to import.
    """
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    driver, number, search_path, memory = sys.argv[1:5]
    modules = sys.argv[5:]
    del sys.argv[1:]
    prctl(_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    supervisor = os.getpid()
    worker = os.fork()
    connection = Connection(int(number))
    if worker:
        connection.close()
        status = supervise(int(driver), worker)
        end_descendants()
        end_like(status)
    try:
        os.set_inheritable(connection.fileno(), False)
        os.setsid()
        prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == supervisor:
            work(connection, json.loads(search_path), modules, int(memory))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()

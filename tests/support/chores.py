"""What tests have worker processes do; imported there without torch."""

import ctypes
import os
import signal
import subprocess
import sys
import time

DEAF = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
if "daemon" in sys.argv and os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
time.sleep(1000)
"""


def start_child(*, session=False, daemon=False):
    """Starts a process that ignores SIGTERM, in a session of its own or also orphaned, and returns
    its number.
    """
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", DEAF, *["daemon"] * daemon],
        stdout=subprocess.PIPE,
        start_new_session=session,
    )
    return int(child.stdout.readline())


def family(_=None):
    """This process and three that it starts."""
    return [
        os.getpid(),
        start_child(),
        start_child(session=True),
        start_child(session=True, daemon=True),
    ]


def hold_gil(seconds) -> None:
    """Keeps Python's lock, which `time.sleep` does not."""
    ctypes.PyDLL(None).sleep(seconds)


def end(how) -> None:
    if isinstance(how, signal.Signals):
        os.kill(os.getpid(), how)
        time.sleep(1000)
    os._exit(how)


def end_soon(seconds) -> None:
    """After this call is over."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -KILL {os.getpid()}"])


def eat(mebibytes) -> None:
    eaten = [b"x" * (1 << 20) for _ in range(mebibytes)]
    time.sleep(1000 * len(eaten))


def facts():
    """What a worker has been given."""
    main = sys.modules["__main__"]
    return {
        "process": os.getpid(),
        "session": os.getsid(0),
        "interrupt": signal.getsignal(signal.SIGINT) == signal.SIG_DFL,
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "main": os.path.basename(main.__file__),
        "input": os.path.realpath("/proc/self/fd/0"),
        "path": sys.path,
        "marker": os.environ.get("MARKER"),
    }


class Spiteful(str):
    """A text that cannot be pickled."""

    def __reduce__(self) -> None:
        raise TypeError("stays here")


def returns(value):
    return value


def returns_spite():
    return Spiteful("x")


def raises(name) -> None:
    match name:
        case "str":
            raise type("Mute", (Exception,), {"__str__": lambda self: 1 / 0})
        case "spite":
            raise type("Odd", (Exception,), {"__str__": lambda self: Spiteful("said")})
        case "surrogate":
            raise ValueError("\udcff")
        case "name":
            raise type("Meta", (type,), {"__getattribute__": lambda *_: 1 / 0})(
                "Odd", (BaseException,), {}
            )
    raise {"interrupt": KeyboardInterrupt, "exit": SystemExit}[name]()

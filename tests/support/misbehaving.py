"""faulty_kernel with configs that attack whoever supervises them: their process, its signals, its
memory, its errors.

A fault whose name begins with "compile-" strikes where the config is compiled ahead, any other
where it is measured.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from support import faulty_kernel
from support.faulty_kernel import Config, NotAnException, footprint, space, unsupported

__all__ = ["Config", "footprint", "plan", "precompile", "space", "unsupported"]


class SilentError(Exception):
    """Cannot say what it is about."""

    def __str__(self) -> None:
        raise KeyboardInterrupt("not even this")


class Unsendable(Exception):
    """Cannot be pickled."""

    def __reduce__(self) -> None:
        raise TypeError("stays here")


class Unreadable(Exception):
    """Can be pickled and not be unpickled."""

    def __init__(self, text, line) -> None:
        super().__init__(text)


RAISED: dict[str, Callable[[], BaseException]] = {
    "keyboard-interrupt": KeyboardInterrupt,
    "generator-exit": GeneratorExit,
    "system-exit": lambda: SystemExit(3),
    "own-base": lambda: NotAnException("mine"),
    "silent": SilentError,
    "unsendable": Unsendable,
    "unreadable": lambda: Unreadable("where", 1),
}
SIGNALS = {
    "sigkill": signal.SIGKILL,
    "sigterm": signal.SIGTERM,
    "sigint": signal.SIGINT,
    "sighup": signal.SIGHUP,
}


def plan(problem, config=None):
    launch = faulty_kernel.plan(problem, config)

    def misbehaving(a, b, c, out, alpha, beta):
        strike(config.fault if config else "")
        launch(a, b, c, out, alpha, beta)

    return misbehaving


def precompile(problem, config, arch) -> None:
    faulty_kernel.precompile(problem, config, arch)
    time.sleep(config.sleep / 1000)
    when, _, fault = config.fault.partition("-")
    if when == "compile":
        strike(fault)


def strike(fault) -> None:
    """Does what a fault is named for; "-once" at its end: only the first process that
    comes to it.
    """
    once = fault.endswith("-once")
    fault = fault.removesuffix("-once")
    if once and _marked(fault):
        return
    if fault in RAISED:
        raise RAISED[fault]()
    if fault in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault])
        time.sleep(20)
    if fault == "children":
        leave_children()
        time.sleep(1000)


def leave_children() -> None:
    """A child that ignores what asks it to end, and one in a session of its own; their numbers go
    into the log.
    """
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print(flush=True); "
        "time.sleep(1000)"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", deaf], stdout=subprocess.PIPE, start_new_session=session
        )
        for session in (False, True)
    ]
    for child in children:
        child.stdout.readline()
    with open(os.environ["FAULTY_LOG"] + ".children", "a") as log:
        log.write("".join(f"{child.pid}\n" for child in children))


def children():
    """The numbers of processes that `leave_children` left."""
    log = Path(os.environ["FAULTY_LOG"] + ".children")
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def _marked(fault):
    """Whether a process has been here before."""
    try:
        os.close(os.open(f"{os.environ['FAULTY_LOG']}.{fault}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return True
    return False

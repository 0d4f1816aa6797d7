"""Ctrl-C and SIGTERM: the first ends a command in order, the second at once."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

_SHOW_CURSOR = b"\x1b[?25h"  # which a live view hides


@dataclass
class Interrupts:
    """What has been received; None so far."""

    signal: int | None = None

    @property
    def exit_code(self) -> int:
        """The exit status that shells give: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + (self.signal or signal.SIGINT)


@contextlib.contextmanager
def handled() -> Iterator[Interrupts]:
    """Within, the first signal raises KeyboardInterrupt and the second ends the process at once:
    its workers follow, and what it has stored is on disk. A signal that is ignored stays so, as in
    a shell's background jobs.
    """
    received = Interrupts()

    def handle(number: int, frame: FrameType | None) -> None:
        if received.signal is not None:
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), _SHOW_CURSOR)
            os._exit(128 + number)
        received.signal = number
        raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, handle)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def same_command(*, without: str = "") -> str:
    """The command line of this process, for a shell, without an option that is not to be given
    again.
    """
    return shlex.join(["outblas", *(part for part in sys.argv[1:] if part != without)])

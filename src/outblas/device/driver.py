"""Questions to the CUDA driver that torch does not ask: which context is current, which stream a
handle stands for, whether a thread's calls may disturb a capture.

Every answer is None, and `relaxed_capture` does nothing, where there is no driver or it is older
than the question.
"""

import contextlib
import ctypes
import functools
import itertools
import threading
from collections.abc import Callable, Iterator

# Handles that stand for another stream in every context, or in every thread.
LEGACY, PER_THREAD = 1, 2
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

_thread = threading.local()
_threads = itertools.count()


@functools.cache
def _function(name: str) -> Callable[..., int] | None:
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):
        return None
    return function


def context() -> int | None:
    """The number of the calling thread's CUDA context, which no other context of the process ever
    has. A thread that has not used the GPU yet has none: it will get the primary one."""
    return _number("cuCtxGetId", None)


def stream_id(handle: int) -> int | None:
    """The number of a live stream, which no other stream of the process ever has. Not for a stream
    that is being captured, nor for the handles 0 to 2."""
    return _number("cuStreamGetId", ctypes.c_void_p(handle))


def _number(name: str, of: ctypes.c_void_p | None) -> int | None:
    function = _function(name)
    if function is None:
        return None
    number = ctypes.c_ulonglong()
    return number.value if function(of, ctypes.byref(number)) == 0 else None


def thread() -> int:
    """The number of the calling thread; unlike `threading.get_ident`, no later thread has it
    again."""
    try:
        number: int = _thread.number
    except AttributeError:
        number = _thread.number = next(_threads)
    return number


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Lets the calling thread allocate, load and wait while another thread captures a CUDA graph:
    by default the driver refuses such calls then, and the other thread's capture fails too. What is
    called must have nothing to do with the captured streams."""
    exchange, mode = _function("cuThreadExchangeStreamCaptureMode"), ctypes.c_int(_RELAXED)
    changed = exchange is not None and exchange(ctypes.byref(mode)) == 0
    try:
        yield
    finally:
        if exchange is not None and changed:
            exchange(ctypes.byref(mode))  # which now holds the mode before

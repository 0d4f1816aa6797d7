"""Queries to the CUDA driver that torch does not offer: the current context, the stream behind a
handle, and the capture mode of a thread.

Where there is no driver, or it is too old for a query, every function returns None and
`relaxed_capture` does nothing.
"""

import contextlib
import ctypes
import functools
import itertools
import threading
from collections.abc import Callable, Iterator

# Handles that stand for a different stream in every context, or in every thread.
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
    """Returns the id of the calling thread's CUDA context, which is unique in the process for all
    time. Returns None for a thread that has not used the GPU yet; it will get the primary context.
    """
    return _number("cuCtxGetId", None)


def stream_id(handle: int) -> int | None:
    """Returns the id of a live stream, which is unique in the process for all time. Do not pass a
    stream that is being captured, nor the handles 0 to 2.
    """
    return _number("cuStreamGetId", ctypes.c_void_p(handle))


def _number(name: str, of: ctypes.c_void_p | None) -> int | None:
    function = _function(name)
    if function is None:
        return None
    number = ctypes.c_ulonglong()
    return number.value if function(of, ctypes.byref(number)) == 0 else None


def thread() -> int:
    """Returns the id of the calling thread. Unlike `threading.get_ident`, it is never reused."""
    try:
        number: int = _thread.number
    except AttributeError:
        number = _thread.number = next(_threads)
    return number


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allows the calling thread to allocate, load and wait while another thread captures a CUDA
    graph. By default the driver refuses such calls during a capture, and the capture fails too.
    Inside this context, call nothing that involves the captured streams.
    """
    exchange, mode = _function("cuThreadExchangeStreamCaptureMode"), ctypes.c_int(_RELAXED)
    changed = exchange is not None and exchange(ctypes.byref(mode)) == 0
    try:
        yield
    finally:
        if exchange is not None and changed:
            exchange(ctypes.byref(mode))  # mode now holds the previous mode

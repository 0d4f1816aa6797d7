"""What torch does not offer of the CUDA driver: the current context, the stream behind a handle,
the capture mode of a thread, and loading and launching machine code.

Where there is no driver, or it is too old for a query, every query returns None and
`relaxed_capture` does nothing. What loads and launches raises RuntimeError then.
"""

import contextlib
import ctypes
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")

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


def cuda_version() -> int | None:
    """Returns the version of CUDA that the driver supports, 13010 for 13.1; None without one."""
    function, version = _function("cuDriverGetVersion"), ctypes.c_int()
    if function is None or function(ctypes.byref(version)):
        return None
    return version.value


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


def for_good(device: torch.device, make: Callable[[], T]) -> T:
    """Returns what `make` allocates and fills, ready for use on every stream: the GPU work of
    `make` has finished when this returns.

    A separate thread calls `make` on the default stream of the device's primary context, for two
    reasons: the memory does not come from a pool that the caller's allocations go to (Inductor uses
    one before it captures a graph, and frees it later), and a capture of a CUDA graph in another
    thread continues undisturbed.
    """

    def made() -> T:
        with relaxed_capture(), torch.cuda.device(device):
            tensors = make()
            torch.cuda.current_stream().synchronize()
        return tensors

    with ThreadPoolExecutor(1) as other:
        return other.submit(made).result()


@functools.cache
def background() -> ThreadPoolExecutor:
    """Returns the thread for what waits for a GPU while calls go on: one job after the other."""
    return ThreadPoolExecutor(1, "outblas-gpu")


if hasattr(os, "register_at_fork"):  # a child has none of the threads
    os.register_at_fork(after_in_child=background.cache_clear)


# ---- machine code
def _call(name: str, *given: Any) -> None:
    """Calls a function of the driver. Raises RuntimeError where it fails."""
    function = _function(name)
    if function is None:
        raise RuntimeError(f"the CUDA driver has no {name}")
    if status := function(*given):
        raise RuntimeError(f"{name} of the CUDA driver failed with {status}")


def ensure_context(device: int) -> None:
    """Makes the primary context of a GPU current, as torch does, in a thread without any."""
    current = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(current))
    if current.value:
        return
    handle, primary = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(handle), device)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(primary), handle)
    _call("cuCtxSetCurrent", primary)


def load_module(code: bytes) -> ctypes.c_void_p:
    """Loads machine code into the current context, for as long as that lives."""
    module = ctypes.c_void_p()
    _call("cuModuleLoadData", ctypes.byref(module), code)
    return module


def module_function(module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
    """Returns a kernel of a module."""
    function = ctypes.c_void_p()
    _call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    return function


def set_attribute(function: ctypes.c_void_p, attribute: int, value: int) -> None:
    """Sets an attribute of a kernel, such as how much shared memory a launch may ask for."""
    _call("cuFuncSetAttribute", function, attribute, value)


def launch(
    function: ctypes.c_void_p,
    grid: tuple[int, int, int],
    threads: int,
    shared: int,
    stream: int,
    parameters: Sequence[Any],
) -> None:
    """Starts a kernel on a stream. `parameters` are C values."""
    addresses = (ctypes.c_void_p * len(parameters))(*map(ctypes.addressof, parameters))
    sizes = (*grid, threads, 1, 1, shared)
    _call("cuLaunchKernel", function, *sizes, ctypes.c_void_p(stream), addresses, None)

"""When a kernel is compiled that is neither loaded nor cached: the environment variable
OUTBLAS_COMPILE.

By default a process beside this one compiles it (`compile_worker`), and the call is computed by
torch meanwhile. A call is planned within `deferred` for that; whatever else needs a kernel compiles
it at once, and so does such a call where `must_wait` says that torch must not stand in.
"""

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from outblas.base import forks

ENVIRONMENT = "OUTBLAS_COMPILE"
BACKGROUND, BLOCK, NEVER = MODES = ("background", "block", "never")

# How many compiles of the worker have ended, well or not: what was pending may be planned anew,
# unless its own kernel is among those that have not, by where they are to be on disk.
generation = 0
unfinished: set[object] = set()


class CompileForbidden(RuntimeError):
    """A kernel is neither in a pack nor in the cache, and OUTBLAS_COMPILE forbids to compile it."""

    def __init__(self, kernel: object) -> None:
        super().__init__(f"{ENVIRONMENT} is {NEVER}, and neither a pack nor the cache has {kernel}")


class CompilePending(CompileForbidden):
    """A kernel is being compiled by the worker. When `generation` has changed, it may be ready.

    Attributes:
        place: its place among those `unfinished`.
    """

    def __init__(self, kernel: object, place: object = None) -> None:
        RuntimeError.__init__(self, f"{kernel} is being compiled")
        self.place = place


class CompileFailed(CompileForbidden):
    """The worker could not compile a kernel, and does not try again."""

    def __init__(self, kernel: object, reason: str) -> None:
        RuntimeError.__init__(self, f"{kernel} could not be compiled: {reason}")


def mode() -> str:
    """Returns the value of OUTBLAS_COMPILE. Raises ValueError for one that does not exist."""
    value = os.environ.get(ENVIRONMENT) or BACKGROUND
    if value not in MODES:
        raise ValueError(f"{ENVIRONMENT} is {value!r}, expected one of {', '.join(MODES)}")
    return value


def forbidden() -> bool:
    """Returns whether nothing may be compiled. Raises ValueError for a value of OUTBLAS_COMPILE
    that does not exist.
    """
    return mode() == NEVER


def check_allowed(kernel: object) -> None:
    """Raises CompileForbidden where nothing may be compiled."""
    if forbidden():
        raise CompileForbidden(kernel)


# ---- who waits for a compile
class _Thread(threading.local):
    """deferring: whether what this thread plans can be computed without the kernel. ahead: whether
    it plans what nobody has called.
    """

    deferring = ahead = False


_thread = _Thread()
_waiting = 0  # contexts of `waiting` in all threads: autograd has threads of its own
_counting = forks.Lock()


@contextlib.contextmanager
def deferred(wanted: bool = True) -> Iterator[None]:
    """Within it this thread leaves kernels that are nowhere to the worker, if `defers` says so:
    `cache.fetch` raises CompilePending.
    """
    before, _thread.deferring = _thread.deferring, wanted
    try:
        yield
    finally:
        _thread.deferring = before


@contextlib.contextmanager
def ahead() -> Iterator[None]:
    """Within it this thread leaves kernels to the worker, because it plans what nobody has called.
    These are compiled after those that calls want.
    """
    _thread.ahead = True
    try:
        yield
    finally:
        _thread.ahead = False


def is_ahead() -> bool:
    """Returns whether this thread plans what nobody has called."""
    return _thread.ahead


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Within it no thread of this process leaves kernels to the worker."""
    global _waiting
    with _counting:
        _waiting += 1
    try:
        yield
    finally:
        with _counting:
            _waiting -= 1


def defers() -> bool:
    """Returns whether a kernel that is nowhere is left to the worker."""
    if not _thread.deferring:
        return False
    return _thread.ahead or (mode() == BACKGROUND and not must_wait())


def must_wait() -> bool:
    """Returns whether a call must have its kernel at once, because torch in its place would break a
    promise: that the same call gives the same bits (deterministic mode, a forward pass that is
    computed again, ranks that compute the same), that torch computes nothing (OUTBLAS_STRICT), or
    that what ran before can be captured in a CUDA graph. Calls that warm up for a capture run on a
    stream of their own, or in a compiled program.
    """
    import torch

    return bool(
        _waiting
        or os.environ.get("OUTBLAS_STRICT") == "1"
        or torch.are_deterministic_algorithms_enabled()
        or (torch.distributed.is_available() and torch.distributed.is_initialized())
        or (
            torch.cuda.is_initialized()
            and torch.cuda.current_stream() != torch.cuda.default_stream()
        )
        or _is_repeated()
    )


def _is_repeated() -> bool:
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        if _repeats(caller.f_code.co_filename):
            return True
        frame = caller
    return False


@functools.cache
def _repeats(file: str) -> bool:
    """Returns whether a file of torch runs compiled programs, whose graphs of CUDA are recorded
    after a few calls, or computes a forward pass a second time.
    """
    import torch

    folder = Path(torch.__file__).parent
    parts = "utils/checkpoint.py", "_inductor", "_functorch/_aot_autograd"
    return file.startswith(tuple(str(folder / part) for part in parts))


def end_generation() -> None:
    """Tells plans that wait for a kernel that a compile has ended."""
    global generation
    with _counting:
        generation += 1

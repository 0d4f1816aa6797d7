"""How many SMs products leave to other kernels: torch's setting for its own products, and the limit
of a single call.

torch has one setting for the whole process. Contexts of several threads share it through a list of
those that have not ended. The limit of a call stays in its thread, where plans and their keys read
it; torch's setting takes part only while torch itself computes the call.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

from outblas.base import forks
from outblas.base.compat.torch_private import get_sm_carveout, set_sm_carveout

P = ParamSpec("P")
T = TypeVar("T")


def sm_carveout(count: int) -> contextlib.AbstractContextManager[None]:
    """Return a context manager within which products leave SMs to other kernels.

    A product that runs beside communication slows it down if it occupies every SM, and waits for
    it where it finds none free. Within the context the kernels of Hopper GPUs (`hopper.gemm` and
    `hopper.grouped`) run on all SMs but `count`. Calls that other kernels of outblas would compute
    are left to torch, and those that name one of them raise ValueError.

    The setting is torch's own for its products, for the whole process: a program that sets it for
    torch has set it for outblas. Where contexts overlap, in one thread or in several, the largest
    count holds. It counts when a call is made, or captured; what a CUDA graph recorded stays as it
    is. Kernels that only pass over memory, such as `quantize`, do not keep it. One call has the
    argument `sms` in its place.

    Args:
        count: The number of SMs, at least 0. At least one SM, or one cluster, computes.

    Returns:
        The context manager. When the last one that overlaps with it ends, the setting is what it
        was before the first.

    Raises:
        TypeError: `count` is no int.
        ValueError: `count` is negative.
        RuntimeError: This version of torch has no such setting.

    Example:
        >>> import torch, outblas
        >>> a, b = torch.randn(32, 16), torch.randn(16, 8)
        >>> with outblas.sm_carveout(16):
        ...     y = outblas.matmul(a, b)
        >>> torch.equal(y, a @ b)
        True
    """
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"count is {type(count).__name__}, expected an int")
    if count < 0:
        raise ValueError(f"count is {count}, expected at least 0")
    if set_sm_carveout is None:
        raise RuntimeError("this version of torch has no setting for SMs that products leave free")
    return _within(count)


_lock = forks.Lock()
_counts: list[int] = []  # of the contexts that have not ended, in any thread
_before: int | None = None  # torch's setting before the first of them


@contextlib.contextmanager
def _within(count: int) -> Iterator[None]:
    global _before
    assert set_sm_carveout is not None, "`sm_carveout` asks"
    with _lock:
        if not _counts:
            _before = get_sm_carveout()
        _counts.append(count)
        set_sm_carveout(max(_counts))
    try:
        yield
    finally:
        with _lock:
            _counts.remove(count)
            set_sm_carveout(max(_counts, default=_before))


# ---- the limit of a call
class _Thread(threading.local):
    """count: the SMs that the call of this thread leaves free; 0 without a limit."""

    count = 0


_thread = _Thread()


class CallLimit:
    """The limit of the call that is running in this thread.

    Attributes:
        ever: Whether a call ever had a limit in this process. Until then calls look no further.
        on_change: Called with the SMs to leave free in this thread, and with 0 after the call.
    """

    ever = False
    on_change: Callable[[int], None] | None = None

    @staticmethod
    def count() -> int:
        """Returns how many SMs the call leaves free; 0 without a limit."""
        return _thread.count

    @contextlib.contextmanager
    def within(self, count: int) -> Iterator[None]:
        """Calls within the context leave so many SMs free."""
        self.ever, before = True, _thread.count
        self._change(count)
        try:
            yield
        finally:
            self._change(before)

    def _change(self, count: int) -> None:
        _thread.count = count
        if self.on_change is not None:
            self.on_change(count)


call_limit = CallLimit()


def limit(sms: int, *operands: Any) -> contextlib.AbstractContextManager[None]:
    """Returns a context within which this thread's products of these operands use at most so many
    SMs of their device, or fewer where torch's setting leaves fewer. Without a GPU it changes
    nothing.

    Raises TypeError or ValueError for what is no number of SMs, and in a program that is compiled,
    whose graph would not have it.
    """
    if not isinstance(sms, int) or isinstance(sms, bool):
        raise TypeError(f"sms is {type(sms).__name__}, expected an int or None")
    if sms < 1:
        raise ValueError(f"sms is {sms}, expected at least 1")
    if torch.compiler.is_compiling():  # breaks the graph, or is the error of a full graph
        raise ValueError(
            f"sms is {sms} in a program that is compiled, expected None: call the program within "
            "outblas.sm_carveout"
        )
    count = _present(operands) - sms
    return call_limit.within(count) if count > reserved() else contextlib.nullcontext()


def limited(function: Callable[P, T], sms: int, *operands: Any) -> Callable[P, T]:
    """Returns a function whose calls have the `limit` of these operands."""

    def within_limit(*args: P.args, **kwargs: P.kwargs) -> T:
        with limit(sms, *operands):
            return function(*args, **kwargs)

    return within_limit


def kept_by_torch(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function that computes a call by torch's products: these keep its limit.

    It becomes torch's setting, for the whole process: products that other threads launch meanwhile
    leave as many SMs free. Without tensors on a GPU nothing is set.
    """

    @functools.wraps(function)
    def limited(*args: P.args, **kwargs: P.kwargs) -> T:
        # A compiled program has no limit, and is not to be compiled again for one elsewhere.
        count = not torch.compiler.is_compiling() and call_limit.ever and call_limit.count()
        if count and any(isinstance(t, torch.Tensor) and t.is_cuda for t in args):
            with sm_carveout(count):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return limited


def _present(operands: Iterable[Any]) -> int:
    """Returns how many SMs the device of the operands has; 0 without a GPU."""
    for t in operands:
        if isinstance(t, torch.Tensor) and t.is_cuda:
            return int(torch.cuda.get_device_properties(t.device).multi_processor_count)
    return 0


def reserved() -> int:
    """Returns how many SMs the products of this thread are to leave free."""
    # A limit that is set is larger than torch's setting was.
    return (call_limit.ever and call_limit.count()) or get_sm_carveout() or 0


def usable(present: int, asked: int, count: int, cluster: int = 1) -> int:
    """Returns how many of the `present` SMs a kernel may use that would use `asked`, or all where
    that is 0, and leaves `count` free: enough for one cluster at least.
    """
    return max(min(asked or present, present - count), cluster)

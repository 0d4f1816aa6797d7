"""How many SMs products leave to other kernels: torch's setting for its own products."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .compat.torch_private import get_sm_carveout, set_sm_carveout


def sm_carveout(count: int) -> contextlib.AbstractContextManager[None]:
    """Return a context manager within which products leave SMs to other kernels.

    A product that runs beside communication slows it down if it occupies every SM, and waits for
    it where it finds none free. Within the context the kernels of Hopper GPUs (`hopper.gemm` and
    `hopper.grouped`) run on all SMs but `count`. Calls that other kernels of outblas would compute
    are left to torch, and those that name one of them raise ValueError.

    The setting is torch's own for its products, for the whole process: a program that sets it for
    torch has set it for outblas. It counts when a call is made, or captured; what a CUDA graph
    recorded stays as it is. Kernels that only pass over memory, such as `quantize`, do not keep it.
    One call has the argument `sms` in its place.

    Args:
        count: The number of SMs, at least 0. At least one SM, or one cluster, computes.

    Returns:
        The context manager. At its end the setting is what it was before.

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


def limit(sms: int, *operands: Any) -> contextlib.AbstractContextManager[None]:
    """Returns a context within which a product of these operands uses at most so many SMs of their
    device, or fewer where torch's setting leaves fewer. Without a GPU it changes nothing.

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
    return sm_carveout(count) if count > reserved() else contextlib.nullcontext()


def _present(operands: Iterable[Any]) -> int:
    """Returns how many SMs the device of the operands has; 0 without a GPU."""
    for t in operands:
        if isinstance(t, torch.Tensor) and t.is_cuda:
            return int(torch.cuda.get_device_properties(t.device).multi_processor_count)
    return 0


@contextlib.contextmanager
def _within(count: int) -> Iterator[None]:
    assert set_sm_carveout is not None, "`sm_carveout` asks"
    before = get_sm_carveout()
    set_sm_carveout(count)
    try:
        yield
    finally:
        set_sm_carveout(before)


def reserved() -> int:
    """Returns how many SMs products are to leave free."""
    return get_sm_carveout() or 0


def usable(present: int, asked: int, count: int, cluster: int = 1) -> int:
    """Returns how many of the `present` SMs a kernel may use that would use `asked`, or all where
    that is 0, and leaves `count` free: enough for one cluster at least.
    """
    return max(min(asked or present, present - count), cluster)

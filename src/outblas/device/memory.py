"""GPU memory that is kept until the process ends."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from . import driver

T = TypeVar("T")


def for_good(device: torch.device, make: Callable[[], T]) -> T:
    """What `make` allocates and fills, ready for every stream: its work has ended when this
    returns, so that whatever is launched afterwards, on whichever stream, comes later.

    A thread of its own calls `make`, on the default stream of the device's primary context. A pool
    into which the caller's allocations go, as Inductor's before it captures a graph, gives its
    memory away again. Another thread's capture of a CUDA graph goes on beside it.
    """

    def made() -> T:
        with driver.relaxed_capture(), torch.cuda.device(device):
            tensors = make()
            torch.cuda.current_stream().synchronize()
        return tensors

    with ThreadPoolExecutor(1) as other:
        return other.submit(made).result()

"""GPU memory that is kept until the process ends."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from outblas.device import driver

T = TypeVar("T")


def for_good(device: torch.device, make: Callable[[], T]) -> T:
    """Returns what `make` allocates and fills, ready for use on every stream: the GPU work of
    `make` has finished when this returns.

    A separate thread calls `make` on the default stream of the device's primary context, for two
    reasons: the memory does not come from a pool that the caller's allocations go to (Inductor uses
    one before it captures a graph, and frees it later), and a capture of a CUDA graph in another
    thread continues undisturbed.
    """

    def made() -> T:
        with driver.relaxed_capture(), torch.cuda.device(device):
            tensors = make()
            torch.cuda.current_stream().synchronize()
        return tensors

    with ThreadPoolExecutor(1) as other:
        return other.submit(made).result()

"""Memory on a GPU that is kept for good."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def for_good(device: torch.device, make: Callable[[], T]) -> T:
    """What `make` allocates, ready for every stream. A thread of its own does it, on its default stream: a pool into
    which the caller's allocations go, as Inductor's before it captures a graph, gives its memory away again.
    """

    def made() -> T:
        with torch.cuda.device(device):
            tensors = make()
            torch.cuda.current_stream().synchronize()
        return tensors

    with ThreadPoolExecutor(1) as other:
        return other.submit(made).result()

"""CUDA graphs: what a capture must find ready, and what makes it so."""

from collections.abc import Callable
from typing import Any

import torch


def capturing(device: torch.device) -> bool:
    """Whether the current stream of a GPU is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def not_ready() -> RuntimeError:
    """The error for a call that would compile, load or copy while a graph is captured."""
    return RuntimeError(
        "a CUDA graph is being captured, and the kernel of this call is not on the GPU yet: "
        "outblas.warmup(function, *args) puts it there, or make the same call once before capturing"
    )


def warmup(function: Callable[..., object], /, *args: Any, **kwargs: Any) -> None:
    """Calls `function(*args, **kwargs)` once, so that a CUDA graph can capture it: all kernels of
    its products, and of their backward passes if it runs them, are then on the GPU, for tensors of
    the same shapes, strides and dtypes.

    It runs on a stream of its own, as torch recommends, of the current GPU, and the current stream
    waits for it; without a GPU it just runs. Raises RuntimeError inside a capture, TypeError for a
    `function` that is none.
    """
    if not callable(function):
        raise TypeError(f"function is {type(function).__name__}, expected something to call")
    if not torch.cuda.is_available():
        function(*args, **kwargs)
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph is being captured: call outblas.warmup before, not inside")
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        function(*args, **kwargs)
    current.wait_stream(side)

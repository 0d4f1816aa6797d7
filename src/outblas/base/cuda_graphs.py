"""CUDA graphs: what a capture must find ready, and what makes it so."""

from collections.abc import Callable
from typing import Any

import torch

from outblas.base import compiling


def capturing(device: torch.device) -> bool:
    """Whether the current stream of a GPU is being captured into a CUDA graph."""
    if device.type != "cuda":
        return False
    if torch.cuda.device_count() > 1:  # torch asks for the stream of the current GPU
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()
    return torch.cuda.is_current_stream_capturing()


def not_ready() -> RuntimeError:
    """The error for a call that would compile, load or copy while a graph is captured."""
    return RuntimeError(
        "a CUDA graph is being captured, and the kernel of this call is not on the GPU yet: "
        "outblas.warmup(function, *args) puts it there"
    )


def warmup(function: Callable[..., object], /, *args: Any, **kwargs: Any) -> None:
    """Call a function once, so that a CUDA graph can capture the same call afterwards.

    The call compiles and loads the kernels of all products in it, and of their backward passes if
    the function runs them. A capture can then repeat it with tensors of the same shapes, strides
    and dtypes.

    The function runs on a stream of its own on the current GPU, as torch recommends, and the
    current stream waits for it. Without a GPU it is simply called.

    Args:
        function: What is called: `outblas.matmul`, a module, or any function that calls them.
        *args: Its positional arguments.
        **kwargs: Its keyword arguments.

    Raises:
        TypeError: `function` is not callable.
        RuntimeError: A CUDA graph is being captured already.

    Example:
        >>> import torch, outblas
        >>> device = "cuda" if torch.cuda.is_available() else "cpu"
        >>> a, b = torch.randn(2, 64, 64, device=device).unbind()
        >>> outblas.warmup(outblas.matmul, a, b, activation="relu")
    """
    if not callable(function):
        raise TypeError(f"function is {type(function).__name__}, expected something to call")
    if not torch.cuda.is_available():
        with compiling.waiting():
            function(*args, **kwargs)
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph is being captured: call outblas.warmup before, not inside")
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side), compiling.waiting():
        function(*args, **kwargs)
    current.wait_stream(side)

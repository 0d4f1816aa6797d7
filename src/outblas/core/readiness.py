"""Determines whether weights may be loaded before earlier kernels have ended, which is the caller's
promise.
"""

import contextlib

from outblas.core.context_flag import ContextFlag

flag = ContextFlag("weights_ready")


def weights_ready(enabled: bool = True) -> contextlib.AbstractContextManager[None]:
    """Return a context manager within which layers may load weights early.

    The caller promises that no kernel which may still run writes the weights of these layers, as
    holds in inference. A layer of few rows (at most 64) then starts before the previous kernel of
    the stream has ended, and has filled shared memory with weights when it ends. Everything else
    that the layer reads or writes waits for that kernel: the input, bias, residual and output.

    The context holds for eager calls of `linear` and of the layers that call it (`Linear`, and
    those that `patch` has swapped), and for CUDA graphs that are captured within it. It changes no
    result. Calls of `matmul` and `addmm`, compiled graphs, layers whose weight needs a gradient,
    and GPUs other than sm_90 do not use it.

    It holds for the thread, or the asyncio task, that enters it. Contexts nest.

    Args:
        enabled: False ends the promise inside an outer context.

    Returns:
        The context manager.

    Raises:
        TypeError: `enabled` is no bool.

    Example:
        >>> import torch, outblas
        >>> layer = torch.nn.Linear(64, 32)
        >>> with torch.inference_mode(), outblas.weights_ready():
        ...     y = outblas.linear(torch.ones(4, 64), layer.weight, layer.bias)
        >>> y.shape
        torch.Size([4, 32])
    """
    return flag.within(enabled)

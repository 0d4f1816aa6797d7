"""Flags that are on or off within a context, and cost calls nothing until they were first used."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar


class ContextFlag:
    """A flag of the thread, or the asyncio task, that enters a context.

    Attributes:
        ever: Whether a context was ever entered in this process. Until then calls look no further,
            and Dynamo, which guards on this, knows the answer.
        requested: Returns the value within the current context. Dynamo cannot trace it.
    """

    def __init__(self, name: str) -> None:
        self._value: ContextVar[bool] = ContextVar(name, default=False)
        self.requested = self._value.get
        self.ever = False

    def within(self, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager within which the flag has this value. Raises TypeError."""
        check_bool(enabled, "enabled")
        return self._within(enabled)

    @contextlib.contextmanager
    def _within(self, enabled: bool) -> Iterator[None]:
        self.ever = self.ever or enabled
        token = self._value.set(enabled)
        try:
            yield
        finally:
            self._value.reset(token)


def check_bool(value: object, name: str) -> None:
    """Raises TypeError for an argument that is no bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {type(value).__name__}, expected a bool")


# Whether backward passes may add the gradient of a weight to its `.grad` by the product itself.
accumulation = ContextFlag("accumulate_gradients")
# Whether weights may be loaded before earlier kernels have ended, as the caller promises.
readiness = ContextFlag("weights_ready")


def accumulate_gradients(enabled: bool = True) -> contextlib.AbstractContextManager[None]:
    """Return a context manager within which layers add to the `.grad` of their weights in place.

    The backward pass of a layer whose forward pass ran within it computes `weight.grad += gᵀ x` as
    one product with an addend. Otherwise the product is stored, and autograd reads it and `.grad`
    to write the sum. The sum is rounded once, where autograd rounds the product and then the sum.

    It holds for eager calls of `linear` with rows along K, and of the layers that call it
    (`Linear`, and those that `patch` has swapped), where the weight has a contiguous `.grad` of its
    own dtype already: gradients of a first micro-batch are returned to autograd as ever. So are
    those of a weight that has hooks (`register_hook`, `register_post_accumulate_grad_hook`) or is
    no leaf (autocast's copy, a parametrization), those that `torch.autograd.grad` returns, those
    that are recorded (`create_graph`), those of compiled programs, and all that are not computed on
    the default stream of a GPU.

    Autograd gets no gradient for such a weight. What is hooked to its AccumulateGrad node, as
    DistributedDataParallel does, runs as ever, and finds the sum in `.grad`. Backward passes that
    run in several threads at a time must not share weights.

    It holds for the thread, or the asyncio task, that enters it and runs the forward pass. Contexts
    nest.

    Args:
        enabled: False returns all gradients to autograd inside an outer context.

    Returns:
        The context manager.

    Raises:
        TypeError: `enabled` is no bool.

    Example:
        >>> import torch, outblas
        >>> layer = outblas.Linear(64, 32)
        >>> with outblas.accumulate_gradients():
        ...     for _ in range(4):  # micro-batches
        ...         layer(torch.ones(8, 64)).sum().backward()
        >>> layer.weight.grad[0, 0]
        tensor(32.)
    """
    return accumulation.within(enabled)


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
    return readiness.within(enabled)

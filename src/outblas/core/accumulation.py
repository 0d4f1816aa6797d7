"""Determines whether backward passes may add the gradient of a weight to its `.grad` by the product
that computes it.
"""

import contextlib

from outblas.core.context_flag import ContextFlag

flag = ContextFlag("accumulate_gradients")


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
    return flag.within(enabled)

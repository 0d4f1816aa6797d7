"""Determines whether products are batch-invariant where a call does not say: the bits of a row
depend neither on other rows nor on M.
"""

import contextlib

from outblas.call.context_flag import ContextFlag

flag = ContextFlag("batch_invariant")


def batch_invariant(enabled: bool = True) -> contextlib.AbstractContextManager[None]:
    """Return a context manager within which products are batch-invariant.

    A batch-invariant product gives a row the same bits alone, in any batch and beside any other
    rows. The context decides for calls of `matmul`, `addmm` and `linear` that do not pass
    `batch_invariant` themselves.

    It holds for the thread, or the asyncio task, that enters it. Contexts nest. What a compiled
    graph does is decided when the graph runs; code that is compiled should pass
    `batch_invariant=True` to each call instead.

    Args:
        enabled: False ends the promise inside an outer context.

    Returns:
        The context manager.

    Raises:
        TypeError: `enabled` is no bool.

    Example:
        >>> import torch, outblas
        >>> a, b = torch.randn(32, 16), torch.randn(16, 8)
        >>> with outblas.batch_invariant():
        ...     all_rows = outblas.matmul(a, b, kernel="portable")
        ...     one_row = outblas.matmul(a[:1], b, kernel="portable")
        >>> torch.equal(all_rows[:1], one_row)
        True
    """
    return flag.within(enabled)


def wanted(batch_invariant: bool | None) -> bool:
    """Returns whether a product must be batch-invariant: as the call says, or else as the context
    says.

    Where Dynamo traces this, a graph breaks once a context has been entered.
    """
    return (flag.ever and flag.requested()) if batch_invariant is None else batch_invariant


def unsupported(cause: str) -> ValueError:
    """The error for a batch-invariant product that torch would compute."""
    return ValueError(
        f"batch_invariant is True, and torch would take this call ({cause}), which does not "
        "promise it: expected 16-bit or fp32 tensors on an NVIDIA GPU"
    )


def refuse_promise(what: str) -> None:
    """Raises ValueError if the context asks for a promise that a call does not make."""
    if wanted(None):
        raise ValueError(
            f"batch_invariant is True, and {what} does not promise it: expected a call outside of "
            "outblas.batch_invariant(), or inside of outblas.batch_invariant(False)"
        )

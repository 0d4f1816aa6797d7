"""Whether products are batch-invariant where a call does not say: a row's bits depend on no other
row, nor on M.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_requested: ContextVar[bool] = ContextVar("batch_invariant", default=False)
requested = _requested.get  # what the context says; Dynamo cannot trace it
# Whether any context ever was entered: Dynamo guards on it, and until then knows the answer.
_ever = False


def batch_invariant(enabled: bool = True) -> contextlib.AbstractContextManager[None]:
    """Within it `matmul` and `addmm` are batch-invariant where a call says nothing else: a row of
    the product has the same bits alone, in any batch and beside any other rows.

    It holds for the thread, or the asyncio task, that enters it, and nests:
    `batch_invariant(False)` ends it for a while. What a compiled graph does is decided when it
    runs; inside one, say `batch_invariant=True` call by call.
    """
    check(enabled, "enabled")
    return _within(enabled)


@contextlib.contextmanager
def _within(enabled: bool) -> Iterator[None]:
    global _ever
    _ever = _ever or enabled
    token = _requested.set(enabled)
    try:
        yield
    finally:
        _requested.reset(token)


def check(value: object, name: str = "batch_invariant") -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {type(value).__name__}, expected a bool")


def wanted(batch_invariant: bool | None) -> bool:
    """Whether a product is to be batch-invariant: the call says so, or else the context.

    Where Dynamo traces this, a graph breaks once a context has been entered.
    """
    return (_ever and requested()) if batch_invariant is None else batch_invariant


def unsupported(cause: str) -> ValueError:
    """The error for a batch-invariant product that torch would compute."""
    return ValueError(
        f"batch_invariant is True, and torch would take this call ({cause}), which does not "
        "promise it: expected 16-bit or fp32 tensors on an NVIDIA GPU"
    )

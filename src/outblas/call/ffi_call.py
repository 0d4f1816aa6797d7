"""How a launch calls its kernel, for callers that can do so without Python.

A launch is a Python function. Where all that it does is to call a function of TVM FFI with views of
its tensors, an `FfiCall` says the same as data.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch

from outblas.call.problem import Launch

# The tensors of a launch, in the order in which an `FfiView` counts them.
TENSORS = ("a", "b", "c", "out", "bias", "residual")


class FfiView(NamedTuple):
    """A view of a tensor of the call: its index in `TENSORS`, dtype, sizes and strides."""

    tensor: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


# A tensor that stands for itself is the same in every launch. "alpha" and "beta" are those of the
# call.
FfiArgument = FfiView | torch.Tensor | int | float | Literal["alpha", "beta"] | None


class FfiCall(NamedTuple):
    """The kernel, and its arguments."""

    run: Callable[..., None]
    arguments: tuple[FfiArgument, ...]

    @property
    def handle(self) -> int | None:
        """The address of the function's object; None for a kernel of another kind."""
        handle: Any = getattr(self.run, "__chandle__", None)
        return None if handle is None else handle()


_described: WeakKeyDictionary[Launch, Callable[[], FfiCall]] = WeakKeyDictionary()


def describe(launch: Launch, call: Callable[[], FfiCall]) -> None:
    """Says how a launch calls its kernel: `call` does when it is asked."""
    _described[launch] = call


def of(launch: Launch) -> FfiCall | None:
    """Returns how a launch calls its kernel; None where it does more than that."""
    call = _described.get(launch)
    return None if call is None else call()

"""What the runtime asks of packages that lie above it, without naming them.

The autotuner and the ladders import the runtime, so it cannot import them. A `Hook` stands for the
module that answers; `outblas/__init__` registers how each is loaded, and none is imported before
the first question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from ..core.problem import Problem

T = TypeVar("T")


class Tuner(Protocol):
    """What knows the kernels and configs that were tuned for a problem."""

    def choices(self, problem: Problem, tune: str = "") -> Iterator[tuple[str, str]]:
        """Kernels and configs as text for a problem, the best first.

        `tune` is "off", "lookup", "on", or "" for what OUTBLAS_TUNE says. Raises ValueError for an
        OUTBLAS_TUNE that is none of these.
        """


class OperandCopies(Protocol):
    """What knows which operands the production kernel copies before it multiplies."""

    def needs_copy(self, problem: Problem) -> tuple[bool, bool]:
        """Whether A and B are copied first."""


class ActivationKernels(Protocol):
    """What computes gradients of activations on an NVIDIA GPU."""

    def backward(self, grad: torch.Tensor, x: torch.Tensor, activation: str) -> torch.Tensor:
        """The gradient of `x`, of its shape and dtype, from that of the activation's output.

        Tensors are checked, on a GPU, of 16-bit or fp32 elements, and not empty.
        """


class Hook(Generic[T]):
    """A module that answers the runtime, loaded when it is first asked."""

    def __init__(self) -> None:
        self._load: Callable[[], T] | None = None
        self._loaded: T | None = None

    def register(self, load: Callable[[], T]) -> None:
        """`load` imports the module and returns it."""
        self._load, self._loaded = load, None

    def get(self) -> T:
        """The module.

        Raises ImportError where it cannot be imported, or nothing was registered.
        """
        if self._loaded is None:
            if self._load is None:
                raise ImportError("nothing is registered for this hook: import outblas first")
            self._loaded = self._load()
        return self._loaded


tuner: Hook[Tuner] = Hook()
operand_copies: Hook[OperandCopies] = Hook()
activation_kernels: Hook[ActivationKernels] = Hook()

"""Interfaces through which the runtime asks higher packages, without importing them.

The autotuner and the ladders import the runtime, so the runtime cannot import them. A `Hook` stands
for the module that answers; `outblas/__init__` registers how each one is loaded, and none is
imported before it is first asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from outblas.core.grouped import GroupedProblem, GroupedTensors
    from outblas.core.problem import Problem

T = TypeVar("T")


class Tuner(Protocol):
    """Finds the kernels and configs that were tuned for a problem."""

    def choices(
        self, problem: Problem, tune: str = "", *, only_faster: bool = False
    ) -> Iterator[tuple[str, str]]:
        """Yields kernels and configs (as text) for a problem, the best first. `only_faster`: those
        that were measured to be faster than torch at exactly this problem.

        `tune` is "off", "lookup", "on", or "" for the value of OUTBLAS_TUNE. Raises ValueError for
        any other value of OUTBLAS_TUNE.
        """

    def measured_gain(self, problem: Problem) -> float | None:
        """Returns cuBLAS's time over that of the best config at exactly these sizes and layouts,
        without addend and epilogue, where a sweep measured it on this model of GPU or a shipped
        table has it; None otherwise.
        """

    def measured_gains(
        self, device: torch.device, N: int, K: int, dtype: torch.dtype
    ) -> dict[int, float]:
        """Returns `measured_gain` of products with an (N, K) weight on a GPU, by the number of
        rows, for those that were measured.
        """

    def grouped_config(self, problem: GroupedProblem) -> str:
        """Returns the config (as text) of the production kernel that was tuned for a grouped
        product like this one; "" for none. It never raises.
        """


class OperandCopies(Protocol):
    """Tells which operands the production kernel copies before it multiplies."""

    def needs_copy(self, problem: Problem) -> tuple[bool, bool]:
        """Returns whether A and B are copied first."""


class ActivationKernels(Protocol):
    """Computes gradients of activations on an NVIDIA GPU."""

    def backward(self, grad: torch.Tensor, x: torch.Tensor, activation: str) -> torch.Tensor:
        """Returns the gradient of `x`, in its shape and dtype, from the gradient of the
        activation's output.

        The tensors have been checked: they are on a GPU, have 16-bit or fp32 elements and are not
        empty.
        """


class GroupedKernels(Protocol):
    """Computes grouped products."""

    def unsupported(self, problem: GroupedProblem) -> str | None:
        """Returns why the kernel cannot take a product; None if it can."""

    def run(
        self,
        problem: GroupedProblem,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        offs: torch.Tensor,
        tensors: GroupedTensors,
    ) -> None:
        """Computes a product that `unsupported` does not refuse. All tensors are in the form of
        the problem. `offs` holds the ends of groups, or their counts where it has a `capacity`.
        """


class MoeKernels(Protocol):
    """Computes what lies between the products of a layer of experts; `kernels/moe.py` describes it.
    All tensors have been checked, and are contiguous.
    """

    def route(
        self, expert_index: torch.Tensor, experts: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns offs, row_of_slot and slot_of_row."""

    def dispatch(self, x: torch.Tensor, row_of_slot: torch.Tensor) -> torch.Tensor:
        """Returns the tokens in the order of experts."""

    def combine(
        self, rows: torch.Tensor, row_of_slot: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the weighted sum of each token's rows."""

    def activation_backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        weights: torch.Tensor,
        slot_of_row: torch.Tensor,
        offs: torch.Tensor,
        activation: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the gradient of x, the weighted inner rows, and the gradient of the weights."""


class QuantizeKernels(Protocol):
    """Quantizes to fp8 on an NVIDIA GPU."""

    def quantize(
        self, x: torch.Tensor, recipe: str, dtype: torch.dtype, power_of_two: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the values and the scales of a checked tensor that has elements."""


class Hook(Generic[T]):
    """A module that answers the runtime, loaded on first use."""

    def __init__(self) -> None:
        self._load: Callable[[], T] | None = None
        self._loaded: T | None = None

    def register(self, load: Callable[[], T]) -> None:
        """Registers a function that imports the module and returns it."""
        self._load, self._loaded = load, None

    def get(self) -> T:
        """Returns the module.

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
portable_grouped: Hook[GroupedKernels] = Hook()
hopper_grouped: Hook[GroupedKernels] = Hook()
moe_kernels: Hook[MoeKernels] = Hook()
quantize_kernels: Hook[QuantizeKernels] = Hook()

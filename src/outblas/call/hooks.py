"""Modules of higher packages that the runtime asks, by name, because those packages import the
runtime. None is imported before it is first asked.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from outblas.call.grouped import GroupedProblem, GroupedTensors


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


class Hook:
    """A module that is loaded by its name, untyped: callers annotate what its functions return."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._loaded: Any = None

    def get(self) -> Any:
        """Returns the module. Raises ImportError where it cannot be imported."""
        if self._loaded is None:
            self._loaded = import_module(self._module)
        return self._loaded


tuner = Hook("outblas.autotune.automatic")
operand_copies = Hook("outblas.hopper.gemm.operand_copies")
activation_kernels = Hook("outblas.kernels.activation")
portable_grouped = Hook("outblas.kernels.grouped")  # has the functions of `GroupedKernels`
hopper_grouped = Hook("outblas.hopper.grouped")  # has the functions of `GroupedKernels`
moe_kernels = Hook("outblas.kernels.moe")
quantize_kernels = Hook("outblas.kernels.quantize")

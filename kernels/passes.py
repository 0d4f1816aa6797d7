"""Launches of Triton's kernels that pass over memory, for modules that have several of them: on a
GPU, and on the CPU in the interpreter.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import triton

from ..core import compiling
from ..core.compat.triton_private import ASTSource, CompiledKernel, GPUTarget
from ..device import language
from ..runtime.cuda_graphs import capturing, not_ready

WARPS = 4


class Passes:
    """The kernels of one module.

    Attributes:
        interpreted: Their versions for the interpreter.
    """

    def __init__(self, name: str, *kernels: Any) -> None:
        """`name` tells what is missing where no kernel may be compiled."""
        self._name = name
        self._loaded: dict[tuple[Any, ...], CompiledKernel] = {}  # compiled, and put onto a GPU
        self.interpreted = {kernel: language.interpreted(kernel) for kernel in kernels}

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        given: tuple[Any, ...],
        constants: Mapping[str, Any],
        warps: int = WARPS,
    ) -> None:
        """Starts a kernel where its first argument is. Raises RuntimeError while a CUDA graph is
        captured, if a kernel is needed for the first time, and CompileForbidden where it may not be
        compiled.
        """
        device = given[0].device
        if device.type == "cpu":
            with language.lock, np.errstate(all="ignore"):
                self.interpreted[kernel][grid](*given, **constants)
            return
        key = kernel, _kinds(given), tuple(constants.values()), warps, device.index
        found = self._loaded.get(key)
        if found is None:
            compiling.check_allowed(self._name)
            if capturing(device):
                raise not_ready()
            with torch.cuda.device(device), language.lock:
                self._loaded[key] = kernel[grid](*given, **constants, **_options(warps))
            return
        # Triton's own launch would look for this kernel again, which takes longer than to start it.
        named = (constants[name] for name in kernel.arg_names[len(given) :])
        with torch.cuda.device(device):
            found[*grid, *(1,) * (3 - len(grid))](*given, *named)


def _options(warps: int) -> dict[str, Any]:
    return {"num_warps": warps, "enable_fp_fusion": True}


def _kinds(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns which properties of arguments a compiled kernel depends on, as Triton tells: of
    numbers, whether they are 1, divide by 16, and fit 32 bits; of tensors, their dtypes and whether
    addresses divide by 16.
    """
    return tuple(
        (t.dtype, t.data_ptr() % 16 == 0)
        if isinstance(t, torch.Tensor)
        else None
        if t is None
        else (t == 1, t % 16 == 0, t < 2**31)
        for t in given
    )


def compile_for(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    arch: int,
    warps: int = WARPS,
) -> CompiledKernel:
    """Compiles a kernel for an architecture (90 is sm_90), with addresses and numbers that divide
    by 16. `types` are those of its arguments by name. Needs no GPU.
    """
    signature = dict.fromkeys(kernel.arg_names, "constexpr") | dict(types)
    at = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    values = {at[name]: value for name, value in constants.items()}
    divisors = {at[name]: [["tt.divisibility", 16]] for name in types}
    with language.lock:
        source = ASTSource(kernel, signature, values, divisors)
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=_options(warps))

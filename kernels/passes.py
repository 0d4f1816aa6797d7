"""Launches of Triton's kernels that pass over memory, for modules that have several of them: on a
GPU, and on the CPU in the interpreter.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from outblas.base import compiling, forks, pack
from outblas.base.compat.triton_private import CompiledKernel
from outblas.base.cuda_graphs import capturing, not_ready
from outblas.base.gpus import arch_of
from outblas.device import language
from outblas.device.cubin import Cubin, ready
from outblas.device.triton_variant import Place, TritonVariant

WARPS = 4


class Passes:
    """The kernels of one module.

    Attributes:
        interpreted: Their versions for the interpreter.
    """

    def __init__(self, name: str, *kernels: Any) -> None:
        """`name` tells what is missing where no kernel may be compiled."""
        self._name = name
        self._loaded: dict[tuple[Any, ...], CompiledKernel | Cubin] = {}  # those on a GPU
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
        if device.type == "meta":
            _planned.append(_variant(kernel, given, constants, warps))
            return
        key = kernel, _kinds(given), tuple(constants.values()), warps, device.index
        found = self._loaded.get(key)
        if found is None:
            found = self._ready(key, given, constants)
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

    def _ready(
        self, key: tuple[Any, ...], given: tuple[Any, ...], constants: Mapping[str, Any]
    ) -> Any:
        """Returns a kernel from a pack or of the worker (`cubin.ready`). Raises RuntimeError while
        a CUDA graph is captured.
        """
        if not (pack.loaded() or compiling.defers()):
            return None
        device = given[0].device
        if capturing(device):
            raise not_ready()
        kernel, _, _, warps, index = key
        variant = _variant(kernel, given, constants, warps, arch_of(device))
        with torch.cuda.device(device):
            found = ready(variant, index)
        if found is not None:
            self._loaded[key] = found
        return found


# ---- what is launched without a GPU
_PLANNED_ARCH = 90  # of tensors on the meta device
_planned: list[TritonVariant] = []
_planning = forks.Lock()


def arch(device: torch.device) -> int:
    """Returns the architecture of a device; 0 for the CPU."""
    if device.type == "cuda":
        return arch_of(device)
    return _PLANNED_ARCH if device.type == "meta" else 0


def planned(run: Callable[[], object]) -> list[TritonVariant]:
    """Returns the kernels that a function launches on an sm_90 GPU, which it calls with tensors on
    the meta device.
    """
    with _planning:
        _planned.clear()
        run()
        return list(_planned)


_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def _variant(
    kernel: Any,
    given: tuple[Any, ...],
    constants: Mapping[str, Any],
    warps: int,
    arch: int = _PLANNED_ARCH,
) -> TritonVariant:
    """Returns the key of the kernel that a launch needs, specialized as Triton does: by `_kinds`
    of its arguments.
    """
    names = kernel.arg_names
    signature: dict[str, str] = {}
    known: dict[Place, Any] = {}
    divisors: dict[Place, int] = {}
    for i, (name, value) in enumerate(zip(names, given, strict=False)):
        if value is None or (not isinstance(value, torch.Tensor) and value == 1):
            signature[name], known[i,] = "constexpr", value
            continue
        is_tensor = isinstance(value, torch.Tensor)
        number = value.data_ptr() if is_tensor else value
        signature[name] = _TYPES[value.dtype] if is_tensor else "i32" if value < 2**31 else "i64"
        if number % 16 == 0:
            divisors[i,] = 16
    for i, name in enumerate(names[len(given) :], len(given)):
        signature[name], known[i,] = "constexpr", constants[name]
    return _key(kernel, warps, arch, signature, known, divisors)


def _key(kernel: Any, warps: int, arch: int, *parts: Mapping[Any, Any]) -> TritonVariant:
    """Returns the key of a compile; `parts` are its types, its constants and its divisors."""
    types, values, divisors = (tuple(part.items()) for part in parts)
    options = tuple(sorted(_options(warps).items()))
    name = kernel.fn.__module__, kernel.fn.__name__
    return TritonVariant(*name, types, values, divisors, options, arch)


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
    at: dict[str, Place] = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    values = {at[name]: value for name, value in constants.items()}
    return _key(kernel, warps, arch, signature, values, {at[name]: 16 for name in types}).compile()

"""Kernels of Triton from a pack: their machine code is loaded and launched by the CUDA driver.

Triton's own runtime has a C compiler build what loads and launches, once for each machine, and
before Triton 3.9 once for each signature. Here nothing is compiled, and nothing is read from
Triton's cache. A launch takes some microseconds more of the host.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from outblas.base import compiling, pack
from outblas.device import driver
from outblas.device.triton_variant import NUMBERS, Kept, Place, TritonVariant

_MOST_STATIC = 48 << 10  # bytes of shared memory that a launch has without asking for more
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Cubin:
    """A kernel on a GPU. It is launched as Triton's compiled kernels are: kernel[grid](*arguments),
    with those arguments, too, that are known.
    """

    def __init__(self, kept: Kept, variant: TritonVariant, device: int) -> None:
        """Loads a kernel onto the GPU of this index. Raises ValueError for the code of another
        kernel, and RuntimeError with the driver's number where it cannot be loaded.
        """
        if kept.types != [kind for _, kind in variant.parameters]:
            raise ValueError(f"the code is not that of {variant.name}")
        self._places = [
            (place, _address if kind.startswith("*") else NUMBERS[kind])
            for place, kind in variant.parameters
        ]
        self._scratch = [ctypes.c_void_p(None) for _ in range(kept.scratch)]
        self._threads, self._shared, self._device = kept.threads, kept.shared, device
        driver.ensure_context(device)
        with driver.relaxed_capture():
            module = driver.load_module(kept.cubin)
        self._function = driver.module_function(module, kept.name)
        if kept.shared > _MOST_STATIC:
            driver.set_attribute(self._function, _MAX_DYNAMIC_SHARED, kept.shared)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        x, y, z = (*grid, 1, 1)[:3]
        return functools.partial(self._launch, (x, y, z))

    def _launch(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        values = [convert(_at(arguments, place)) for place, convert in self._places]
        device = self._device
        driver.ensure_context(device)
        stream = torch.cuda.current_stream(device).cuda_stream
        shape = grid, self._threads, self._shared
        driver.launch(self._function, *shape, stream, [*values, *self._scratch])


def _at(arguments: Any, place: Place) -> Any:
    for position in place:
        arguments = arguments[position]
    return arguments


def _address(t: torch.Tensor) -> Any:
    return ctypes.c_void_p(t.data_ptr())


@functools.cache
def kernel_of(variant: TritonVariant, device: int | None, name: str) -> Any:
    """Returns a kernel that can be launched. `device` is the index of the GPU on which the caller
    loads it, because a loaded kernel belongs to one GPU: there it may come from a pack instead.
    Where calls do not wait for a compile (`compiling.defers`), it comes from the cache on disk too.
    Raises CompilePending then, or CompileForbidden with this name where nothing may be compiled.
    """
    if device is not None:
        if cubin := ready(variant, device):
            return cubin
        compiling.check_allowed(name)
    return variant.compile()


def ready(variant: TritonVariant, device: int) -> Any:
    """Returns a kernel from a pack, or where calls do not wait for a compile one that the worker
    has compiled, on the GPU of this index. Returns None where the caller is to compile it. Raises
    as `cache.fetch`.
    """
    if cubin := packed(variant, device):
        return cubin
    if not compiling.defers():
        return None
    return variant.kept(lambda code: Cubin(Kept.from_bytes(code), variant, device))


def packed(variant: TritonVariant, device: int) -> Cubin | None:
    """Returns a kernel from a loaded pack, on the GPU of this index; None where no pack has it, or
    it cannot be loaded there, of which a warning tells once.
    """
    if not pack.loaded():
        return None
    code = pack.packed_code(variant.cache_key_fields)
    if code is None:
        return None
    try:
        return Cubin(Kept.from_bytes(code), variant, device)
    except (ValueError, RuntimeError) as error:
        pack.warn_once(f"a pack's kernel cannot be loaded here: {variant.name}: {error}")
        return None

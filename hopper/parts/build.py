"""Compiles with the CuTe DSL, for sm_90a whatever GPU is present, and without one."""

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from outblas.base.compat import cute_private
from outblas.hopper.parts.compile import ARCH, OPTIONS

NUMERIC = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float32: cutlass.Float32,
    torch.float8_e4m3fn: cutlass.Uint8,  # kernels get these outputs as bytes
}


def compact(dtype: Any, dims: int) -> Any:
    """Returns a contiguous fake tensor of any size."""
    shape = tuple(cute.sym_int() for _ in range(dims))
    return make_fake_compact_tensor(dtype, shape, stride_order=tuple(reversed(range(dims))))


def compiled(kernel: Any, name: str, arguments: Sequence[Any], options: str = "") -> Any:
    """Returns the DSL's compiled function of a kernel object, whose last argument is the caller's
    stream. `name` is what profilers show.
    """
    type(kernel).kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"{OPTIONS}{cute_private.arch_option(ARCH)} {options}"
    with cute_private.target_arch(ARCH):
        return cute.compile(kernel, *arguments, stream, options=options)

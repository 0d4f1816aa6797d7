"""The optional package outblas-native: the host side of warm calls in C++.

It keeps the plans of calls that were made before, finds them by what `eager` and `linear` compare,
and runs them: it allocates the output and launches the kernel, through the C interface of TVM FFI
where the kernel has one. Of `linear` it also has the autograd function, and of aten's `mm`, `bmm`
and `addmm`, with `out` too, the kernels that `outblas.enable` installs. Calls that it does not know
go the way that all calls go without it.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from outblas.base.compat.torch_private import forward_levels
from outblas.call import dispatch, fallback, ffi_call
from outblas.call.context_flag import accumulation as _accumulation
from outblas.call.context_flag import readiness as _readiness
from outblas.call.invariance import flag as _invariance
from outblas.call.problem import Launch
from outblas.call.sm_carveout import call_limit
from outblas.call.warm import Kind

Tensor = torch.Tensor
MaybeTensor = Tensor | None

INTERFACE = 3  # of the package, which this module calls


def _load() -> Any:
    """Returns the package; None where it is not installed, does not fit, or OUTBLAS_NATIVE is 0."""
    if os.environ.get("OUTBLAS_NATIVE") == "0":
        return None
    try:
        import outblas_native as found  # type: ignore[import-not-found]
    except ImportError as error:
        if error.name != "outblas_native":
            fallback.warn_once(f"outblas-native is not used, because it does not load: {error}")
        return None
    wanted = INTERFACE, torch.__version__.partition("+")[0]
    if wanted != (found.INTERFACE, found.TORCH):
        fallback.warn_once(
            f"outblas-native is not used: it was built for torch {found.TORCH} (interface "
            f"{found.INTERFACE}), expected torch {wanted[1]} (interface {wanted[0]})"
        )
        return None
    if "_current_level" not in vars(forward_levels):
        return None
    return found


_package = _load()
generation = 0  # rises when the package forgets plans: what was offered to it may be offered again


def is_used() -> bool:
    """Returns whether warm calls run in C++."""
    return _package is not None


# linear(input, weight, bias, activation, residual, batch_invariant) and matmul(a, b,
# batch_invariant) return None where the call must go another way. None without the package.
linear: Callable[..., MaybeTensor] | None = getattr(_package, "linear", None)
matmul: Callable[..., MaybeTensor] | None = getattr(_package, "matmul", None)


def configure(product: Callable[[Tensor, Tensor, bool], Tensor]) -> None:
    """Hands over what the package asks of Python. `product` returns A B, differentiable; the last
    argument is whether it is batch-invariant.
    """
    if _package is None:
        return
    levels = vars(forward_levels)
    _package.configure(_invariance, _readiness, _accumulation, levels, product)
    dispatch.on_clear.append(_clear)
    call_limit.on_change = _package.set_sm_limit


def _clear() -> None:
    global generation
    generation += 1
    _package.clear()


def remember(
    kind: Kind,
    tensors: tuple[MaybeTensor, ...],
    plan: dispatch.Plan,
    *,
    batch_invariant: bool,
    recorded: bool = False,
    activation: str = "",
    alpha: float = 1,
    beta: float = 0,
) -> None:
    """Lets the package compute calls like this one, if the plan launches a kernel. `generation`
    rises where it forgets others for it.

    tensors: A, B, C, bias, residual and `out`, None for those that the call has not. B of
    `Kind.LINEAR` is the weight. `recorded`: whether autograd records the call.
    """
    global generation
    if _package is None:
        return
    parts = dispatch.parts_of(plan)
    if parts is None:
        return
    has_epilogue = bool(activation) or tensors[3] is not None or tensors[4] is not None
    forgot = _package.remember(
        int(kind),
        tensors,
        activation,
        batch_invariant,
        recorded,
        (alpha, beta),
        plan,
        parts.launch,
        (parts.size, parts.strides, parts.dtype, parts.device),
        has_epilogue,
        parts.several,
        _kernel_of(parts.launch),
        dispatch.PLAN_LIMIT,
    )
    generation += forgot


def _kernel_of(launch: Launch) -> tuple[int, list[Any]] | None:
    """Returns the kernel of a launch and its arguments, where the package can call it."""
    called = ffi_call.of(launch)
    handle = None if called is None else called.handle
    if called is None or handle is None or not _load_ffi():
        return None
    return handle, list(called.arguments)


def _load_ffi() -> bool:
    """Hands over the functions of TVM FFI's library, which is loaded if there is a kernel of it."""
    global _ffi_loaded
    if not _ffi_loaded and "tvm_ffi" in sys.modules:
        try:
            from tvm_ffi.libinfo import find_libtvm_ffi

            library = ctypes.CDLL(find_libtvm_ffi())
            functions = [getattr(library, name) for name in _FFI_FUNCTIONS]
        except (ImportError, OSError, AttributeError):  # another version: launches go by Python
            return False
        _package.load_ffi(*(ctypes.cast(each, ctypes.c_void_p).value for each in functions))
        _ffi_loaded = True
    return _ffi_loaded


_ffi_loaded = False
_FFI_FUNCTIONS = (
    "TVMFFIFunctionCall",
    "TVMFFIErrorMoveFromRaised",
    "TVMFFIObjectDecRef",
    "TVMFFIEnvSetStream",
)


# ---- aten
def install(name: str, key: str, kernel: Callable[..., Tensor]) -> bool:
    """Overrides an operator of aten at a dispatch key by the package's kernel, which calls `kernel`
    for calls that it does not know. Returns whether there is such a kernel.
    """
    return _package is not None and bool(_package.install(name, key, kernel))


def uninstall() -> None:
    """Gives the operators of `install` back to the kernels that they had before."""
    if _package is not None:
        _package.uninstall()


def activate(batch_invariant: bool) -> None:
    """Forgets all decisions, which were made by other rules."""
    if _package is not None:
        _clear()
        _package.set_batch_invariant(batch_invariant)


def set_choosing(choosing: bool) -> None:
    """Says whether this thread chooses a kernel, while its products belong to torch."""
    if _package is not None:
        _package.set_choosing(choosing)

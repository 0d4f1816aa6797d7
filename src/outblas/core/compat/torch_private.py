"""What outblas takes from private parts of torch.

Warm calls import these names once and call them as they are: none adds a call of its own.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

from . import take


# ---- products
def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> Tensor:
    from torch.nn.functional import ScalingType, scaled_mm

    recipes = [
        ScalingType.TensorWise if scale.numel() == 1 else ScalingType.RowWise
        for scale in (scale_a, scale_b)
    ]
    return scaled_mm(
        a,
        b,
        scale_a,
        recipes[0],
        scale_b,
        recipes[1],
        bias=bias,
        output_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    )


# cuBLAS's product of fp8 operands, one scale each or one of each row of A and column of B.
scaled_mm: Callable[..., Tensor] = take(
    "torch:_scaled_mm",
    _scaled_mm,
    "cuBLAS's products of fp8, beside which the bench times ours",
    "torch.nn.functional.scaled_mm computes them",
)

# ---- new memory
_SLOWER_MEMORY = "torch.empty_strided allocates it, at twice the cost"


def _empty_strided(
    device: str, size: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return torch.empty_strided(size, strides, dtype=dtype, device=device)


# What Inductor's graphs allocate with, by the type of the device: less than half of what new_empty
# costs, and like it in all but deterministic fills. Sizes and strides must be tuples, and the GPU
# is the current one.
empty_strided: dict[str, Callable[..., Tensor]] = {
    device: take(
        f"torch:_C._dynamo.guards._empty_strided_{device}",
        functools.partial(_empty_strided, device),
        f"the output of a warm call on the {device}",
        _SLOWER_MEMORY,
    )
    for device in ("cpu", "cuda")
}
# Whether new memory may have to be filled.
fills_memory: Callable[[], bool] = take(
    "torch:_C._get_deterministic_algorithms",
    torch.are_deterministic_algorithms_enabled,
    "whether new memory may have to be filled",
    "torch.are_deterministic_algorithms_enabled says it",
)
# A torch built without CUDA has no such name, and no need of it.
current_device: Callable[[], int] = torch.cuda.current_device
if torch.version.cuda is not None:
    current_device = take(
        "torch:_C._cuda_getDevice",
        torch.cuda.current_device,
        "which GPU is the current one",
        "torch.cuda.current_device says it, after a look for CUDA's state",
    )


def _fp32_precision(backend: str, operation: str) -> str:
    """The public setting of CUDA's fp32 products, the only one that outblas reads."""
    if (backend, operation) != ("cuda", "matmul"):
        raise ValueError(f"no public setting is known for {backend} and {operation}")
    return str(torch.backends.cuda.matmul.fp32_precision)


fp32_precision: Callable[[str, str], str] = take(
    "torch:_C._get_fp32_precision_getter",
    _fp32_precision,
    "whether fp32 products may use tf32",
    "torch.backends.cuda.matmul.fp32_precision says it, in six times the time",
)

# ---- autocast
_EXCLUDE = "torch:_C._ExcludeDispatchKeyGuard"
_KEY_SET = "torch:_C.DispatchKeySet"
_DISPATCH_KEY = "torch:_C.DispatchKey"
_NO_AUTOCAST = "the autocast state of torch is turned off and on again"
_exclude = take(_EXCLUDE, None, "running operators without their autocast kernels", _NO_AUTOCAST)
_key_set = take(_KEY_SET, None, "naming the autocast kernels", _NO_AUTOCAST)
_dispatch_key = take(_DISPATCH_KEY, None, "naming the autocast kernels", _NO_AUTOCAST)
AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def autocast_off(*devices: str) -> Callable[[], AbstractContextManager[Any]]:
    """What makes a context in which autocast of these types of devices casts nothing."""
    if _exclude is None or _key_set is None or _dispatch_key is None:
        return functools.partial(_public_autocast_off, devices)
    keys = [_key_set(getattr(_dispatch_key, AUTOCAST_KEYS[device])) for device in devices]
    excluded = functools.reduce(lambda found, key: found | key, keys)
    return functools.partial(_exclude, excluded)


@contextlib.contextmanager
def _public_autocast_off(devices: Sequence[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device in devices:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _any_autocast() -> bool:
    return any(torch.is_autocast_enabled(device) for device in AUTOCAST_KEYS)


any_autocast: Callable[[], bool] = take(
    "torch:_C._is_any_autocast_enabled",
    _any_autocast,
    "whether autocast is on for any device",
    "torch.is_autocast_enabled is asked for each type of device",
)

# ---- types and modes that override functions of torch
_PLAIN = torch.empty(0, device="cpu")


class _Overriding:
    """A value that overrides every function of torch, where functions may be overridden."""

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        return NotImplemented


_OVERRIDING = _Overriding()


def _mode_is_on() -> bool:
    """Whether a function mode is on and may be asked: nothing else makes a plain tensor one that
    overrides functions.
    """
    return has_torch_function((_PLAIN,))


has_override: Callable[..., bool] = take(
    "torch.overrides:has_torch_function_variadic",
    lambda *values: has_torch_function(values),
    "whether a mode or the type of an operand overrides a call",
    "torch.overrides.has_torch_function says it",
)
function_mode_count: Callable[[], int] = take(
    "torch:_C._len_torch_function_stack",
    _mode_is_on,
    "whether function modes are on",
    "a plain tensor tells: torch.overrides.has_torch_function finds the mode",
)
modes_disabled: Callable[[], bool] = take(
    "torch:_C._is_torch_function_all_disabled",
    lambda: not _mode_is_on(),
    "whether the function modes that are on may be asked",
    "a plain tensor tells: torch.overrides.has_torch_function finds the mode",
)
overrides_enabled: Callable[[], bool] = take(
    "torch:_C._is_torch_function_enabled",
    lambda: has_torch_function((_OVERRIDING,)),
    "whether types may override functions",
    "a value that overrides them tells: torch.overrides.has_torch_function finds it",
)
function_mode: Callable[[int], Any] = take(
    "torch:_C._get_function_stack_at",
    lambda index: None,
    "which function mode is on",
    "a default device counts as a mode that overrides calls, which then take the long way",
)
DeviceContext: Any = take(
    "torch.utils._device:DeviceContext",
    None,
    "the function mode that a default device is",
    "a default device counts as a mode that overrides calls, which then take the long way",
)
# A context without modes and types that override functions; None: there is no such context.
without_overrides: Callable[[], AbstractContextManager[Any]] | None = take(
    "torch:_C.DisableTorchFunction",
    None,
    "the short way of calls under a default device",
    "calls under a default device take the long way",
)
with_overrides: Callable[[], AbstractContextManager[Any]] = take(
    "torch:_C._EnableTorchFunction",
    contextlib.nullcontext,
    "offering torch's function to a type that knows it where ours is unknown to the type",
    "torch's function runs as if the type did not know it, as torch's own compositions do",
)
_disable_types = take(
    "torch:_C.DisableTorchFunctionSubclass",
    None,
    "reading the traits of operands whose types override functions",
    "torch.Tensor.__torch_function__ runs a function with overriding off",
)


def as_plain(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function while no type of tensors overrides functions of torch."""
    if _disable_types is None:
        call: Any = Tensor.__torch_function__  # which torch does not type
        return call(function, (), arguments, {})
    with _disable_types():
        return function(*arguments)


# ---- who watches operators
dispatch_mode_count: Callable[[], int] = take(
    "torch:_C._len_torch_dispatch_stack",
    lambda: 1,
    "whether dispatch modes are on, which see operators",
    "calls go by the operators, which any mode sees",
)
profiled: Callable[[], bool] = take(
    "torch:_C._autograd._profiler_enabled",
    lambda: True,
    "whether the profiler is on, which lists operators",
    "calls go by the operators, which the profiler sees",
)
_guards: Any = take(
    "torch:_C._dynamo.guards.TensorGuards",
    None,
    "the short way of warm calls, on which one guard compares all traits of the operands",
    "calls go by the operators",
)


def tensor_guard(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """What says whether others are of the types, sizes, strides, dtypes, devices, need of
    gradients and treatment by the dispatcher of these tensors; None where torch has no such guard.
    """
    if _guards is None:
        return None
    sizes: Any = [list(t.shape) for t in tensors]
    strides: Any = [list(t.stride()) for t in tensors]
    guard = _guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = guard.check
    return check


def _is_tracing() -> bool | None:
    is_tracing: Any = vars(torch.jit)["is_tracing"]  # which torch does not type
    return is_tracing() or None


# None where nobody traces.
tracing_state: Callable[[], Any] = take(
    "torch:_C._get_tracing_state",
    _is_tracing,
    "whether torch.jit.trace records operators",
    "torch.jit.is_tracing says it",
)


def _no_level() -> int | None:
    return None


# The level of torch.func's transforms, None outside of them.
transform_level: Callable[[], int | None] = take(
    "torch:_C._functorch.maybe_current_level",
    _no_level,
    "whether a call is inside torch.func's transforms",
    "torch has no public name for it: gradients by torch.func raise torch's own error",
)
knows_transforms = transform_level is not _no_level
# Passes over inference tensors.
increment_version: Callable[[Any], None] = take(
    "torch:_C._increment_version",
    torch.autograd.graph.increment_version,
    "telling autograd that a call wrote to a tensor",
    "torch.autograd.graph.increment_version tells it",
)


def _no_version(t: Tensor) -> int:
    return 0


def _version(t: Tensor) -> int:
    return t._version


# How often a tensor was written to. Without it each write counts once more than it happened.
version: Callable[[Tensor], int] = (
    _version
    if take(
        "torch:Tensor._version",
        None,
        "whether an operator counted that it wrote to a tensor",
        "it is counted once more than it happened",
    )
    else _no_version
)


# ---- levels of autograd
def _inference_guard() -> AbstractContextManager[Any]:
    """Below autograd by a public name: inference mode leaves autograd's kernels out."""
    return torch.inference_mode()


# Kernels of the Autograd key call the operator anew below this guard, where the other keys see it.
# torch's own library code uses it too.
below_autograd: Callable[[], AbstractContextManager[Any]] = take(
    "torch:_C._AutoDispatchBelowAutograd",
    _inference_guard,
    "running an operator below autograd",
    "it runs in inference mode, and what it makes is copied",
)


def _copied(found: Any) -> Any:
    """What an operator made in inference mode as tensors that autograd can keep."""
    if isinstance(found, tuple):
        return tuple(map(_copied, found))
    if isinstance(found, Tensor) and found.is_inference():
        return found if torch.is_inference_mode_enabled() else found.clone()
    return found


def _unchanged(found: Any) -> Any:
    return found


# What an operator returned `below_autograd`, for use above it.
from_below: Callable[[Any], Any] = _copied if below_autograd is _inference_guard else _unchanged
# A base class whose `apply` records at one level of torch.func's transforms, in a context that
# allows it.
_ONE_LEVEL = "torch.func computes no gradients of our operators; backward() does"
OneLevelFunction: Any = take(
    "torch.autograd.function:_SingleLevelFunction",
    torch.autograd.Function,
    "gradients by torch.func",
    _ONE_LEVEL,
)
allow_one_level: Callable[[], AbstractContextManager[Any]] = take(
    "torch._functorch.utils:enable_single_level_autograd_function",
    contextlib.nullcontext,
    "gradients by torch.func",
    _ONE_LEVEL,
)


class _ProbedLevels:
    """Stands for `forward_ad` where it does not name its level."""

    @property
    def _current_level(self) -> int:
        """0 or more where forward mode is on: else nothing can be dual."""
        try:
            forward_ad.make_dual(_PLAIN, _PLAIN)
        except RuntimeError:
            return -1
        return 0


# `forward_levels._current_level` is 0 or more where forward-mode gradients are on.
forward_levels: Any = (
    _ProbedLevels()
    if take(
        "torch.autograd.forward_ad:_current_level",
        None,
        "whether forward-mode gradients are on",
        "torch.autograd.forward_ad.make_dual tells: it refuses outside of a level",
    )
    is None
    else forward_ad
)


def _forward_gradients(enabled: bool) -> AbstractContextManager[Any]:
    """Both modes of gradients on: leaving inference mode does it."""
    return torch.inference_mode(not enabled)


forward_gradients: Callable[[bool], AbstractContextManager[Any]] = take(
    "torch.autograd.forward_ad:_set_fwd_grad_enabled",
    _forward_gradients,
    "forward-mode gradients inside our Function",
    "torch.inference_mode(False) turns them on",
)


# ---- tensors that stand for others while a program is traced
class _NoTensor:
    """No tensor is one."""


_FAKE = "tensors of a FakeTensorMode that a caller entered go to torch; torch.compile is as it was"
FakeTensor: Any = take(
    "torch._subclasses.fake_tensor:FakeTensor",
    _NoTensor,
    "taking fake tensors for plain ones",
    _FAKE,
)
FunctionalTensor: Any = take(
    "torch._subclasses.functional_tensor:FunctionalTensor",
    _NoTensor,
    "taking functional tensors for plain ones",
    _FAKE,
)


# ---- Inductor
def inductor_choices() -> tuple[list[Any], Callable[[Any], None]]:
    """Inductor's list of products from outside, and what registers one.

    Raises RuntimeError where this torch has no such list. Importing Inductor takes a second, so
    that nothing is taken before it is asked for.
    """
    reason = "outblas.inductor_choice raises RuntimeError; torch.compile of outblas is as it was"
    purpose = "offering outblas.matmul to Inductor's max-autotune"
    choices = take("torch._inductor.config:external_matmul", None, purpose, reason)
    register = take("torch._inductor.kernel.mm:lazy_register_extern_choice", None, purpose, reason)
    if choices is None or register is None:
        raise RuntimeError(
            f"torch {torch.__version__} lets nobody offer a product to Inductor: "
            "torch._inductor.config.external_matmul is gone. A program that calls outblas.matmul "
            "compiles without it"
        )
    return choices, register

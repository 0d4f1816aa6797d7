"""The private parts of torch that outblas uses.

Warm calls import these names once and call them directly, so none of them adds a Python call.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

from outblas.base.compat import take

# ---- SMs
get_sm_carveout: Callable[[], int | None] = take(
    "torch._C:_get_sm_carveout_experimental",
    lambda: None,
    "how many SMs torch's products leave to other kernels, which ours leave too",
    "products use all SMs",
)
set_sm_carveout: Callable[[int | None], None] | None = take(
    "torch._C:_set_sm_carveout_experimental",
    None,
    "the setting that `outblas.sm_carveout` makes",
    "`outblas.sm_carveout` raises RuntimeError",
)


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
    out: Tensor | None = None,
) -> Tensor:
    from torch.nn.functional import ScalingType, scaled_mm

    if scale_a.numel() == 1:
        recipes = [ScalingType.TensorWise] * 2
    elif scale_a.shape[1] == 1:
        recipes = [ScalingType.RowWise] * 2
    elif scale_b.shape[1] == b.shape[1]:
        recipes = [ScalingType.BlockWise1x128] * 2
        scale_b = scale_b.t()  # the public function takes those of B's columns, over (N, K/128)
    else:
        recipes = [ScalingType.BlockWise1x128, ScalingType.BlockWise128x128]
    found = scaled_mm(
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
    return found if out is None else out.copy_(found)


# cuBLAS's product of fp8 operands, with one scale per tensor, one per row of A and column of B, one
# per 1x128 block of A and 128x128 block of B, where K is a multiple of 512, or one per 128 terms of
# a row of A and of a column of B.
scaled_mm: Callable[..., Tensor] = take(
    "torch:_scaled_mm",
    _scaled_mm,
    "cuBLAS's fp8 products, which the benchmarks compare ours with",
    "torch.nn.functional.scaled_mm computes them",
)

# ---- new memory
_SLOWER_MEMORY = "torch.empty_strided allocates it, at twice the cost"


def _empty_strided(
    device: str, size: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return torch.empty_strided(size, strides, dtype=dtype, device=device)


# The allocation functions of Inductor's graphs, by device type. They cost less than half of
# new_empty and behave like it, except that they skip deterministic fills. Sizes and strides must be
# tuples, and the GPU must be the current one.
empty_strided: dict[str, Callable[..., Tensor]] = {
    device: take(
        f"torch:_C._dynamo.guards._empty_strided_{device}",
        functools.partial(_empty_strided, device),
        f"the output of a warm call on the {device}",
        _SLOWER_MEMORY,
    )
    for device in ("cpu", "cuda")
}
# Whether new memory may have to be filled (deterministic algorithms).
fills_memory: Callable[[], bool] = take(
    "torch:_C._get_deterministic_algorithms",
    torch.are_deterministic_algorithms_enabled,
    "whether new memory may have to be filled",
    "torch.are_deterministic_algorithms_enabled tells",
)
# A torch built without CUDA lacks the private name, and does not need it.
current_device: Callable[[], int] = torch.cuda.current_device
if torch.version.cuda is not None:
    current_device = take(
        "torch:_C._cuda_getDevice",
        torch.cuda.current_device,
        "which GPU is the current one",
        "torch.cuda.current_device tells, after checking the state of CUDA",
    )


def _fp32_precision(backend: str, operation: str) -> str:
    """Reads the public setting for fp32 products on CUDA, the only one that outblas needs."""
    if (backend, operation) != ("cuda", "matmul"):
        raise ValueError(f"torch has no public precision setting for {backend!r} and {operation!r}")
    return str(torch.backends.cuda.matmul.fp32_precision)


fp32_precision: Callable[[str, str], str] = take(
    "torch:_C._get_fp32_precision_getter",
    _fp32_precision,
    "whether fp32 products may use tf32",
    "torch.backends.cuda.matmul.fp32_precision tells, which takes six times as long",
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
    """Returns a function that makes contexts without autocast on these device types."""
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


any_autocast: Callable[[], bool] = take(
    "torch:_C._is_any_autocast_enabled",
    lambda: any(torch.is_autocast_enabled(device) for device in AUTOCAST_KEYS),
    "whether autocast is on for any device",
    "torch.is_autocast_enabled is asked for each type of device",
)

# ---- memory of tensors
_MOVES_NOTHING = "`patch(fuse=True)` fuses no gated MLP"
# A weak reference to a storage, and the storage that is at the address of one, or None.
weak_storage: Any = take(
    "torch.multiprocessing.reductions:StorageWeakRef",
    None,
    "knowing whether weights are still the halves of one matrix",
    _MOVES_NOTHING,
)
storage_at: Callable[[int], Any] = take(
    "torch:UntypedStorage._new_with_weak_ptr",
    lambda address: None,
    "knowing whether weights are still the halves of one matrix",
    _MOVES_NOTHING,
)
_use_count = take(
    "torch:_C._storage_Use_Count",
    None,
    "knowing whether tensors share the memory of a weight",
    _MOVES_NOTHING,
)
_sent: dict[Any, Any] | None = take(
    "torch.multiprocessing.reductions:shared_cache",
    None,
    "knowing whether a weight on a GPU is shared with other processes",
    _MOVES_NOTHING,
)


def is_only_user(storage: Any) -> bool:
    """Returns whether one tensor alone uses a storage, as far as torch tells."""
    if _use_count is None or weak_storage is None:
        return False
    alone = _PLAIN.untyped_storage()
    return bool(_use_count(storage._cdata) == _use_count(alone._cdata))


def is_sent(storage: Any) -> bool:
    """Returns whether torch sent a storage to other processes, or got it from one."""
    if _sent is None or weak_storage is None:
        return True
    return weak_storage(storage) in list(_sent.values())


# ---- hooks of all modules
any_global_hook: Callable[[], Any] = take(
    "torch.nn.modules.module:_has_any_global_hook",
    lambda: False,
    "whether hooks for all modules observe the layers of a fused one",
    "such hooks see no fused layers",
)

# ---- types and modes that override functions of torch
_PLAIN = torch.empty(0, device="cpu")


class _Overriding:
    """A value that overrides every function of torch wherever functions may be overridden."""

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        return NotImplemented


_OVERRIDING = _Overriding()


def _mode_is_on() -> bool:
    """Returns whether a function mode is on and may be asked. Only then does a plain tensor count
    as one that overrides functions.
    """
    return has_torch_function((_PLAIN,))


has_override: Callable[..., bool] = take(
    "torch.overrides:has_torch_function_variadic",
    lambda *values: has_torch_function(values),
    "whether a mode or the type of an operand overrides a call",
    "torch.overrides.has_torch_function tells",
)
function_mode_count: Callable[[], int] = take(
    "torch:_C._len_torch_function_stack",
    _mode_is_on,
    "whether function modes are on",
    "torch.overrides.has_torch_function, asked with a plain tensor, finds the mode",
)
modes_disabled: Callable[[], bool] = take(
    "torch:_C._is_torch_function_all_disabled",
    lambda: not _mode_is_on(),
    "whether the function modes that are on may be asked",
    "torch.overrides.has_torch_function, asked with a plain tensor, finds the mode",
)
overrides_enabled: Callable[[], bool] = take(
    "torch:_C._is_torch_function_enabled",
    lambda: has_torch_function((_OVERRIDING,)),
    "whether types may override functions",
    "torch.overrides.has_torch_function, asked with an overriding value, tells",
)
function_mode: Callable[[int], Any] = take(
    "torch:_C._get_function_stack_at",
    lambda index: None,
    "which function mode is on",
    "a default device counts as a mode that overrides calls, which makes them slower",
)
DeviceContext: Any = take(
    "torch.utils._device:DeviceContext",
    None,
    "recognising the function mode of a default device",
    "a default device counts as a mode that overrides calls, which makes them slower",
)
# A context without modes and types that override functions; None where torch has none.
without_overrides: Callable[[], AbstractContextManager[Any]] | None = take(
    "torch:_C.DisableTorchFunction",
    None,
    "the fast path of calls under a default device",
    "calls under a default device take the slow path",
)
_disable_types = take(
    "torch:_C.DisableTorchFunctionSubclass",
    None,
    "reading properties of operands whose types override functions",
    "torch.Tensor.__torch_function__ runs a function with overrides off",
)


def as_plain(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function with __torch_function__ overrides of tensor types switched off."""
    if _disable_types is None:
        call: Any = Tensor.__torch_function__  # torch has no type for it
        return call(function, (), arguments, {})
    with _disable_types():
        return function(*arguments)


# ---- modes that watch operators
dispatch_mode_count: Callable[[], int] = take(
    "torch:_C._len_torch_dispatch_stack",
    lambda: 1,
    "whether dispatch modes are on, which observe operators",
    "every call goes through the registered operators, which any mode observes",
)
dispatch_modes: Callable[[], Sequence[object]] = take(
    "torch:utils._python_dispatch._get_current_dispatch_mode_stack",
    tuple,
    "the dispatch modes that are on, among them a counter of FLOP",
    "the FLOP counter that is on at the first counted call misses products of outblas",
)
profiled: Callable[[], bool] = take(
    "torch:_C._autograd._profiler_enabled",
    lambda: True,
    "whether the profiler is on, which records operators",
    "every call goes through the registered operators, which the profiler records",
)
_guards: Any = take(
    "torch:_C._dynamo.guards.TensorGuards",
    None,
    "the fast path of warm calls, where one guard compares all properties of the operands",
    "every call goes through the registered operators",
)


def tensor_guard(
    tensors: Sequence[Tensor], sizes: Any = None, strides: Any = None
) -> Callable[..., bool] | None:
    """Returns a guard that compares tensors with these in all that a plan depends on: type, sizes,
    strides, dtype, device, requires_grad and dispatch keys. Returns None where torch has no such
    guard.

    sizes, strides: a list for each tensor, in the place of its own, with None for what is not
    compared.
    """
    if _guards is None:
        return None
    guard = _guards(
        *tensors,
        dynamic_dims_sizes=sizes or [list(t.shape) for t in tensors],
        dynamic_dims_strides=strides or [list(t.stride()) for t in tensors],
    )
    check: Callable[..., bool] = guard.check
    return check


# Returns a view of a tensor's memory from its first element on, which autograd does not see.
reinterpret: Callable[..., Tensor] = take(
    "torch:_C._dynamo.guards._reinterpret_tensor",
    lambda t, size, strides: t.detach().as_strided(size, strides),
    "the transposed weight of a warm call",
    "torch.as_strided makes it, which takes three times as long",
)


def _is_tracing() -> bool | None:
    is_tracing: Any = vars(torch.jit)["is_tracing"]  # torch has no type for it
    return is_tracing() or None


# Returns None while nothing is being traced.
tracing_state: Callable[[], Any] = take(
    "torch:_C._get_tracing_state",
    _is_tracing,
    "whether torch.jit.trace records operators",
    "torch.jit.is_tracing tells",
)


def _no_level() -> int | None:
    return None


will_execute: Callable[[Any], bool] = take(
    "torch:_C._will_engine_execute_node",
    lambda node: False,
    "whether a backward pass adds a gradient to `.grad`, within `outblas.accumulate_gradients`",
    "autograd adds every gradient",
)


def will_accumulate(node: Any) -> bool:
    """Returns whether the backward pass that is running will run an AccumulateGrad node, so that it
    adds to `.grad`. `torch.autograd.grad` returns gradients instead.
    """
    try:
        return will_execute(node)
    except RuntimeError:  # its leaf is one of those that torch.autograd.grad was asked for
        return False


def has_gradient_hooks(leaf: Tensor) -> bool:
    """Returns whether hooks of a leaf would see its gradient, or `.grad` after each sum."""
    hooks = leaf._backward_hooks, getattr(leaf, "_post_accumulate_grad_hooks", None)
    return any(map(bool, hooks))


# The level of torch.func's transforms; None outside of them.
transform_level: Callable[[], int | None] = take(
    "torch:_C._functorch.maybe_current_level",
    _no_level,
    "whether a call is inside torch.func's transforms",
    "torch has no public name for it, so gradients by torch.func raise torch's own error",
)
knows_transforms = transform_level is not _no_level
# Skips inference tensors.
increment_version: Callable[[Any], None] = take(
    "torch:_C._increment_version",
    torch.autograd.graph.increment_version,
    "telling autograd that a call wrote to a tensor",
    "torch.autograd.graph.increment_version does",
)

# Assumes a condition of sizes that only a run tells. The program then asserts it.
assume: Callable[[Any], Any] = take(
    "torch:_check",
    bool,
    "compiling calls whose sizes only a run tells",
    "the error of a condition that nobody knows is torch's own",
)


def _no_version(t: Tensor) -> int:
    return 0


def _version(t: Tensor) -> int:
    return t._version


# The tensor's version counter. Without it, each write counts once more than it happened.
version: Callable[[Tensor], int] = (
    _version
    if take(
        "torch:Tensor._version",
        None,
        "whether an operator counted that it wrote to a tensor",
        "each write counts once too often",
    )
    else _no_version
)


# ---- levels of autograd
def _inference_guard() -> AbstractContextManager[Any]:
    """Runs below autograd by a public name: inference mode skips autograd's kernels."""
    return torch.inference_mode()


# Kernels of the Autograd key call the operator again below this guard, where the other dispatch
# keys see it. torch's own library code uses it too.
below_autograd: Callable[[], AbstractContextManager[Any]] = take(
    "torch:_C._AutoDispatchBelowAutograd",
    _inference_guard,
    "running an operator below autograd",
    "it runs in inference mode, and its results are copied",
)


def _copied(found: Any) -> Any:
    """Copies what an operator made in inference mode into tensors that autograd can save."""
    if isinstance(found, tuple):
        return tuple(map(_copied, found))
    if isinstance(found, Tensor) and found.is_inference():
        return found if torch.is_inference_mode_enabled() else found.clone()
    return found


def _unchanged(found: Any) -> Any:
    return found


# Converts what an operator returned `below_autograd` for use above it.
from_below: Callable[[Any], Any] = _copied if below_autograd is _inference_guard else _unchanged
# A base class whose `apply` records at one level of torch.func's transforms, within a context that
# allows this.
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
    """Replaces `forward_ad` where it does not expose its level."""

    @property
    def _current_level(self) -> int:
        """Returns at least 0 where forward mode is on, and where no tensor can be dual -1."""
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
        "torch.autograd.forward_ad.make_dual tells: it raises outside of a level",
    )
    is None
    else forward_ad
)
forward_gradients: Callable[[bool], AbstractContextManager[Any]] = take(
    "torch.autograd.forward_ad:_set_fwd_grad_enabled",
    lambda enabled: torch.inference_mode(not enabled),
    "forward-mode gradients inside our Function",
    "torch.inference_mode(False) switches them on",
)


# ---- tensors that stand for others while a program is traced
class _NoTensor:
    """A class without instances."""


_FAKE = "calls under a caller's FakeTensorMode go to torch; torch.compile works as before"
FakeTensor: Any = take(
    "torch._subclasses.fake_tensor:FakeTensor",
    _NoTensor,
    "treating fake tensors as plain ones",
    _FAKE,
)
FunctionalTensor: Any = take(
    "torch._subclasses.functional_tensor:FunctionalTensor",
    _NoTensor,
    "treating functional tensors as plain ones",
    _FAKE,
)


# ---- operators
_fake_implementations = take(
    "torch._library.simple_registry:singleton",
    None,
    "registering fake implementations",
    "torch.library.register_fake does, which searches all modules for its caller",
)


def register_fake(name: str, function: Callable[..., Any], library: torch.library.Library) -> None:
    """Registers the fake implementation of an operator such as "outblas::matmul"."""
    if _fake_implementations is None:
        torch.library.register_fake(name, function, lib=library)
    else:
        _fake_implementations.find(name).fake_impl.register(function, "outblas", library)


# ---- Dynamo
F = TypeVar("F", bound=Callable[..., Any])


def constant_to_dynamo(function: F) -> F:
    """Has Dynamo call a function and keep the result as a constant, where it would trace it.

    `torch.compiler.assume_constant_result` sets the same attribute, but imports Dynamo, which takes
    longer than all of `import outblas`. A torch that reads another attribute traces the function.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


# Whether Dynamo hands a frozen dataclass, such as a config, to a function that it calls. torch 2.11
# fails there with an internal error.
dataclasses_are_constants: bool = torch.__version__ >= "2.13"


# ---- Inductor
def inductor_choices() -> tuple[list[Any], Callable[[Any], None]]:
    """Returns Inductor's list of external matmuls, and the function that registers one.

    Raises RuntimeError where this torch has no such list. Importing Inductor takes a second, so
    nothing is looked up before it is needed.
    """
    reason = "outblas.inductor_choice raises RuntimeError; torch.compile works as before"
    purpose = "offering outblas.matmul to Inductor's max-autotune"
    choices = take("torch._inductor.config:external_matmul", None, purpose, reason)
    register = take("torch._inductor.kernel.mm:lazy_register_extern_choice", None, purpose, reason)
    if choices is None or register is None:
        raise RuntimeError(
            f"torch {torch.__version__} cannot take an external matmul into Inductor's choice:  "
            "torch._inductor.config.external_matmul is gone. A program that calls outblas.matmul "
            "itself compiles without it"
        )
    return choices, register

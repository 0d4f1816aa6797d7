"""The fast path of eager calls. It runs a plan directly when nothing would observe, record or
transform the operator.

A call through torch's dispatcher costs the host more than everything else except the launch.
Comparing every property of every tensor in Python costs as much. Dynamo's guard compares them all,
and the state of the dispatcher, in one call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from outblas.base.compat.torch_private import (
    DeviceContext,
    any_autocast,
    fp32_precision,
    function_mode,
    tensor_guard,
    tracing_state,
    transform_level,
    without_overrides,
)

# The guards of a plan do not check for the modes of tracers and of fake tensors.
from outblas.base.compat.torch_private import dispatch_mode_count as _dispatch_modes
from outblas.base.compat.torch_private import forward_levels as _forward_levels
from outblas.base.compat.torch_private import function_mode_count as function_modes
from outblas.base.compat.torch_private import get_sm_carveout as _sm_carveout
from outblas.base.compat.torch_private import increment_version as _increment_version
from outblas.base.compat.torch_private import modes_disabled as _modes_disabled
from outblas.base.compat.torch_private import profiled as _profiled
from outblas.base.cuda_graphs import capturing
from outblas.call import dispatch
from outblas.call.dispatch import Call, Plan, tf32_requested
from outblas.call.epilogue import EpilogueArgs
from outblas.call.invariance import flag as _invariance
from outblas.call.problem import check_writable
from outblas.call.sm_carveout import call_limit as _limit
from outblas.call.tensor_memory import LINE, read_address
from outblas.torch_ops import native, ops
from outblas.torch_ops.call import EagerChoice
from outblas.torch_ops.flop_formulas import register_if_counted

Tensor = torch.Tensor
Parameter = torch.nn.Parameter

_gradients_enabled = torch.is_grad_enabled
_address = read_address

_LINE_MASK = LINE - 1
_native_matmul = native.matmul

# Runs a plan under autograd. Takes the plan, the call's arguments, and the shape of x if x must be
# saved.
RecordedRun = Callable[..., Tensor]


# Reading slots is faster than reading a NamedTuple's fields; `eq` and `repr` would cost import
# time.
@dataclass(slots=True, eq=False, repr=False)
class PlanConditions:
    """Further conditions of a plan, where gradients or tf32 matter."""

    requires_grad: bool | None  # whether gradients are on; None where no tensor requires them
    tf32: bool | None  # whether fp32 products use tf32; None for other operands
    # shape of x, the activation's argument, where gradients need it
    x_shape: tuple[int, ...] | None
    # what `LinearFunction` needs to record the call; None where `MatmulFunction` does
    layer: Any = None


# A plan for calls of known shapes: (matches, plan, conditions). It is a plain tuple because every
# warm call unpacks one.

# `matches` tells whether a call's tensors equal the remembered ones in type, sizes, strides, dtype,
# device, requires_grad and dispatch keys. The conditions are None where neither gradients nor tf32
# matter.
EagerPlan = tuple[Callable[..., bool], Plan, PlanConditions | None]

# Calls of the same shapes share a cache key. Their plans differ in layouts, dtypes, devices, and
# whether inference mode is on. Beyond this number the oldest of them is forgotten.
_PLANS_PER_KEY = 16
_cache: dict[tuple[Any, ...], tuple[EagerPlan, ...]] = dispatch.eager_plans
_recorded_run: RecordedRun | None = None


def register_recorded_run(function: RecordedRun) -> None:
    """Registers the function that runs a plan under autograd. Its backward pass calls `run`."""
    global _recorded_run
    _recorded_run = function


def overriding_mode() -> bool:
    """Returns whether this thread has a function mode that may change the result of a product.

    A default device does not count. It is the mode that `torch.set_default_device` and `with
    torch.device(...)` set, and it only affects functions that create tensors.
    """
    return any(type(function_mode(i)) is not DeviceContext for i in range(function_modes()))


def run(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    out: Tensor | None,
    alpha: Any,
    beta: Any,
    batch_invariant: bool | None,
    extra: EpilogueArgs | None = None,
    choice: EagerChoice | None = None,
) -> Tensor | None:
    """Runs a call by its plan, which is made if it is the first such call. Returns None where the
    call must go through an operator.

    `choice`: the dtype, kernel, config and mode of a call that names any of them.

    Arguments may have any type. Dynamo must not trace this function, because it must see the
    operator.
    """
    if _native_matmul is not None and _is_bare(c, out, extra, choice):
        computed = _native_matmul(a, b, batch_invariant)
        if computed is not None:
            return computed
    if function_modes() and not _modes_disabled():
        return without_modes(run, a, b, c, out, alpha, beta, batch_invariant, extra, choice)
    if _dispatch_modes():
        register_if_counted()
        return None
    if (
        _forward_levels._current_level >= 0
        or _profiled()
        or (type(a) is not Tensor and type(a) is not Parameter)
        or (type(b) is not Tensor and type(b) is not Parameter)
        or (c is not None and type(c) is not Tensor and type(c) is not Parameter)
        or (out is not None and type(out) is not Tensor and type(out) is not Parameter)
    ):
        return None
    if batch_invariant is None:
        batch_invariant = _invariance.ever and _invariance.requested()
    elif batch_invariant is not True and batch_invariant is not False:
        return None
    tensors: tuple[Tensor, ...] = (a, b)
    try:
        in_line = _address(a) & _LINE_MASK, _address(b) & _LINE_MASK
        left = (_limit.ever and _limit.count()) or _sm_carveout()
        key: tuple[Any, ...] = (a.shape, b.shape, in_line, batch_invariant, left, choice)
        if out is not None:
            tensors = (a, b, out)
            key = (key, "out", _address(out) & 15)
        if c is not None:
            tensors = (*tensors, c)
            key = (key, "c", _address(c) & 15, alpha == 1, alpha == 0, beta == 0)
        if extra is not None:
            for t in extra[1:]:
                if t is not None and type(t) is not Tensor and type(t) is not Parameter:
                    return None
                key = (key, None if t is None else _address(t) & 15)
            tensors = (*tensors, *[t for t in extra[1:] if t is not None])
            key = (key, "activation", extra[0])
    except RuntimeError:  # no address: sparse or wrapped tensors
        return None
    plans = _cache.get(key, ())
    entry: EagerPlan | None
    for entry in plans:
        matches, _, conditions = entry
        if matches(*tensors):
            if conditions is None:
                break
            requires_grad, tf32 = conditions.requires_grad, conditions.tf32
            if (requires_grad is None or requires_grad is _gradients_enabled()) and (
                tf32 is None or tf32 is (fp32_precision("cuda", "matmul") == "tf32")
            ):
                break
    else:
        given = a, b, c, out, alpha, beta, batch_invariant, extra, choice
        entry = _planned_call(key, plans, tensors, given)
        if entry is None:
            return None
    _, plan, conditions = entry
    if conditions is not None and conditions.requires_grad and _recorded_run is not None:
        return _recorded_run(plan, a, b, c, alpha, beta, batch_invariant, extra, conditions.x_shape)
    if extra is None:
        result: Tensor = plan(a, b, c, out, alpha, beta)
    else:
        result = plan(a, b, c, out, alpha, beta, *extra[1:])
        if extra[3] is not None:
            _increment_version((extra[3],))
    if out is not None:
        _increment_version((out,))
    return result


def _is_bare(
    c: Tensor | None, out: Tensor | None, extra: EpilogueArgs | None, choice: EagerChoice | None
) -> bool:
    """Returns whether a call is a product of two operands and asks for nothing else."""
    return c is None and out is None and extra is None and choice is None


def _planned_call(
    key: tuple[Any, ...],
    plans: tuple[EagerPlan, ...],
    tensors: tuple[Tensor, ...],
    given: tuple[Any, ...],
) -> EagerPlan | None:
    """Plans a call of `run` and caches the plan, as `planned` does, in the C++ module too."""
    a, b, c, out, alpha, beta, batch_invariant, extra, choice = given
    dtype, kernel, config, tune = choice or (None, "", "", "")
    call = Call(a, b, c, out, dtype, alpha, beta, kernel, config, tune, batch_invariant, extra)
    entry = planned(key, plans, tensors, call)
    if entry is not None and _is_bare(c, out, extra, choice):
        _, plan, conditions = entry
        if conditions is None or not conditions.requires_grad:
            operands = a, b, None, None, None, None
            native.remember(native.Kind.MATMUL, operands, plan, batch_invariant=batch_invariant)
    return entry


def without_modes(fast_path: Callable[..., Tensor | None], *call: Any) -> Tensor | None:
    """Calls a fast path with function modes off; otherwise they would be asked about every
    attribute that it reads. Returns None where a mode may change the result.
    """
    if without_overrides is None or overriding_mode():
        return None
    with without_overrides():
        return fast_path(*call)


def planned(
    key: tuple[Any, ...],
    plans: tuple[EagerPlan, ...],
    tensors: tuple[Tensor, ...],
    call: Call,
) -> EagerPlan | None:
    """Plans a call, if operators would do nothing beyond running its plan, and caches the plan.

    Returns None for the other calls, and for those that do not fit together: the slow path tells
    the caller what is wrong in terms of the caller's own arguments.
    """
    requires_grad = _gradients_enabled() if any(t.requires_grad for t in tensors) else None
    if requires_grad and (call.kernel or call.tune or call.out_dtype is not None):
        return None  # the operator remembers the choice for the products of gradients
    if not (is_unobserved(tensors) and (not requires_grad or _recordable(call))):
        return None
    if len({id(t) for t in tensors}) < len(tensors):
        return None  # a guard matches different tensors only
    matches = tensor_guard(tensors)
    if matches is None:
        return None
    x_shape = None
    try:
        _check_arguments(call)
        if requires_grad and call.extra is not None and call.extra.activation:
            x = ops.empty_x(call.a, call.b, call.c)
            call, x_shape = call._replace(extra=call.extra._replace(aux=x)), tuple(x.shape)
        plan = dispatch.cached_plan(call)
        if plan is None and capturing(call.a.device):
            return None  # what runs in its place then is no plan for later calls
        plan = plan or dispatch.find_plan(call)
    except (TypeError, ValueError):
        return None
    tf32 = tf32_requested() if call.a.dtype is torch.float32 else None
    conditions = None
    if requires_grad is not None or tf32 is not None:
        conditions = PlanConditions(requires_grad, tf32, x_shape)
    entry = (matches, plan, conditions)
    dispatch.remember(_cache, key, (*plans[1 - _PLANS_PER_KEY :], entry))
    return entry


def _check_arguments(call: Call) -> None:
    """Checks what planning does not. Raises ValueError."""
    if call.extra is not None:
        ops.check_activation(call.extra.activation)
    for name, t in (("out", call.out), ("aux", call.extra and call.extra.aux)):
        if t is not None:
            check_writable(t, name)


def is_unobserved(tensors: tuple[Tensor, ...]) -> bool:
    """Returns whether operators would only compute the product of these tensors, without casting,
    recording or resolving them.
    """
    transformed = transform_level() is not None or tracing_state() is not None or any_autocast()
    return not transformed and all(
        _address(t) and not (t.is_nested or t.is_neg() or t.is_conj()) for t in tensors
    )


def _recordable(call: Call) -> bool:
    """Returns whether autograd can record a call with this plan."""
    writes = call.out is not None or (call.extra is not None and call.extra.aux is not None)
    # torch computes complex products, under its own autograd.
    return not (writes or call.a.is_complex() or _recorded_run is None)

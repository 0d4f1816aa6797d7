"""The short way of an eager call: straight to its plan, where nobody would see, record or transform
the operator.

A call through torch's dispatcher costs the host more than all else but the launch. So does looking
at every trait of every tensor from Python: Dynamo's guard compares them in one call, and the state
of the dispatcher with them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..core import invariance
from ..core.compat.torch_private import (
    DeviceContext,
    any_autocast,
    fp32_precision,
    function_mode,
    tensor_guard,
    tracing_state,
    transform_level,
    without_overrides,
)

# The guards of a plan do not see the modes of tracers and of fake tensors.
from ..core.compat.torch_private import dispatch_mode_count as _dispatch_modes
from ..core.compat.torch_private import forward_levels as _forward_levels
from ..core.compat.torch_private import function_mode_count as function_modes
from ..core.compat.torch_private import increment_version as _increment_version
from ..core.compat.torch_private import modes_disabled as _modes_disabled
from ..core.compat.torch_private import profiled as _profiled
from ..core.epilogue import EpilogueArgs
from ..core.tensor_memory import LINE, read_address
from ..runtime import dispatch
from ..runtime.dispatch import Call, Plan, tf32_requested
from . import ops

Tensor = torch.Tensor
Parameter = torch.nn.Parameter

_gradients_enabled = torch.is_grad_enabled
_address = read_address

_LINE_MASK = LINE - 1

# Runs a plan under autograd: the call's arguments follow the plan, and the shape of x if it is to
# be kept.
RecordedRun = Callable[..., Tensor]


# Slots are read faster than a NamedTuple's fields; `eq` and `repr` would cost import time.
@dataclass(slots=True, eq=False, repr=False)
class PlanConditions:
    """What else has to hold where gradients or tf32 matter to a plan."""

    requires_grad: bool | None  # whether gradients are on; None where no tensor needs them
    tf32: bool | None  # whether fp32 becomes tf32; None for other operands
    x_shape: tuple[int, ...] | None  # of x, the activation's argument, where gradients need it


# A plan that a call of known shapes may take, a plain tuple because every warm call unpacks one.
#
# The first item says of a call's tensors whether their types, sizes, strides, dtypes, devices and
# need of gradients, and what torch's dispatcher would do with them, are those remembered. The
# conditions are None where neither gradients nor tf32 matter.
EagerPlan = tuple[Callable[..., bool], Plan, PlanConditions | None]

# Calls of the same shapes share an entry: they differ in layouts, dtypes, devices, and whether
# inference mode is on.
_PLANS_PER_KEY = 16
_cache: dict[tuple[Any, ...], tuple[EagerPlan, ...]] = dispatch.eager_plans
_recorded_run: RecordedRun | None = None


def register_recorded_run(function: RecordedRun) -> None:
    """Says how a plan runs under autograd, whose backward pass calls `run` in turn."""
    global _recorded_run
    _recorded_run = function


def overriding_mode() -> bool:
    """Whether this thread has a function mode that may change what a product does.

    A default device does not: it is the mode that `torch.set_default_device` and
    `with torch.device(...)` leave, and it concerns functions that make tensors from none.
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
) -> Tensor | None:
    """The product of a call that names no kernel, config, mode or dtype; None where it has to go
    through an operator.

    Arguments may be of any type. Dynamo must not trace this: it is to see the operator.
    """
    if function_modes() and not _modes_disabled():
        return _run_without_modes(a, b, c, out, alpha, beta, batch_invariant, extra)
    if (
        _dispatch_modes()
        or _forward_levels._current_level >= 0
        or _profiled()
        or (type(a) is not Tensor and type(a) is not Parameter)
        or (type(b) is not Tensor and type(b) is not Parameter)
        or (c is not None and type(c) is not Tensor and type(c) is not Parameter)
        or (out is not None and type(out) is not Tensor and type(out) is not Parameter)
    ):
        return None
    if batch_invariant is None:
        batch_invariant = invariance._ever and invariance.requested()
    elif batch_invariant is not True and batch_invariant is not False:
        return None
    tensors: tuple[Tensor, ...] = (a, b)
    try:
        in_line_a, in_line_b = _address(a) & _LINE_MASK, _address(b) & _LINE_MASK
        key: tuple[Any, ...] = (a.shape, b.shape, in_line_a, in_line_b, batch_invariant)
        if out is not None:
            tensors = (a, b, out)
            key = (key, _address(out) & 15)
        if c is not None:
            tensors = (*tensors, c)
            key = (key, _address(c) & 15, alpha == 1, alpha == 0, beta == 0)
        if extra is not None:
            for t in extra[1:]:
                if t is None:
                    key = (key, None)
                    continue
                if type(t) is not Tensor and type(t) is not Parameter:
                    return None
                tensors = (*tensors, t)
                key = (key, _address(t) & 15)
            key = (key, extra[0])
    except RuntimeError:  # no address: sparse, wrapped
        return None
    plans = _cache.get(key, ())
    for matches, plan, conditions in plans:
        if not matches(*tensors):
            continue
        if conditions is not None:
            requires_grad, tf32 = conditions.requires_grad, conditions.tf32
            if requires_grad is not None and requires_grad is not _gradients_enabled():
                continue
            if tf32 is not None and tf32 is not (fp32_precision("cuda", "matmul") == "tf32"):
                continue
            if requires_grad and _recorded_run is not None:
                x_shape = conditions.x_shape
                return _recorded_run(plan, a, b, c, alpha, beta, batch_invariant, extra, x_shape)
        if extra is None:
            result: Tensor = plan(a, b, c, out, alpha, beta)
        else:
            result = plan(a, b, c, out, alpha, beta, *extra[1:])
            if extra[3] is not None:
                _increment_version((extra[3],))
        if out is not None:
            _increment_version((out,))
        return result
    if len(plans) < _PLANS_PER_KEY:
        call = Call(a, b, c, out, None, alpha, beta, "", "", "", batch_invariant, extra)
        _remember(key, plans, tensors, call)
    return None


def _run_without_modes(*call: Any) -> Tensor | None:
    """`run` while function modes are on, which would be asked about every attribute it reads."""
    if without_overrides is None or overriding_mode():
        return None
    with without_overrides():
        return run(*call)


def _remember(
    key: tuple[Any, ...],
    plans: tuple[EagerPlan, ...],
    tensors: tuple[Tensor, ...],
    call: Call,
) -> None:
    """Remembers the plan of a call that has one, if operators would do nothing else just now."""
    requires_grad = _gradients_enabled() if any(t.requires_grad for t in tensors) else None
    if not (is_unobserved(tensors) and (not requires_grad or _recordable(call))):
        return
    x_shape = None
    if requires_grad and call.extra is not None and call.extra.activation:
        x = ops.empty_x(call.a, call.b, call.c)
        call, x_shape = call._replace(extra=call.extra._replace(aux=x)), tuple(x.shape)
    plan = dispatch.cached_plan(call)
    if plan is None:
        return
    matches = tensor_guard(tensors)
    if matches is None:
        return
    tf32 = tf32_requested() if call.a.dtype is torch.float32 else None
    conditions = None
    if requires_grad is not None or tf32 is not None:
        conditions = PlanConditions(requires_grad, tf32, x_shape)
    _cache[key] = (*plans, (matches, plan, conditions))


def is_unobserved(tensors: tuple[Tensor, ...]) -> bool:
    """Whether operators would compute the product of these tensors as they are, and no more."""
    transformed = transform_level() is not None or tracing_state() is not None or any_autocast()
    return not transformed and all(
        _address(t) and not (t.is_nested or t.is_neg() or t.is_conj()) for t in tensors
    )


def _recordable(call: Call) -> bool:
    """Whether autograd can record a call as it is planned."""
    writes = call.out is not None or (call.extra is not None and call.extra.aux is not None)
    # torch takes complex products, under its own autograd.
    return not (writes or call.a.is_complex() or _recorded_run is None)

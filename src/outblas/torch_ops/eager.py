"""The fast path of eager calls of `matmul` and `addmm`, and what it shares with that of `linear`.
It runs a plan directly when nothing would observe, record or transform the operator.
"""

from collections.abc import Callable
from typing import Any

import torch

from outblas.base.compat.torch_private import DeviceContext, function_mode, without_overrides
from outblas.base.compat.torch_private import dispatch_mode_count as _dispatch_modes
from outblas.base.compat.torch_private import function_mode_count as _function_modes
from outblas.base.compat.torch_private import increment_version as _increment_version
from outblas.base.compat.torch_private import modes_disabled as _modes_disabled
from outblas.base.cuda_graphs import capturing
from outblas.call import dispatch, warm
from outblas.call.dispatch import Call
from outblas.call.epilogue import EpilogueArgs
from outblas.call.invariance import flag as _invariance
from outblas.call.problem import check_writable
from outblas.call.warm import Kind, WarmPlan
from outblas.torch_ops import native, ops
from outblas.torch_ops.call import EagerChoice
from outblas.torch_ops.flop_formulas import register_if_counted

Tensor = torch.Tensor

_MATMUL = int(Kind.MATMUL)
_find = warm.find
_native_matmul = native.matmul
# Runs a plan under autograd. Takes the plan, the call's arguments, and the shape of x if x must be
# saved.
_recorded_run: Callable[..., Tensor] | None = None


def register_recorded_run(function: Callable[..., Tensor]) -> None:
    """Registers the function that runs a plan under autograd. Its backward pass calls `run`."""
    global _recorded_run
    _recorded_run = function


def overriding_mode() -> bool:
    """Returns whether this thread has a function mode that may change the result of a product.

    A default device does not count. It is the mode that `torch.set_default_device` and `with
    torch.device(...)` set, and it only affects functions that create tensors.
    """
    return any(type(function_mode(i)) is not DeviceContext for i in range(_function_modes()))


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
    is_bare = c is None and out is None and extra is None and choice is None
    if _native_matmul is not None and is_bare:
        computed = _native_matmul(a, b, batch_invariant)
        if computed is not None:
            return computed
    if batch_invariant is None:
        batch_invariant = _invariance.ever and _invariance.requested()
    elif batch_invariant is not True and batch_invariant is not False:
        return None
    others: warm.Others = ()
    options: tuple[Any, ...] = batch_invariant, choice
    if c is not None or extra is not None:
        others = (c,) if out is None else (c, out)
        if extra is not None:
            others = c, out, *extra[1:]
        factors = alpha == 1, alpha == 0, beta == 0
        options = batch_invariant, choice, extra and extra[0], factors
    elif out is not None:
        others = None, out
    entry = _find(_MATMUL, options, a, b, others)
    if entry is None or entry.plan is None:
        call = a, b, c, out, alpha, beta, batch_invariant, extra, choice
        if entry is None:
            return unless_observed(run, *call)
        if not _plan(entry, *call):
            return None
    if _native_matmul is not None and entry.offered != native.generation:
        entry.offered = native.generation
        if is_bare and not entry.gradients:
            operands = a, b, None, None, None, None
            native.remember(Kind.MATMUL, operands, entry.plan, batch_invariant=batch_invariant)
    plan = entry.plan
    if entry.gradients and _recorded_run is not None:
        x_shape = entry.details
        if x_shape is not None and a.dim() > 1 and b.dim() == 2:  # the entry may have other rows
            x_shape = *a.shape[:-1], x_shape[-1]
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


def unless_observed(fast_path: Callable[..., Tensor | None], *call: Any) -> Tensor | None:
    """Calls a fast path again with function modes off, if they are what observed the call and
    change no result: they would be asked about every attribute that it reads. Returns None
    otherwise, after registering the formulas of FLOP where a counter may observe the call.
    """
    if _dispatch_modes():
        register_if_counted()
    elif _function_modes() and not (_modes_disabled() or overriding_mode()) and without_overrides:
        with without_overrides():
            return fast_path(*call)
    return None


# ---- planning
def _plan(
    entry: WarmPlan,
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    out: Tensor | None,
    alpha: Any,
    beta: Any,
    batch_invariant: bool,
    extra: EpilogueArgs | None,
    choice: EagerChoice | None,
) -> bool:
    """Plans a call of `run`. Returns as `make_plan`."""
    dtype, kernel, config, tune = choice or (None, "", "", "")
    call = Call(a, b, c, out, dtype, alpha, beta, kernel, config, tune, batch_invariant, extra)
    return make_plan(entry, call, lambda x_shape: x_shape)


def make_plan(
    entry: WarmPlan, call: Call, details: Callable[[tuple[int, ...] | None], Any]
) -> bool:
    """Plans a call, if operators would do nothing beyond running its plan, and gives the entry of
    calls like it the plan. `details`: returns those of the entry from the shape of x, if gradients
    need x.

    Returns whether it did: not for the other calls, nor for those that do not fit together, because
    the slow path tells the caller what is wrong in terms of the caller's own arguments.
    """
    tensors = [t for t in (*call[:4], *call.epilogue_tensors) if t is not None]
    if not all(map(warm.is_plain, tensors)) or not warm.is_unchanged(tensors):
        return False
    requires_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    # The operator remembers the choice for the products of gradients.
    chosen = call.kernel or call.tune or call.out_dtype is not None
    if requires_grad and (chosen or not _recordable(call)):
        return False
    x_shape = None
    try:
        _check_arguments(call)
        if requires_grad and call.extra is not None and call.extra.activation:
            x = ops.empty_x(call.a, call.b, call.c)
            call, x_shape = call._replace(extra=call.extra._replace(aux=x)), tuple(x.shape)
        plan = dispatch.cached_plan(call)
        if plan is None and capturing(call.a.device):
            return False  # what runs in its place then is no plan for later calls
        plan = plan or dispatch.find_plan(call)
    except (TypeError, ValueError):
        return False
    return entry.keep(plan, any_rows=dispatch.any_rows(plan), details=details(x_shape))


def _check_arguments(call: Call) -> None:
    """Checks what planning does not. Raises ValueError."""
    if call.extra is not None:
        ops.check_activation(call.extra.activation)
    for name, t in (("out", call.out), ("aux", call.extra and call.extra.aux)):
        if t is not None:
            check_writable(t, name)


def _recordable(call: Call) -> bool:
    """Returns whether autograd can record a call with this plan."""
    writes = call.out is not None or (call.extra is not None and call.extra.aux is not None)
    # torch computes complex products, under its own autograd.
    return not (writes or call.a.is_complex() or _recorded_run is None)

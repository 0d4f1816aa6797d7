"""Plans of grouped products: what a call need not do again after another one like it.

A call checks its arguments, describes the product and chooses a kernel, which takes the host longer
than torch's dispatcher. A plan keeps what came of that, and a guard of torch tells in one call
whether the tensors are as they were. The operator finds its plans here, and so do calls that
nothing observes or records, which need no operator.

A call that writes `aux` has no plan: whether its tensors share memory is to be seen each time.
"""

from collections.abc import Callable
from typing import Any

import torch

from outblas.base.compat.torch_private import dispatch_mode_count as _dispatch_modes
from outblas.base.compat.torch_private import forward_levels as _forward_levels
from outblas.base.compat.torch_private import function_mode_count as _function_modes
from outblas.base.compat.torch_private import profiled as _profiled
from outblas.base.compat.torch_private import tensor_guard
from outblas.base.compiling import CompileForbidden
from outblas.call import dispatch, grouped, invariance
from outblas.call.grouped import NO_TENSORS, Checked, GroupedProblem, GroupedTensors
from outblas.call.hooks import GroupedKernels
from outblas.call.tensor_memory import read_address
from outblas.torch_ops.eager import is_unobserved

Tensor = torch.Tensor
Parameter = torch.nn.Parameter

Options = tuple[Any, ...]  # activation, out_dtype, the kernel's name, zero_tail
GroupedPlan = Callable[..., Tensor]  # plan(mat_a, mat_b, offs, tensors) -> result
# (matches, plan, whether a tensor requires a gradient, layouts): `matches` compares tensors with
# those of the plan in type, sizes, strides, dtype, device, requires_grad and dispatch keys.
_Known = tuple[Callable[..., bool], GroupedPlan, bool, list[Any]]

_PLANS_PER_KEY = 16
_cache: dict[tuple[Any, ...], tuple[_Known, ...]] = dispatch.eager_plans  # cleared with all plans
_gradients_enabled = torch.is_grad_enabled


# ---- plans
def plan_of(problem: GroupedProblem, checked: Checked, kernels: GroupedKernels) -> GroupedPlan:
    """Returns the plan of calls that pose this problem, without an aux."""
    form, shape, dtype = checked.form, checked.result, checked.dtype

    def execute(
        mat_a: Tensor, mat_b: Tensor, offs: Tensor | None, tensors: GroupedTensors
    ) -> Tensor:
        out = mat_a.new_empty(shape, dtype=dtype)
        ends = grouped.ends(offs, tensors)
        if tensors is not NO_TENSORS:
            tensors = grouped.in_kernel_form(tensors, mat_a.shape[0])
        a, b, c, moved = grouped.in_planned_form(form, mat_a, mat_b, out, tensors)
        kernels.run(problem, a, b, c, ends, moved)
        return out

    return execute


def known(
    mat_a: Tensor, mat_b: Tensor, offs: Tensor | None, tensors: GroupedTensors, options: Options
) -> GroupedPlan | None:
    """Returns the plan of a call of the operator, if it has one."""
    given = _given(mat_a, mat_b, offs, tensors)
    key = _key("operator", given, tensors, options)
    found = None if key is None else _matching(key, given)
    return found and found[1]


def remember(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None,
    tensors: GroupedTensors,
    options: Options,
    plan: GroupedPlan,
) -> None:
    """Keeps the plan of a call of the operator."""
    given = _given(mat_a, mat_b, offs, tensors)
    _remember(_key("operator", given, tensors, options), given, plan)


# ---- calls that need no operator
def run(
    mat_a: Tensor, mat_b: Tensor, offs: Tensor | None, tensors: GroupedTensors, options: Options
) -> Tensor | None:
    """Runs a call whose plan is known. Returns None where it must go through the operator.

    Dynamo must not trace this function, because it must see the operator.
    """
    if _is_observed() or invariance.wanted(None):  # which the operator refuses
        return None
    given = _given(mat_a, mat_b, offs, tensors)
    key = _key("call", given, tensors, options)
    found = None if key is None else _matching(key, given)
    if found is None:
        return None
    _, plan, requires_grad, _ = found
    if requires_grad and _gradients_enabled():
        return None
    try:
        return plan(mat_a, mat_b, offs, tensors)
    except CompileForbidden:  # with other settings of torch; the operator knows what to do
        return None


def remember_call(
    mat_a: Tensor, mat_b: Tensor, offs: Tensor | None, tensors: GroupedTensors, options: Options
) -> None:
    """Keeps the plan with which the operator has just run a call, if it has one and did nothing
    beyond running it.
    """
    given = _given(mat_a, mat_b, offs, tensors)
    if _gradients_enabled() and any(t.requires_grad for t in given):
        return
    if any(type(t) is not Tensor and type(t) is not Parameter for t in given):
        return
    if _is_observed() or not is_unobserved(given):
        return
    key, layouts = _key("operator", given, tensors, options), _layouts(given)
    for _, plan, _, there in _cache.get(key, ()) if key is not None else ():
        if there == layouts:
            _remember(_key("call", given, tensors, options), given, plan)
            return


def _is_observed() -> bool:
    """Returns whether something besides the operator's own kernels would see the operator."""
    has_modes = _dispatch_modes() > 0 or _function_modes() > 0
    return has_modes or _forward_levels._current_level >= 0 or _profiled()


# ---- the cache
def _given(
    mat_a: Tensor, mat_b: Tensor, offs: Tensor | None, tensors: GroupedTensors
) -> tuple[Tensor, ...]:
    """Returns the tensors that a call has; none for a product of batches, nor for a call with both
    ends of groups and counts, which is refused.
    """
    if tensors is NO_TENSORS:
        return () if offs is None else (mat_a, mat_b, offs)
    if (offs is None) == (tensors.counts is None):
        return ()
    return (mat_a, mat_b, *[t for t in (offs, *tensors) if t is not None])


def _key(
    level: str, given: tuple[Tensor, ...], tensors: GroupedTensors, options: Options
) -> tuple[Any, ...] | None:
    """Returns what a plan depends on and a guard does not compare. Returns None for a call that has
    no plan: a product of batches, one with an aux, one of operands without an address.
    """
    if not given or tensors.aux is not None:
        return None
    try:
        addresses = [read_address(t) & 15 for t in given]
    except RuntimeError:  # sparse or wrapped tensors
        return None
    there = None if tensors is NO_TENSORS else tuple([t is None for t in tensors])
    return ("grouped_mm", level, given[0].shape, given[1].shape, *addresses, there, options)


def _layouts(given: tuple[Tensor, ...]) -> list[Any]:
    return [(t.shape, t.stride(), t.dtype, t.device) for t in given]


def _matching(key: tuple[Any, ...], given: tuple[Tensor, ...]) -> _Known | None:
    for found in _cache.get(key, ()):
        if found[0](*given):
            return found
    return None


def _remember(key: tuple[Any, ...] | None, given: tuple[Tensor, ...], plan: GroupedPlan) -> None:
    if key is None or len({id(t) for t in given}) < len(given):
        return  # a guard matches different tensors only
    matches = tensor_guard(given)
    if matches is not None:
        found = matches, plan, any(t.requires_grad for t in given), _layouts(given)
        plans = _cache.get(key, ())[1 - _PLANS_PER_KEY :]
        dispatch.remember(_cache, key, (*plans, found))

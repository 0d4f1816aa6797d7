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

from ..core import grouped
from ..core.compat.torch_private import dispatch_mode_count as _dispatch_modes
from ..core.compat.torch_private import forward_levels as _forward_levels
from ..core.compat.torch_private import function_mode_count as _function_modes
from ..core.compat.torch_private import profiled as _profiled
from ..core.compat.torch_private import tensor_guard
from ..core.compiling import CompileForbidden
from ..core.grouped import NO_TENSORS, Checked, GroupedProblem, GroupedTensors
from ..core.tensor_memory import read_address
from ..runtime import dispatch
from ..runtime.hooks import GroupedKernels
from .eager import is_unobserved

Tensor = torch.Tensor
Parameter = torch.nn.Parameter

# mat_a, mat_b, offs, bias, residual, a_index, scatter_index, scatter_weights
Operands = tuple[Tensor | None, ...]
Options = tuple[Any, ...]  # activation, out_dtype, kernel name, and zero_tail of the operator alone
GroupedPlan = Callable[..., Tensor]  # plan(*operands) -> result
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
        mat_a: Tensor, mat_b: Tensor, offs: Tensor, bias: Tensor | None, *rest: Tensor | None
    ) -> Tensor:
        out = mat_a.new_empty(shape, dtype=dtype)
        tensors = NO_TENSORS
        if bias is not None or rest != _NOTHING:
            tensors = GroupedTensors(bias, rest[0], None, *rest[1:])
            tensors = grouped.in_kernel_form(tensors, mat_a.shape[0])
        a, b, c, moved = grouped.in_planned_form(form, mat_a, mat_b, out, tensors)
        kernels.run(problem, a, b, c, offs.contiguous(), moved)
        return out

    return execute


_NOTHING = (None, None, None, None)


def known(operands: Operands, options: Options) -> GroupedPlan | None:
    """Returns the plan of a call of the operator, if it has one."""
    key = _key("operator", operands, options)
    found = None if key is None else _matching(key, _tensors(operands))
    return found and found[1]


def remember(operands: Operands, options: Options, plan: GroupedPlan) -> None:
    """Keeps the plan of a call of the operator."""
    _remember("operator", operands, options, plan)


# ---- calls that need no operator
def run(operands: Operands, options: Options) -> Tensor | None:
    """Runs a call whose plan is known. Returns None where it must go through the operator.

    Operands may have any type. Dynamo must not trace this function, because it must see the
    operator.
    """
    if _is_observed():
        return None
    key = _key("call", operands, options)
    found = None if key is None else _matching(key, _tensors(operands))
    if found is None:
        return None
    _, plan, requires_grad, _ = found
    if requires_grad and _gradients_enabled():
        return None
    try:
        return plan(*operands)
    except CompileForbidden:  # with other settings of torch; the operator knows what to do
        return None


def remember_call(operands: Operands, options: Options) -> None:
    """Keeps the plan with which the operator has just run a call, if it has one and did nothing
    beyond running it.
    """
    tensors = _tensors(operands)
    if _gradients_enabled() and any(t.requires_grad for t in tensors):
        return
    if any(type(t) is not Tensor and type(t) is not Parameter for t in tensors):
        return
    if _is_observed() or not is_unobserved(tensors):
        return
    key, layouts = _key("operator", operands, (*options, False)), _layouts(tensors)
    for _, plan, _, there in _cache.get(key, ()) if key is not None else ():
        if there == layouts:
            _remember("call", operands, options, plan)
            return


def _is_observed() -> bool:
    """Returns whether something besides the operator's own kernels would see the operator."""
    return bool(
        _dispatch_modes() or _function_modes() or _forward_levels._current_level >= 0 or _profiled()
    )


# ---- the cache
def _tensors(operands: Operands) -> tuple[Tensor, ...]:
    return tuple([t for t in operands if t is not None])


def _key(level: str, operands: Operands, options: Options) -> tuple[Any, ...] | None:
    """Returns what a plan depends on and a guard does not compare. Returns None for operands that
    have no address.
    """
    a, b, *_ = operands
    assert a is not None
    assert b is not None
    try:
        addresses = [None if t is None else read_address(t) & 15 for t in operands]
    except RuntimeError:  # sparse or wrapped tensors
        return None
    return ("grouped_mm", level, a.shape, b.shape, *addresses, options)


def _layouts(tensors: tuple[Tensor, ...]) -> list[Any]:
    return [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]


def _matching(key: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> _Known | None:
    for found in _cache.get(key, ()):
        if found[0](*tensors):
            return found
    return None


def _remember(level: str, operands: Operands, options: Options, plan: GroupedPlan) -> None:
    key, tensors = _key(level, operands, options), _tensors(operands)
    if key is None or len({id(t) for t in tensors}) < len(tensors):
        return  # a guard matches different tensors only
    matches = tensor_guard(tensors)
    if matches is not None:
        found = matches, plan, any(t.requires_grad for t in tensors), _layouts(tensors)
        plans = _cache.get(key, ())[1 - _PLANS_PER_KEY :]
        dispatch.remember(_cache, key, (*plans, found))

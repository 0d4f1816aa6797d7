"""Plans of grouped products: what a call need not do again after another one like it.

A call checks its arguments, describes the product and chooses a kernel, which takes the host longer
than torch's dispatcher. A plan keeps what came of that, and a guard of torch tells in one call
whether the tensors are as they were. The operator finds its plans here, and so do calls that
nothing observes or records, which need no operator.

A call that writes `aux` has no plan: whether its tensors share memory is to be seen each time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from outblas.base.compiling import CompileForbidden
from outblas.call import grouped, invariance, warm
from outblas.call.grouped import NO_TENSORS, Checked, GroupedProblem, GroupedTensors
from outblas.call.hooks import GroupedKernels
from outblas.call.warm import Kind

Tensor = torch.Tensor

_GROUPED_MM, _GROUPED_OPERATOR = int(Kind.GROUPED_MM), int(Kind.GROUPED_OPERATOR)
Options = tuple[Any, ...]  # activation, out_dtype, the kernel's name, zero_tail
GroupedPlan = Callable[..., Tensor]  # plan(mat_a, mat_b, offs, tensors) -> result


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
    entry = _entry(_GROUPED_OPERATOR, mat_a, mat_b, offs, tensors, options)
    return None if entry is None else entry.plan


def remember(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None,
    tensors: GroupedTensors,
    options: Options,
    plan: GroupedPlan,
) -> None:
    """Keeps the plan of a call of the operator."""
    entry = _entry(_GROUPED_OPERATOR, mat_a, mat_b, offs, tensors, options)
    if entry is not None and entry.plan is None:
        entry.keep(plan, details=_layouts((mat_a, mat_b, offs, *tensors)))


# ---- calls that need no operator
def run(
    mat_a: Tensor, mat_b: Tensor, offs: Tensor | None, tensors: GroupedTensors, options: Options
) -> Tensor | None:
    """Runs a call whose plan is known. Returns None where it must go through the operator.

    Dynamo must not trace this function, because it must see the operator.
    """
    entry = _entry(_GROUPED_MM, mat_a, mat_b, offs, tensors, options)
    if entry is None or entry.plan is None or invariance.wanted(None):  # which the operator refuses
        return None
    try:
        result: Tensor = entry.plan(mat_a, mat_b, offs, tensors)
    except CompileForbidden:  # with other settings of torch; the operator knows what to do
        return None
    return result


def remember_call(
    mat_a: Tensor, mat_b: Tensor, offs: Tensor | None, tensors: GroupedTensors, options: Options
) -> None:
    """Keeps the plan with which the operator has just run a call, if it has one and did nothing
    beyond running it.
    """
    entry = _entry(_GROUPED_MM, mat_a, mat_b, offs, tensors, options)
    given = [t for t in (mat_a, mat_b, offs, *tensors) if t is not None]
    if entry is None or entry.plan is not None or not all(map(warm.is_plain, given)):
        return
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return
    layouts = _layouts((mat_a, mat_b, offs, *tensors))
    for other in entry.alike(_GROUPED_OPERATOR) if warm.is_unchanged(given) else ():
        if other.details == layouts:
            entry.keep(other.plan)
            return


def _entry(
    kind: int,
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None,
    tensors: GroupedTensors,
    options: Options,
) -> warm.WarmPlan | None:
    """Returns the entry of a call; none for a product of batches, nor for a call with an aux, nor
    for one with both ends of groups and counts, which is refused.
    """
    if tensors is NO_TENSORS:
        return None if offs is None else warm.find(kind, options, mat_a, mat_b, (offs,))
    if tensors.aux is not None or (offs is None) == (tensors.counts is None):
        return None
    return warm.find(kind, options, mat_a, mat_b, (offs, *tensors))


def _layouts(tensors: Sequence[Tensor | None]) -> list[Any]:
    return [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors]

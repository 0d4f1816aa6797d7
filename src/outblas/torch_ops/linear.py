"""The fast path of `linear`, and its autograd function.

`eager.run` would compute `input @ weight.t()`: autograd would record the transposition as a node of
its own, and gradients of a transposed operand need views. Here autograd records one node, and the
gradients are products of the tensors as they are stored:

    g = gradient of x = input · weightᵀ + bias, through the activation
    dinput = g weight    dweight = gᵀ input    dbias = g, summed over rows    dresidual = gradient
    of the output

That holds for tensors in the layouts that layers have. For the others, `MatmulFunction` computes
the gradients.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from outblas.base.compat.torch_private import increment_version as _increment_version
from outblas.base.compat.torch_private import reinterpret as _reinterpret
from outblas.call import warm
from outblas.call.context_flag import accumulation as _accumulation
from outblas.call.context_flag import readiness as _readiness
from outblas.call.dispatch import Call, Plan
from outblas.call.invariance import flag as _invariance
from outblas.call.warm import Kind, WarmPlan
from outblas.torch_ops import eager, native, ops
from outblas.torch_ops.accumulation import add_to_grad
from outblas.torch_ops.autograd import as_rows, gradient_of_x, product, recorded_run
from outblas.torch_ops.autograd_levels import direct_apply, unseen_by_types
from outblas.torch_ops.call import EagerChoice, OperatorChoice

Tensor = torch.Tensor

_LINEAR = int(Kind.LINEAR)
_find = warm.find
_native_linear = native.linear


@dataclass(slots=True, eq=False, repr=False)
class _Details:
    """What calls like one take besides its plan.

    size, strides: those of the transposed weight. layer: what `LinearFunction` needs to record the
    call; None where `MatmulFunction` records it, or nothing does.
    """

    size: tuple[int, ...]
    strides: tuple[int, ...]
    layer: "_Layer | None"


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    out: Tensor | None,
    batch_invariant: bool | None,
    choice: EagerChoice | None = None,
) -> Tensor | None:
    """Computes activation(x weightᵀ + bias) + residual by the plan for such calls, as `eager.run`
    does for products.

    `choice`: the kernel, config and mode of a call that names any of them.

    Returns None where the call must go through an operator. Arguments may have any type, but
    `activation` is "" or the name of an activation. Dynamo must not trace this function, because it
    must see the operator.
    """
    if _native_linear is not None and choice is None and out is None:
        computed = _native_linear(x, weight, bias, activation, residual, batch_invariant)
        if computed is not None:
            return computed
    if batch_invariant is None:
        batch_invariant = _invariance.ever and _invariance.requested()
    elif batch_invariant is not True and batch_invariant is not False:
        return None
    others: warm.Others = ()
    if residual is not None or out is not None:
        others = bias, residual, out
    elif bias is not None:
        others = (bias,)
    options = batch_invariant, choice, activation, _readiness.ever and _readiness.requested()
    entry = _find(_LINEAR, options, x, weight, others)
    if entry is None or entry.plan is None:
        call = x, weight, bias, activation, residual, out, batch_invariant, choice
        if entry is None:
            return eager.unless_observed(run, *call)
        if not _plan(entry, options[-1], *call):
            return None
    details = entry.details
    if _native_linear is not None and entry.offered != native.generation:
        entry.offered = native.generation
        is_bare = choice is None and out is None and weight.dim() == 2 and not options[-1]
        if is_bare and (not entry.gradients or (details.layer is not None and not activation)):
            native.remember(
                Kind.LINEAR,
                (x, weight, None, bias, residual, None),
                entry.plan,
                batch_invariant=batch_invariant,
                recorded=bool(entry.gradients),
                activation=activation,
            )
    if entry.gradients:
        return _run_recorded(entry, x, weight, bias, activation, residual, batch_invariant)
    transposed = _reinterpret(weight, details.size, details.strides)
    if bias is None and not activation and residual is None:
        result: Tensor = entry.plan(x, transposed, None, out, 1, 0)
    else:
        result = entry.plan(x, transposed, None, out, 1, 0, bias, residual, None)
    if out is not None:
        _increment_version((out,))
    return result


def _run_recorded(
    entry: WarmPlan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    batch_invariant: bool,
) -> Tensor:
    """Runs the plan of a call that needs gradients."""
    layer: _Layer | None = entry.details.layer
    if layer is None:
        extra = ops.epilogue(activation, bias, residual)
        x_shape = (*x.shape[:-1], *weight.shape[:-1]) if activation else None
        plan = entry.plan
        return recorded_run(plan, x, weight.t(), None, 1, 0, batch_invariant, extra, x_shape)
    if _accumulation.ever and _accumulation.requested():
        layer = layer._replace(accumulates=True)
    outputs = _apply(entry.plan, layer, x, weight, bias, residual)
    result: Tensor = outputs[0] if activation else outputs
    return result


def _plan(
    entry: WarmPlan,
    weights_ready: bool,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    out: Tensor | None,
    batch_invariant: bool,
    choice: EagerChoice | None,
) -> bool:
    """Plans a call of `run`. Returns as `eager.make_plan`."""
    if not (warm.is_plain(x) and warm.is_plain(weight)) or not (x.dim() and weight.dim() in (1, 2)):
        return False
    extra = ops.epilogue(activation, bias, residual)
    transposed, is_common = weight.t(), _is_common(x, weight, bias)
    _, kernel, config, tune = choice or (None, "", "", "")
    call = Call(x, transposed, None, out, None, 1, 0, kernel, config, tune, batch_invariant, extra)
    if weights_ready and not (weight.requires_grad and torch.is_grad_enabled()):
        call = call._replace(weights_ready=True)

    def details(_: object) -> _Details:
        view = transposed.shape, transposed.stride()
        choice = OperatorChoice(batch_invariant=batch_invariant)
        needs = x.requires_grad, weight.requires_grad
        layer = _Layer(extra is None, activation, *view, choice, *needs)
        return _Details(*view, layer if is_common else None)

    return eager.make_plan(entry, call, details)


def _is_common(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Returns whether `LinearFunction` computes the gradients of such a call, in the layouts of its
    operands.
    """
    return (
        x.dim() >= 2
        and weight.dim() == 2
        and x.is_contiguous()
        and weight.is_contiguous()
        and not x.is_complex()
        and (bias is None or bias.dim() == 1)
    )


# ---- autograd
class _Layer(NamedTuple):
    """What `LinearFunction` needs to know of a call besides its tensors.

    `bare`: there is no bias, activation or residual. `size`, `strides`: those of the transposed
    weight. `needs_...`: whether that tensor gets a gradient. `accumulates`: whether that of the
    weight may be added to its `.grad` in place.
    """

    bare: bool
    activation: str
    size: tuple[int, ...]
    strides: tuple[int, ...]
    choice: OperatorChoice
    needs_input: bool
    needs_weight: bool
    accumulates: bool = False


class LinearFunction(torch.autograd.Function):
    """The autograd function of calls in the common layouts.

    `apply` takes a plan, a `_Layer` and the tensors. It returns the output, and with an activation
    also x, through which second derivatives pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        layer: _Layer,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
    ) -> Any:
        bare, activation, size, strides, _, needs_input, needs_weight, _ = layer
        transposed = _reinterpret(weight, size, strides)
        x = input.new_empty((*input.shape[:-1], size[1])) if activation else None
        if bare:
            y = plan(input, transposed, None, None, 1, 0)
        else:
            y = plan(input, transposed, None, None, 1, 0, bias, residual, x)
        ctx.save_for_backward(input if needs_weight else None, weight if needs_input else None, x)
        ctx.set_materialize_grads(False)
        ctx.layer = layer
        return y if x is None else (y, x)

    @staticmethod
    @unseen_by_types
    def backward(
        ctx: Any, g_out: Tensor | None, g: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        *_, needs_input, needs_weight, needs_bias, needs_residual = ctx.needs_input_grad
        input, weight, x = ctx.saved_tensors
        layer: _Layer = ctx.layer
        d_input = d_weight = d_bias = None
        if g_out is not None:
            g = gradient_of_x(g_out, g, x, layer.activation)
        if g is None:
            return (None,) * 6
        # autograd itself sums gradients of a bias or residual of fewer elements
        d_residual = g_out if needs_residual else None
        if needs_bias:
            d_bias = g.sum(0) if g.dim() == 2 else g.sum(tuple(range(g.dim() - 1)))
        if needs_input:
            d_input = product(g, weight, layer.choice)
        if needs_weight:
            if g.dim() > 2:
                g, input = as_rows(g), as_rows(input)
            node = ctx.next_functions[1][0] if layer.accumulates else None
            if node is None or not add_to_grad(node, g, input, layer.choice):
                d_weight = product(g.mT, input, layer.choice)
        return None, None, d_input, d_weight, d_bias, d_residual


_apply = direct_apply(LinearFunction)

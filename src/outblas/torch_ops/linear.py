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

from typing import Any, NamedTuple

import torch

from outblas.base.compat.torch_private import dispatch_mode_count as _dispatch_modes
from outblas.base.compat.torch_private import forward_levels as _forward_levels
from outblas.base.compat.torch_private import fp32_precision
from outblas.base.compat.torch_private import function_mode_count as _function_modes
from outblas.base.compat.torch_private import get_sm_carveout as _sm_carveout
from outblas.base.compat.torch_private import increment_version as _increment_version
from outblas.base.compat.torch_private import modes_disabled as _modes_disabled
from outblas.base.compat.torch_private import profiled as _profiled
from outblas.call import dispatch
from outblas.call.context_flag import accumulation as _accumulation
from outblas.call.context_flag import readiness as _readiness
from outblas.call.dispatch import Call, Plan
from outblas.call.invariance import flag as _invariance
from outblas.call.sm_carveout import call_limit as _limit
from outblas.call.tensor_memory import LINE
from outblas.call.tensor_memory import read_address as _address
from outblas.torch_ops import eager, native, ops
from outblas.torch_ops.accumulation import add_to_grad
from outblas.torch_ops.autograd import as_rows, gradient_of_x, product, recorded_run
from outblas.torch_ops.autograd_levels import direct_apply, unseen_by_types
from outblas.torch_ops.call import EagerChoice, OperatorChoice
from outblas.torch_ops.flop_formulas import register_if_counted

Tensor = torch.Tensor
Parameter = torch.nn.Parameter

_gradients_enabled = torch.is_grad_enabled
_LINE_MASK = LINE - 1
_cache = dispatch.eager_plans
_native_linear = native.linear


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
    if _function_modes() and not _modes_disabled():
        call = x, weight, bias, activation, residual, out, batch_invariant, choice
        return eager.without_modes(run, *call)
    if _dispatch_modes():
        register_if_counted()
        return None
    if (
        _forward_levels._current_level >= 0
        or _profiled()
        or (type(x) is not Tensor and type(x) is not Parameter)
        or (type(weight) is not Parameter and type(weight) is not Tensor)
    ):
        return None
    if batch_invariant is None:
        batch_invariant = _invariance.ever and _invariance.requested()
    elif batch_invariant is not True and batch_invariant is not False:
        return None
    weights_ready = _readiness.ever and _readiness.requested()
    tensors: tuple[Tensor, ...] = (x, weight)
    bias_at = residual_at = out_at = None
    try:
        in_line = _address(x) & _LINE_MASK, _address(weight) & _LINE_MASK
        if bias is not None:
            if type(bias) is not Parameter and type(bias) is not Tensor:
                return None
            tensors, bias_at = (x, weight, bias), _address(bias) & 15
        if residual is not None:
            if type(residual) is not Tensor and type(residual) is not Parameter:
                return None
            tensors, residual_at = (*tensors, residual), _address(residual) & 15
        if out is not None:
            if type(out) is not Tensor and type(out) is not Parameter:
                return None
            tensors, out_at = (*tensors, out), _address(out) & 15
        left = (_limit.ever and _limit.count()) or _sm_carveout()
        flags = batch_invariant, weights_ready, left, activation
        key = (x.shape, weight.shape, in_line, bias_at, residual_at, out_at, flags, choice)
    except RuntimeError:  # no address or no shape: sparse, nested or wrapped tensors
        return None
    plans = _cache.get(key, ())
    entry: eager.EagerPlan | None
    for entry in plans:  # as in `eager.run`: a function for both would cost every warm call 60 ns
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
        given = x, weight, bias, activation, residual, out, batch_invariant, weights_ready, choice
        entry = _planned(key, plans, tensors, given)
        if entry is None:
            return None
    _, plan, conditions = entry
    if conditions is not None and conditions.requires_grad:
        return _run_recorded(entry, x, weight, bias, activation, residual, batch_invariant)
    transposed = weight.mT if weight.dim() == 2 else weight
    if bias is None and not activation and residual is None:
        result: Tensor = plan(x, transposed, None, out, 1, 0)
    else:
        result = plan(x, transposed, None, out, 1, 0, bias, residual, None)
    if out is not None:
        _increment_version((out,))
    return result


def _run_recorded(
    entry: eager.EagerPlan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    batch_invariant: bool,
) -> Tensor:
    """Runs the plan of a call that needs gradients."""
    _, plan, conditions = entry
    assert conditions is not None, "`run` asks"
    layer = conditions.layer
    if layer is None:
        extra, x_shape = ops.epilogue(activation, bias, residual), conditions.x_shape
        return recorded_run(plan, x, weight.t(), None, 1, 0, batch_invariant, extra, x_shape)
    if _accumulation.ever and _accumulation.requested():
        layer = layer._replace(accumulates=True)
    outputs = _apply(layer, x, weight, bias, residual)
    result: Tensor = outputs[0] if activation else outputs
    return result


def _planned(
    key: tuple[Any, ...],
    plans: tuple[eager.EagerPlan, ...],
    tensors: tuple[Tensor, ...],
    given: tuple[Any, ...],
) -> eager.EagerPlan | None:
    """Plans a call and caches the plan, as `eager.planned` does."""
    x, weight, bias, activation, residual, out, batch_invariant, weights_ready, choice = given
    if weight.dim() not in (1, 2) or not x.dim():
        return None
    extra = ops.epilogue(activation, bias, residual)
    _, kernel, config, tune = choice or (None, "", "", "")
    call = Call(x, weight.t(), None, out, None, 1, 0, kernel, config, tune, batch_invariant, extra)
    if weights_ready and not (weight.requires_grad and _gradients_enabled()):
        call = call._replace(weights_ready=True)
    entry = eager.planned(key, plans, tensors, call)
    if entry is None:
        return None
    _, plan, conditions = entry
    recorded = conditions is not None and bool(conditions.requires_grad)
    is_common = recorded and _is_common(x, weight, bias)
    is_bare = choice is None and out is None and weight.dim() == 2 and not weights_ready
    if is_bare and (not recorded or (is_common and not activation)):
        native.remember(
            native.Kind.LINEAR,
            (x, weight, None, bias, residual, None),
            plan,
            batch_invariant=batch_invariant,
            recorded=recorded,
            activation=activation,
        )
    if conditions is not None and is_common:
        conditions.layer = _Layer(
            plan,
            extra is None,
            activation,
            conditions.x_shape,
            OperatorChoice(batch_invariant=batch_invariant),
            x.requires_grad,
            weight.requires_grad,
        )
    return entry


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

    `bare`: there is no bias, activation or residual. `x_shape`: the shape of the activation's
    argument, None without an activation. `needs_...`: whether that tensor gets a gradient.
    `accumulates`: whether that of the weight may be added to its `.grad` in place.
    """

    plan: Plan
    bare: bool
    activation: str
    x_shape: tuple[int, ...] | None
    choice: OperatorChoice
    needs_input: bool
    needs_weight: bool
    accumulates: bool = False


class LinearFunction(torch.autograd.Function):
    """The autograd function of calls in the common layouts.

    `apply` takes a `_Layer` and the tensors. It returns the output, and with an activation also x,
    through which second derivatives pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        layer: _Layer,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
    ) -> Any:
        plan, bare, _, x_shape, _, needs_input, needs_weight, _ = layer
        x = None if x_shape is None else input.new_empty(x_shape)
        if bare:
            y = plan(input, weight.mT, None, None, 1, 0)
        else:
            y = plan(input, weight.mT, None, None, 1, 0, bias, residual, x)
        ctx.save_for_backward(input if needs_weight else None, weight if needs_input else None, x)
        ctx.set_materialize_grads(False)
        ctx.layer = layer
        return y if x is None else (y, x)

    @staticmethod
    @unseen_by_types
    def backward(
        ctx: Any, g_out: Tensor | None, g: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        _, needs_input, needs_weight, needs_bias, needs_residual = ctx.needs_input_grad
        input, weight, x = ctx.saved_tensors
        layer: _Layer = ctx.layer
        d_input = d_weight = d_bias = None
        if g_out is not None:
            g = gradient_of_x(g_out, g, x, layer.activation)
        if g is None:
            return None, None, None, None, None
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
        return None, d_input, d_weight, d_bias, d_residual


_apply = direct_apply(LinearFunction)

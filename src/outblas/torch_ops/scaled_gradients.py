"""The operator of scaled products, and its gradients: those of bias and residual."""

from typing import Any

import torch

from outblas.core.errors import A, B
from outblas.torch_ops import ops
from outblas.torch_ops.autograd import summed
from outblas.torch_ops.autograd_levels import record_gradients, within_forward
from outblas.torch_ops.schema import ARGUMENTS, define

Tensor = torch.Tensor

# used where it is unknown which of the two names was used
SHOWN = {"a": "a (input)", "b": "b (mat2)"}

define(
    "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, ScalarType? "
    "out_dtype=None, "
    "bool use_fast_accum=False, str activation='', Tensor? residual=None) -> Tensor"
)


class _Gradients(torch.autograd.Function):
    """The autograd function of scaled products. `apply` takes all arguments of the operator."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum, activation, residual = given
        x_needed = bool(activation) and ctx.needs_input_grad[_BIAS]
        ctx.save_for_backward(*((a, b, scale_a, scale_b, bias) if x_needed else ()))
        ctx.set_materialize_grads(False)
        ctx.activation, ctx.out_dtype, ctx.use_fast_accum = activation, out_dtype, use_fast_accum
        ctx.shapes = tuple(t if t is None else t.shape for t in (bias, residual))
        with within_forward():
            result: Tensor = _operator(*given)
        return result

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [None] * len(_ARGUMENTS)
        if g is None:
            return tuple(gradients)
        for i, (name, needed) in enumerate(zip(_ARGUMENTS, ctx.needs_input_grad, strict=True)):
            if needed and i not in (_BIAS, _RESIDUAL):
                raise NotImplementedError(
                    f"{SHOWN.get(name, name)} requires grad, but only bias and residual of "
                    "scaled_mm have gradients: expected a tensor that does not require grad"
                )
        shape_bias, shape_residual = ctx.shapes
        if ctx.needs_input_grad[_RESIDUAL]:
            gradients[_RESIDUAL] = summed(g, shape_residual)
        if ctx.needs_input_grad[_BIAS]:
            if ctx.activation:
                x = _operator(*ctx.saved_tensors, ctx.out_dtype, ctx.use_fast_accum)
                g = ops.activation_backward(g, x, ctx.activation)
            gradients[_BIAS] = summed(g, shape_bias)
        return tuple(gradients)


_operator = torch.ops.outblas.scaled_mm.default
_ARGUMENTS = [argument.name for argument in ARGUMENTS["scaled_mm"]]
_BIAS, _RESIDUAL = (_ARGUMENTS.index(name) for name in ("bias", "residual"))


record_gradients("scaled_mm", _Gradients, {"a": A, "b": B})

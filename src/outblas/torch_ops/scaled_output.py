"""The gradients of the operators of scaled products, which are those of bias and
residual; results in fp8: which recipes of their scales there are, and who quantizes them.

A result in fp8 is what `quantize` makes of the float32 values, so that it is rounded once. Where it
can, `hopper.gemm` does so in the kernel that multiplies.
"""

from collections.abc import Sequence
from typing import Any

import torch

from outblas.base import registry
from outblas.base.compiling import CompileForbidden
from outblas.call import dispatch, quantization, recorded_shapes
from outblas.call.context_flag import check_bool
from outblas.call.default_kernel import PRODUCTION
from outblas.call.dispatch import Call
from outblas.call.epilogue import EpilogueArgs
from outblas.call.errors import OperandError
from outblas.torch_ops import ops, quantize
from outblas.torch_ops.autograd import summed
from outblas.torch_ops.autograd_levels import record_gradients, refuse_gradients, within_forward
from outblas.torch_ops.schema import ARGUMENTS

Tensor = torch.Tensor

DTYPE = torch.float8_e4m3fn
RECIPES = ("1x128",)  # those of `quantize` that results may have


def check_dtype(output_dtype: object) -> None:
    """Raises TypeError for what is no dtype."""
    if not isinstance(output_dtype, torch.dtype):
        raise TypeError(f"output_dtype is {type(output_dtype).__name__}, expected a torch.dtype")


def check_rounding(rounding: Sequence[Any], output_dtype: torch.dtype) -> tuple[str, bool]:
    """Returns the name of the recipe of a result in fp8, and whether its scales are powers of two.
    `rounding`: `out_recipe` and `out_power_of_two`.

    Raises TypeError, ValueError or OperandError for what is not covered.
    """
    recipe, power_of_two = rounding
    check_bool(power_of_two, "out_power_of_two")
    if recipe is None:
        raise OperandError(
            "out_power_of_two is True, expected False without out_recipe: there are no scales to "
            "round"
        )
    name = recipe_name(recipe)
    if output_dtype != DTYPE:
        raise OperandError(f"output_dtype is {output_dtype}, expected {DTYPE} with out_recipe")
    return name, bool(power_of_two)


def recipe_name(recipe: Any) -> str:
    """Returns the name of a recipe that results may have. Raises TypeError or ValueError."""
    return quantization.recipe_name(recipe, "out_recipe", RECIPES)


def empty(x: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    """Returns memory for a result like x, and for its scales."""
    return quantization.empty(x, recipe, DTYPE)


def quantized(x: Tensor, recipe: str, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Returns a float32 result in fp8, and its scales."""
    return quantize.compute(x, recipe, DTYPE, power_of_two)


# ---- by the kernel that multiplies
_QUANTIZES: dict[tuple[Any, ...], bool] = {}  # what `_is_fused` returned for such calls


def fused(call: Call, shape: tuple[int, ...], power_of_two: bool) -> tuple[Tensor, Tensor] | None:
    """Computes a call of `scaled_mm`, whose result has this shape, by one kernel. Returns None
    where there is none, or it would take longer, or may not be compiled: the caller then quantizes
    the result in float32.
    """
    scale = quantization.empty_scales(shape, RECIPES[0], call.a.device)
    call = fused_call(call, scale, power_of_two)
    if not _is_fused(call):
        return None
    try:
        return dispatch.run(call), scale
    except CompileForbidden:
        return None


def fused_call(call: Call, scale: Tensor, power_of_two: bool) -> Call:
    """Returns the call whose kernel writes the scales of its result, from the one with a result in
    float32. It names the only kernel that does.
    """
    scales = *(call.scales or ()), scale
    return call._replace(
        out_dtype=DTYPE, scales=scales, power_of_two=power_of_two, kernel=PRODUCTION
    )


def record(call: Call, shape: tuple[int, ...], power_of_two: bool) -> None:
    """Tells everybody who records of a call that no kernel computes here, as `fused` would plan
    it.
    """
    scale = quantization.empty_scales(shape, RECIPES[0], call.a.device)
    recorded_shapes.note(dispatch.problem_of(fused_call(call, scale, power_of_two)))


def _is_fused(call: Call) -> bool:
    """Returns whether the kernel quantizes the result of a call itself."""
    extra = call.extra or EpilogueArgs()
    tensors = extra.bias is None, extra.residual is None
    sizes = call.a.shape, call.b.shape, call.a.device
    scales = [scale.stride() for scale in call.scales or ()]  # which may be too far apart
    key = *sizes, *scales, call.formats, extra.activation, *tensors, call.power_of_two
    found = _QUANTIZES.get(key)
    if found is None:
        found = bool(registry.load(PRODUCTION).quantizes(dispatch.problem_of(call)))
        dispatch.remember(_QUANTIZES, key, found)
    return found


# ---- gradients
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
                    f"{name} requires grad, but only bias and residual of "
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


record_gradients("scaled_mm", _Gradients)
refuse_gradients("scaled_mm_quantized", "scaled_mm with out_recipe")

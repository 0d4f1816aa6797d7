"""The fast path of products of scaled fp8 operands; `eager` is that of other products.

The operator checks every argument in Python and passes torch's dispatcher twice. On the host of an
H200 that took as long as the product of 4096³ takes on the device.
"""

from typing import Any

import torch

from outblas.base.compat.torch_private import dispatch_mode_count as _dispatch_modes
from outblas.base.compiling import CompileForbidden
from outblas.call import dispatch, quantization, warm
from outblas.call.dispatch import Call, Plan
from outblas.call.epilogue import glu_split
from outblas.call.invariance import flag as _invariance
from outblas.call.warm import Kind
from outblas.torch_ops import block_scales, quantize
from outblas.torch_ops.flop_formulas import register_if_counted

Tensor = torch.Tensor

_SCALED_MM = int(Kind.SCALED_MM)
_find = warm.find

Operands = tuple[Any, ...]  # a, b, scale_a, scale_b, bias, residual
# dtype of the result, use_fast_accum, activation; where the result has scales, also out_recipe and
# out_power_of_two
Options = tuple[Any, ...]
Result = Tensor | tuple[Tensor, Tensor]
_TYPES = (torch.dtype,), (bool,), (str, type(None)), (str,), (bool,)


def run(operands: Operands, options: Options) -> Result | None:
    """Runs a call whose plan is cached. Returns None where the call must go through the operator.

    Operands may have any type. Dynamo must not trace this function, because it must see the
    operator.
    """
    if _dispatch_modes():
        register_if_counted()
        return None
    if (_invariance.ever and _invariance.requested()) or not _are_typed(options):
        return None
    try:
        entry = _entry(operands, options)
        if entry is None or entry.plan is None:
            return None
        in_blocks, is_wide = entry.details  # is_wide: another kernel quantizes a result in float32
        if len(options) > 3:
            return _launch_quantized(entry.plan, in_blocks, is_wide, operands, options)
        return launch(entry.plan, in_blocks, *operands)
    except CompileForbidden:  # for these rows; the operator knows what to do
        return None


def _has_type(value: object, types: tuple[type, ...]) -> bool:
    return type(value) in types


def _are_typed(options: Options) -> bool:
    """Returns whether options have the types of valid ones, which others may compare equal to."""
    return all(map(_has_type, options, _TYPES))


def _launch_quantized(
    plan: Plan, in_blocks: bool, is_wide: bool, operands: Any, options: Options
) -> tuple[Tensor, Tensor]:
    """Runs the plan of a call whose result is fp8 with scales."""
    a, b = operands[:2]
    dtype, _, activation, recipe, power_of_two = options
    if is_wide:
        return quantize.compute(launch(plan, in_blocks, *operands), recipe, dtype, power_of_two)
    shape = a.shape[0], b.shape[1] // glu_split(activation or "")
    scale = quantization.empty_scales(shape, recipe, a.device)
    return launch(plan, in_blocks, *operands, scale_out=(scale,)), scale


def launch(
    plan: Plan,
    in_blocks: bool,
    a: Any,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None = None,
    *,
    scale_out: tuple[Tensor, ...] = (),
) -> Tensor:
    """Runs the plan of a call. Scales of blocks reach it as they are."""
    pairs = as_16_bit_pairs(a), as_16_bit_pairs(b.t()).t()
    if not in_blocks:
        scale_a, scale_b = as_scale(scale_a), as_scale(scale_b)
    return plan(*pairs, None, out, 1, 0, bias, residual, None, scale_a, scale_b, *scale_out)


def as_16_bit_pairs(t: Tensor) -> Tensor:
    """Reinterprets rows of fp8 values as rows of half as many 16-bit values, which is how kernels
    move them.

    The rows are copied where they cannot be viewed that way. Each row gets at least two pairs: the
    strides of one-element rows would not show that they are rows, and fp8 products need both
    operands contiguous along K.
    """
    rows, columns = t.shape
    if t.stride(1) != 1 or columns % 2 or columns < 3 or t.stride(0) % 2 or t.data_ptr() % 2:
        values = t.view(torch.uint8)
        t = values.new_zeros(rows, max(columns + columns % 2, 4))
        t[:, :columns] = values
    return t.view(torch.bfloat16)


def as_scale(t: Tensor) -> Tensor:
    """Returns a scale of no blocks in the form that a launch takes: a single scale has no
    dimensions.
    """
    return t.reshape(()) if t.dim() and t.numel() == 1 else t


def can_remember(operands: Operands, options: Options) -> bool:
    """Returns whether the operator would do nothing beyond running the call's plan."""
    tensors = [t for t in operands if t is not None]
    if warm.is_observed(*tensors):  # by a mode that would see what is read here
        return False
    if not (_are_typed(options) and all(map(warm.is_plain, tensors))):
        return False
    return warm.is_unchanged(tensors) and not any(t.requires_grad for t in tensors)


def remember(operands: Operands, options: Options, *calls: Call) -> None:
    """Caches the plan of a call, if it has one, so that similar calls need not go through the
    operator. `calls`: the forms that the call may have been planned in, of which the first one with
    a plan counts.
    """
    entry = _entry(operands, options)
    plans = [(call, plan) for call in calls if (plan := dispatch.cached_plan(call))]
    if entry is None or entry.plan is not None or not plans:
        return
    call, plan = plans[0]
    is_wide = len(options) > 3 and call.out_dtype is torch.float32
    details = block_scales.has_blocks(call.formats), is_wide
    any_rows, columns = dispatch.any_rows(plan), call.a.shape[-1]
    entry.keep(plan, any_rows=any_rows, columns=columns, details=details)


def _entry(operands: Operands, options: Options) -> warm.WarmPlan | None:
    a, b, scale_a, scale_b, bias, residual = operands
    return _find(_SCALED_MM, options, a, b, (scale_a, scale_b, bias, residual))

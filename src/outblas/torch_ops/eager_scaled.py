"""The fast path of products of scaled fp8 operands; `eager` is that of other products.

The operator checks every argument in Python and passes torch's dispatcher twice. On the host of an
H200 that took as long as the product of 4096³ takes on the device.
"""

from collections.abc import Callable
from typing import Any

import torch

# The guards of a plan do not check for the modes of tracers and of fake tensors.
from outblas.base.compat.torch_private import dispatch_mode_count as _dispatch_modes
from outblas.base.compat.torch_private import forward_levels as _forward_levels
from outblas.base.compat.torch_private import function_mode_count as _function_modes
from outblas.base.compat.torch_private import profiled as _profiled
from outblas.base.compat.torch_private import tensor_guard
from outblas.base.compiling import CompileForbidden
from outblas.call import dispatch, quantization
from outblas.call.dispatch import Call, Plan
from outblas.call.epilogue import glu_split
from outblas.call.invariance import flag as _invariance
from outblas.call.sm_carveout import reserved
from outblas.call.tensor_memory import LINE, read_address
from outblas.torch_ops import block_scales, quantize
from outblas.torch_ops.eager import is_unobserved
from outblas.torch_ops.flop_formulas import register_if_counted

Tensor = torch.Tensor
Parameter = torch.nn.Parameter

_LINE_MASK = LINE - 1
_PLANS_PER_KEY = 16

# (matches, plan, in_blocks, is_wide): `matches` tells whether a call's tensors equal the remembered
# ones in type, sizes, strides, dtype, device, requires_grad and dispatch keys. `is_wide`: the
# plan's result is float32, and another kernel quantizes it.
ScaledPlan = tuple[Callable[..., bool], Plan, bool, bool]
Operands = tuple[Tensor | None, ...]  # a, b, scale_a, scale_b, bias, residual
# dtype of the result, use_fast_accum, activation; where the result has scales, also out_recipe and
# out_power_of_two
Options = tuple[Any, ...]
Result = Tensor | tuple[Tensor, Tensor]

# Cleared together with all other plans.
_cache: dict[tuple[Any, ...], tuple[ScaledPlan, ...]] = dispatch.eager_plans


def run(operands: Operands, options: Options) -> Result | None:
    """Runs a call whose plan is cached. Returns None where the call must go through the operator.

    Operands may have any type. Dynamo must not trace this function, because it must see the
    operator.
    """
    if _dispatch_modes():
        register_if_counted()
        return None
    if _function_modes() or _forward_levels._current_level >= 0:
        return None
    if _profiled() or (_invariance.ever and _invariance.requested()):
        return None
    key = _key(operands, options)
    for matches, plan, in_blocks, is_wide in _cache.get(key, ()) if key is not None else ():
        if matches(*_guarded(operands)):
            try:
                if len(options) > 3:
                    return _launch_quantized(plan, in_blocks, is_wide, operands, options)
                return launch(plan, in_blocks, *operands)
            except CompileForbidden:  # for these rows; the operator knows what to do
                return None
    return None


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
    if _function_modes():  # which may have replaced the result, and would see what is read here
        return False
    tensors = _guarded(operands)
    if _key(operands, options) is None or any(t.requires_grad for t in tensors):
        return False
    return is_unobserved(tensors)


def remember(operands: Operands, options: Options, *calls: Call) -> None:
    """Caches the plan of a call, if it has one, so that similar calls need not go through the
    operator. `calls`: the forms that the call may have been planned in, of which the first one with
    a plan counts.
    """
    key, tensors = _key(operands, options), _guarded(operands)
    plans = _cache.get(key, ()) if key is not None else ()
    planned = [(call, plan) for call in calls if (plan := dispatch.cached_plan(call))]
    if key is None or not planned:
        return
    matches = tensor_guard(tensors)
    if matches is not None:
        call, plan = planned[0]
        is_wide = len(options) > 3 and call.out_dtype is torch.float32
        found = matches, plan, block_scales.has_blocks(call.formats), is_wide
        dispatch.remember(_cache, key, (*plans[1 - _PLANS_PER_KEY :], found))


def _guarded(operands: Operands) -> tuple[Tensor, ...]:
    """Returns the tensors that a guard compares. A guard takes no tensor twice, and both scales are
    often the same tensor.
    """
    a, b, scale_a, scale_b, *rest = operands
    scales = (scale_a,) if scale_b is scale_a else (scale_a, scale_b)
    return tuple(t for t in (a, b, *scales, *rest) if t is not None)


def _key(operands: Operands, options: Options) -> tuple[Any, ...] | None:
    """Returns the properties that a plan depends on and its guard does not compare. Returns None
    for operands that are not plain tensors or have no address, and for options of another type,
    which may compare equal to valid ones.
    """
    dtype, fast, activation, *rounding = options
    if type(dtype) is not torch.dtype or type(fast) is not bool:
        return None
    if rounding and [*map(type, rounding)] != [str, bool]:
        return None
    if activation is not None and type(activation) is not str:
        return None
    a, b, *others = operands
    if any(
        t is not None and type(t) is not Tensor and type(t) is not Parameter for t in operands
    ) or (a is None or b is None):
        return None
    try:
        lines = read_address(a) & _LINE_MASK, read_address(b) & _LINE_MASK
        rest = [None if t is None else read_address(t) & 15 for t in others]
    except RuntimeError:  # no address: sparse or wrapped tensors
        return None
    shared = operands[2] is operands[3]
    return ("scaled_mm", a.shape, b.shape, *lines, *rest, shared, options, reserved())

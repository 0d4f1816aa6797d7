"""The operators `outblas::scaled_mm` and `outblas::scaled_mm_quantized`: what they check, and which
kernel computes them. `scaled_mm` is the function that calls them.
"""

from typing import Any

import torch

from outblas.base import registry
from outblas.base.compat.torch_private import autocast_off
from outblas.base.compiling import CompileForbidden
from outblas.call import (
    dispatch,
    epilogue,
    fallback,
    invariance,
    launcher,
    problem,
    recorded_shapes,
)
from outblas.call.default_kernel import PRODUCTION
from outblas.call.dispatch import Call
from outblas.call.epilogue import EpilogueArgs
from outblas.call.errors import OperandError
from outblas.call.sizes import holds
from outblas.torch_ops import block_scales, eager_scaled, ops, scaled_output
from outblas.torch_ops.schema import fake, implement

Tensor = torch.Tensor

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
OUT_DTYPES = torch.bfloat16, torch.float16, torch.float32

_autocast_off = autocast_off("cpu", "cuda")


def checked(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    activation: str = "",
    residual: Tensor | None = None,
) -> tuple[tuple[int, ...], torch.dtype, bool, EpilogueArgs]:
    """Checks the arguments. Returns the shape and dtype of the output, whether to accumulate fast,
    and the epilogue. Raises OperandError.
    """
    ops.check_activation(activation)
    for name, t in (("mat_a", a), ("mat_b", b)):
        if t.dim() != 2:
            raise OperandError(f"{name} has {t.dim()} dimensions, expected 2")
        if t.dtype not in FORMATS:
            raise OperandError(
                f"{name}.dtype is {t.dtype}, expected one of {', '.join(map(str, FORMATS))}"
            )
        if t.device != a.device:
            raise OperandError(f"{name} is on {t.device} but mat_a is on {a.device}")
    if not holds(a.shape[1] == b.shape[0]):
        raise OperandError(f"mat_a.shape[1] is {a.shape[1]} but mat_b.shape[0] is {b.shape[0]}")
    shape = a.shape[0], b.shape[1]
    for name, t in (("scale_a", scale_a), ("scale_b", scale_b)):
        if t.dtype != torch.float32 or t.device != a.device:
            raise OperandError(
                f"{name} is {t.dtype} on {t.device}, expected torch.float32 on {a.device}"
            )
    if block_scales.recipes(*shape, a.shape[1], scale_a, scale_b) and use_fast_accum:
        raise OperandError(block_scales.NO_FAST_SUMS)
    dtype = out_dtype or torch.bfloat16
    if dtype not in OUT_DTYPES:
        known = ", ".join(map(str, OUT_DTYPES))
        others = f", or {scaled_output.DTYPE} with out_recipe" if dtype in FORMATS else ""
        raise OperandError(f"output_dtype is {dtype}, expected one of {known}{others}")
    extra = EpilogueArgs(activation, bias, residual)
    return problem.check_epilogue_args(extra, shape, dtype, a.device), dtype, use_fast_accum, extra


def _scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *given: Any) -> Tensor:
    _, dtype, use_fast_accum, extra = checked(a, b, scale_a, scale_b, *given)
    activation, bias, residual, _ = extra
    invariance.refuse_promise("scaled_mm")
    reason = unsupported_reason(a.device)
    if reason is not None:
        if recorded_shapes.is_recording():  # what a kernel computes is recorded as it is planned
            recorded_shapes.note(
                dispatch.problem_of(call_of(a, b, scale_a, scale_b, dtype, use_fast_accum, extra))
            )
        return _by_torch(reason, a, b, scale_a, scale_b, dtype, extra)
    if 0 in (*a.shape, *b.shape):
        x = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
        x = x if bias is None else x + bias
        return epilogue.apply(x, activation, residual).to(dtype)
    try:
        return dispatch.run(call_of(a, b, scale_a, scale_b, dtype, use_fast_accum, extra))
    except CompileForbidden as error:
        return _by_torch(str(error), a, b, scale_a, scale_b, dtype, extra)


def _checked_quantized(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    recipe: str,
    bias: Tensor | None = None,
    power_of_two: bool = False,
    use_fast_accum: bool = False,
    activation: str = "",
    residual: Tensor | None = None,
) -> tuple[str, bool, tuple[int, ...], tuple[Any, ...], EpilogueArgs]:
    """Checks the arguments. Returns the recipe's name, whether scales are powers of two, the shape
    of the output, what `_scaled_mm` takes after the scales, and the epilogue. Raises OperandError.
    """
    kind = scaled_output.recipe_name(recipe)
    given = bias, torch.float32, use_fast_accum, activation, residual
    shape, _, _, extra = checked(a, b, scale_a, scale_b, *given)
    return kind, power_of_two, shape, given, extra


def _scaled_mm_quantized(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    kind, power_of_two, shape, given, extra = _checked_quantized(a, b, scale_a, scale_b, *options)
    _, dtype, use_fast_accum, *_ = given
    invariance.refuse_promise("scaled_mm")
    reason = unsupported_reason(a.device)
    if reason is not None:
        if recorded_shapes.is_recording():
            call = call_of(a, b, scale_a, scale_b, dtype, use_fast_accum, extra)
            scaled_output.record(call, shape, power_of_two)
        x = _by_torch(reason, a, b, scale_a, scale_b, dtype, extra)
        return scaled_output.quantized(x, kind, power_of_two)
    if 0 not in (*a.shape, *b.shape):
        call = call_of(a, b, scale_a, scale_b, dtype, use_fast_accum, extra)
        found = scaled_output.fused(call, shape, power_of_two)
        if found is not None:
            return found
    x = _scaled_mm(a, b, scale_a, scale_b, *given)
    return scaled_output.quantized(x, kind, power_of_two)


def _by_torch(
    reason: str,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    dtype: torch.dtype,
    extra: EpilogueArgs,
) -> Tensor:
    """Computes a call in float32 by torch, also under autocast, and warns of the reason."""
    fallback.warn_fallback(reason)
    activation, bias, residual, _ = extra
    wide = EpilogueArgs(activation, *(t if t is None else t.float() for t in (bias, residual)))
    (M, K), N = a.shape, b.shape[1]
    if found := block_scales.recipes(M, N, K, scale_a, scale_b):
        scale_a = block_scales.expanded(scale_a, found[0], (M, K), terms=1)
        scale_b = block_scales.expanded(scale_b, found[1], (K, N), terms=0)
    with _autocast_off():
        x = fallback.fused(scale_a * a.float(), scale_b * b.float(), None, None, 1, 0, None, wide)
    return x.to(dtype)


def call_of(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    dtype: torch.dtype,
    use_fast_accum: bool,
    extra: EpilogueArgs,
) -> Call:
    """Returns a checked call in the form that is planned."""
    scales = scale_a, scale_b
    found = block_scales.recipes(a.shape[0], b.shape[1], a.shape[1], *scales)
    if found is None:
        scales = eager_scaled.as_scale(scale_a), eager_scaled.as_scale(scale_b)
    promotion = "" if use_fast_accum else " promoted"
    blocks = " ".join(("", *found)) if found else ""
    return Call(
        a=eager_scaled.as_16_bit_pairs(a),
        b=eager_scaled.as_16_bit_pairs(b.t()).t(),
        c=None,
        out=None,
        out_dtype=dtype,
        alpha=1,
        beta=0,
        kernel="",
        config="",
        extra=extra,
        scales=scales,
        formats=f"{FORMATS[a.dtype]} {FORMATS[b.dtype]}{promotion}{blocks}",
    )


def unsupported_reason(device: torch.device) -> str | None:
    """Returns why no kernel multiplies fp8 operands on a device, or None if one does."""
    if device.type != "cuda":
        return "fp8 CPU tensors"
    if reason := launcher.unsupported_device_reason(registry.find(PRODUCTION), device):
        return f"fp8 operands, for which {PRODUCTION} {reason}"
    try:
        registry.load(PRODUCTION)
    except ImportError as error:
        return str(error)
    return None


for _key in ("CPU", "CUDA"):
    implement("scaled_mm", _key, _scaled_mm)
    implement("scaled_mm_quantized", _key, _scaled_mm_quantized)


@fake("scaled_mm")
def _(a: Tensor, *given: Any) -> Tensor:
    shape, dtype, *_ = checked(a, *given)
    return a.new_empty(shape, dtype=dtype)


@fake("scaled_mm_quantized")
def _(a: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    kind, _, shape, *_ = _checked_quantized(a, *given)
    return scaled_output.empty(a.new_empty(shape, dtype=torch.float32), kind)

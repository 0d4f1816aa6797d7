"""Quantization to fp8 with scales, `quantize`: one pass over memory by Triton's kernels on a GPU,
torch's functions elsewhere.
"""

from typing import Any, cast

import torch
from torch.nn import functional
from torch.overrides import handle_torch_function

from outblas.base import compiling
from outblas.base.compat.torch_private import (
    dispatch_mode_count,
    forward_levels,
    has_override,
    profiled,
)
from outblas.base.compiling import CompileForbidden
from outblas.call import fallback, hooks, problem, quantization
from outblas.call.context_flag import check_bool
from outblas.call.fp8 import BLOCK
from outblas.call.quantization import FORMATS, LEAST_SCALE
from outblas.call.warm import is_unchanged
from outblas.torch_ops.autograd_levels import refuse_gradients, requires_grad
from outblas.torch_ops.schema import fake, implement

Tensor = torch.Tensor


def quantize(
    x: Tensor,
    recipe: Any,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantize a tensor to fp8: values and scales whose product is the tensor again, rounded.

    A scale is the largest magnitude of what it scales, divided by the largest value of `dtype` (448
    for e4m3, 57344 for e5m2), in float32. `scaled_mm` takes values and scales as they are; those of
    a weight (N, K) are transposed with it, for all recipes: `b8.t()` and `scale.t()`.

    Finite values stay finite: those that rounding would lead beyond the largest value become that.
    NaN and infinities take no part in a scale. NaN stays NaN; infinities stay what they are in e5m2
    and become NaN in e4m3, which has none. The scale of nothing but zeros is 1, and no scale is
    less than 2^-126, so that values below 2^-126 lose bits.

    On an NVIDIA GPU this is one pass over memory; two for "tensorwise", and for "rowwise" where K
    is more than 16384. Equal calls have equal bits, on the CPU and on all GPUs. There are no
    gradients: a backward pass that needs one raises NotImplementedError.

    Args:
        x: (..., K), bfloat16, float16 or float32, of any strides.
        recipe: Which values share a scale: "tensorwise" for all, "rowwise" for a row, "1x128" for
            128 columns of a row, "128x128" for 128 columns of 128 rows of a matrix. The members
            TensorWise, RowWise, BlockWise1x128 and BlockWise128x128 of
            `torch.nn.functional.ScalingType` are accepted too.
        dtype: float8_e4m3fn or float8_e5m2.
        power_of_two: Whether scales are rounded up to powers of two, which scale without rounding.

    Returns:
        The values, of `dtype` and the shape of x, contiguous, and the scales, float32:

        - "tensorwise": no dimensions;
        - "rowwise": (..., 1), contiguous;
        - "1x128": (..., ceil(K/128)), by columns that begin at multiples of 16 bytes: for x with M
          rows the strides are 1 and M rounded up to a multiple of 4;
        - "128x128": (..., ceil(M/128), ceil(K/128)), contiguous.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The recipe is not covered.
        OperandError: The dtype or the number of dimensions of x does not fit, or `dtype` is none
            of fp8.
        RuntimeError: As in `matmul`, for CUDA graphs and OUTBLAS_STRICT.

    Example:
        >>> import torch, outblas
        >>> x, w = torch.randn(32, 256), torch.randn(512, 256)
        >>> x8, scale_x = outblas.quantize(x, "1x128")
        >>> w8, scale_w = outblas.quantize(w, "128x128")
        >>> scale_x.shape, scale_w.shape
        (torch.Size([32, 2]), torch.Size([4, 2]))
        >>> blocks = x8.float().view(32, 2, 128) * scale_x.unsqueeze(2)
        >>> bool((blocks.view(32, 256) - x).norm() < 0.04 * x.norm())
        True
    """
    if not torch.compiler.is_dynamo_compiling() and has_override(x):
        result: tuple[Tensor, Tensor] = handle_torch_function(
            quantize, (x,), x, recipe, dtype=dtype, power_of_two=power_of_two
        )
        return result
    problem.check_tensor("x", x)
    name = quantization.recipe_name(recipe)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {type(dtype).__name__}, expected a torch.dtype")
    check_bool(power_of_two, "power_of_two")
    if not torch.compiler.is_dynamo_compiling() and _is_unobserved(x):
        return compute(x, name, dtype, power_of_two)
    return cast(
        tuple[Tensor, Tensor],
        torch.ops.outblas.quantize.default(x, name, dtype, power_of_two),
    )


def _is_unobserved(x: Tensor) -> bool:
    """Returns whether the operator would only compute the result, and nobody would see it. It
    passes torch's dispatcher twice, which takes as long as all else on the host.
    """
    return (
        (type(x) is Tensor or type(x) is torch.nn.Parameter)
        and not (dispatch_mode_count() or profiled() or requires_grad(x))
        and forward_levels._current_level < 0
        and x.layout is torch.strided
        and x.numel() > 0
        and is_unchanged((x,))
    )


# ---- computing
def _checked(
    x: Tensor, recipe: str, dtype: torch.dtype | None = None, power_of_two: bool = False
) -> tuple[str, torch.dtype, bool]:
    """Returns the checked arguments of the operator besides x. Raises as `quantize`."""
    kind, fp8 = quantization.recipe_name(recipe), dtype or torch.float8_e4m3fn
    quantization.check(x, kind, fp8)
    return kind, fp8, power_of_two


def compute(x: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    arguments = _checked(x, *given)
    if x.device.type == "cuda" and torch.version.cuda is not None and x.numel():
        try:
            with compiling.deferred():
                result: tuple[Tensor, Tensor] = hooks.quantize_kernels.get().quantize(x, *arguments)
            return result
        except ImportError as error:
            fallback.warn_once(str(error))
        except CompileForbidden as error:
            fallback.warn_fallback(error)
    return by_torch(x, *arguments)


def by_torch(
    x: Tensor, recipe: str, dtype: torch.dtype, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """Computes a checked call by torch's functions, to the same bits as the kernels."""
    out, scale = quantization.empty(x, recipe, dtype)
    most, wide = FORMATS[dtype], x.float()
    is_finite = wide.isfinite()
    largest = _largest(wide.abs().where(is_finite, 0), recipe, scale.shape)
    # By a tensor, because torch divides by a number on a GPU as it multiplies by its reciprocal.
    found = (largest / largest.new_full((), most)).clamp(min=LEAST_SCALE)
    if power_of_two:
        found = ((found.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    scale.copy_(found.where(largest > 0, 1))
    values = (wide * quantization.spread(scale.reciprocal(), recipe, x.shape)).clamp(-most, most)
    has_infinities = dtype == torch.float8_e5m2
    others = wide.where(wide.isinf() & has_infinities, torch.nan)  # with one NaN of all
    return out.copy_(values.where(is_finite, others)), scale


def _largest(sizes: Tensor, recipe: str, shape: torch.Size) -> Tensor:
    """Returns the largest of the magnitudes that share a scale, in the shape of the scales."""
    if not sizes.numel():
        return sizes.new_zeros(shape)
    if recipe == "tensorwise":
        return sizes.amax()
    if recipe == "rowwise":
        return sizes.amax(-1, keepdim=True)
    padding = [0, -sizes.shape[-1] % BLOCK]
    padding += [0, -sizes.shape[-2] % BLOCK] if recipe == "128x128" else []
    padded: Tensor = functional.pad(sizes, padding)
    found: Tensor = padded.unflatten(-1, (-1, BLOCK)).amax(-1)
    if recipe == "128x128":
        found = found.unflatten(-2, (-1, BLOCK)).amax(-2)
    return found


# ---- the operator
for _key in ("CPU", "CUDA"):
    implement("quantize", _key, compute)
refuse_gradients("quantize", "quantize")


@fake("quantize")
def _(x: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    recipe, dtype, _ = _checked(x, *given)
    return quantization.empty(x, recipe, dtype)

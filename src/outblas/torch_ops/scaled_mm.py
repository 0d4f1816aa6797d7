"""Products of fp8 operands with scales, as `torch.nn.functional.scaled_mm`: `hopper.gemm` on sm_90,
elsewhere torch in fp32.

Only bias and residual have gradients. A bias before an activation needs x, which is computed again
for it. Other tensors may need gradients, as in torch: the backward pass raises then.
"""

from collections.abc import Sequence
from typing import Any, overload

import torch

from outblas.base.compat.torch_private import has_override
from outblas.call import problem
from outblas.call.context_flag import check_bool
from outblas.call.epilogue import Activation, EpilogueArgs
from outblas.call.sm_carveout import limited
from outblas.torch_ops import eager_scaled, scaled_operator, scaled_output, scaling_recipes
from outblas.torch_ops.scaling_recipes import Recipe, Swizzle

Tensor = torch.Tensor
Result = Tensor | tuple[Tensor, Tensor]

# The tensors of a call, and its options, which are also those of warm calls: the last two where the
# result is fp8 with scales.
_TENSORS = "mat_a", "mat_b", "scale_a", "scale_b", "bias", "residual"
_OPTIONS = "output_dtype", "use_fast_accum", "activation", "out_recipe", "out_power_of_two"


@overload
def scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor | list[Tensor],
    scale_recipe_a: Recipe,
    scale_b: Tensor | list[Tensor],
    scale_recipe_b: Recipe,
    swizzle_a: Swizzle = None,
    swizzle_b: Swizzle = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    out_recipe: None = None,
    out_power_of_two: bool = False,
    sms: int | None = None,
) -> Tensor: ...


@overload
def scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor | list[Tensor],
    scale_recipe_a: Recipe,
    scale_b: Tensor | list[Tensor],
    scale_recipe_b: Recipe,
    swizzle_a: Swizzle = None,
    swizzle_b: Swizzle = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    out_recipe: Any,
    out_power_of_two: bool = False,
    sms: int | None = None,
) -> tuple[Tensor, Tensor]: ...


def scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor | list[Tensor],
    scale_recipe_a: Recipe,
    scale_b: Tensor | list[Tensor],
    scale_recipe_b: Recipe,
    swizzle_a: Swizzle = None,
    swizzle_b: Swizzle = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    out_recipe: Any = None,
    out_power_of_two: bool = False,
    sms: int | None = None,
) -> Result:
    """Multiply two scaled fp8 matrices: (scale_a * mat_a) @ (scale_b * mat_b), with an epilogue.

    Without an sm_90 GPU torch multiplies in float32, with a `FallbackWarning`. `bias` and
    `residual` have gradients; that of a bias before an activation computes the product once more.
    The other tensors have none, as in torch: a backward pass that needs one raises
    NotImplementedError.

    Args:
        mat_a: The left operand A: (M, K), float8_e4m3fn or float8_e5m2. It is copied first unless
            its rows are contiguous and K and the stride of its rows are multiples of 16.
        mat_b: The right operand B: (K, N), of either dtype and on the device of `mat_a`. It is
            copied first unless its columns are contiguous, like those of a transposed weight.
        scale_a: float32, with any strides, of the shape that the recipe says. A list of one is
            taken too, as it is of recipes and swizzles.
        scale_recipe_a: A member of `torch.nn.functional.ScalingType`, which says what the scales of
            A are of: TensorWise, one element for all of `mat_a`; RowWise, (M, 1), one per row;
            BlockWise1x128, (M, ceil(K/128)), one per 128 values of a row; or BlockWise128x128,
            (ceil(K/128), ceil(M/128)), one per block of 128 by 128 values, transposed. Its first
            dimension may be padded to a multiple of four, as torch requires it.
        scale_b: float32, with any strides.
        scale_recipe_b: TensorWise; RowWise, (1, N), one per column; BlockWise1x128,
            (N, ceil(K/128)), one per 128 values of a column; or BlockWise128x128,
            (ceil(K/128), ceil(N/128)), padded or not. Either both scales are of blocks, in any
            pairing, or none is.
        swizzle_a: None or NO_SWIZZLE of `torch.nn.functional.SwizzleType`.
        swizzle_b: The same.
        bias: Added to the product, of `output_dtype`, as in `matmul`; float32 with `out_recipe`.
        output_dtype: The dtype of the result: bfloat16, float16 or float32; float8_e4m3fn with
            `out_recipe`.
        contraction_dim: () or (1, 0): the columns of `mat_a` and the rows of `mat_b`.
        use_fast_accum: True leaves the sums in the tensor cores of sm_90, which keep about 14 bits
            of them. False adds sums of 128 products in float32, as scales of blocks require.
        activation: Applied to product + bias, as in `matmul`.
        residual: Added after the activation, of `output_dtype`, as in `matmul`; float32 with
            `out_recipe`.
        out_recipe: "1x128", or BlockWise1x128 of `torch.nn.functional.ScalingType`, for a result in
            fp8 with a scale for 128 columns of a row, as `quantize` makes them. It is rounded once,
            from the float32 values that `output_dtype=torch.float32` returns for these arguments.
            On sm_90 the kernel that multiplies also quantizes, where N (N/2 for a gated linear
            unit) is a multiple of 128, there is no residual, and it takes less time so; it may add
            the products in another order then. There are no gradients: a backward pass that needs
            one raises NotImplementedError.
        out_power_of_two: Whether those scales are rounded up to powers of two, as in `quantize`.
        sms: The most SMs that the kernel may use, as in `matmul`.

    Returns:
        The (M, N) result of `output_dtype`, or (M, N/2) for a gated linear unit. With `out_recipe`
        that and its scales: what `outblas.quantize(result, "1x128")` returns of the result in
        float32, in the same layout, which is the one that the next product reads fastest.

    Raises:
        TypeError: An argument has the wrong type.
        OperandError: The operands do not fit together (shapes, dtypes, devices, scales), a recipe
            or a swizzle is not covered, or scales of blocks have `use_fast_accum=True`.
        ValueError: The activation is unknown, `out_recipe` is not covered, or
            `outblas.batch_invariant` asks for a promise that this function does not make.
        RuntimeError: As in `matmul`, for CUDA graphs and OUTBLAS_STRICT.

    Example:
        >>> import torch, outblas
        >>> from torch.nn.functional import ScalingType
        >>> a = torch.randn(32, 64).to(torch.float8_e4m3fn)
        >>> b = torch.randn(16, 64).to(torch.float8_e4m3fn).t()
        >>> scale_a, scale_b, rows = torch.rand(32, 1), torch.rand(1, 16), ScalingType.RowWise
        >>> outblas.scaled_mm(a, b, scale_a, rows, scale_b, rows).dtype
        torch.bfloat16

        Blocks of 128 terms of a row of A, and of 128 by 128 values of B:

        >>> a = torch.ones(32, 256).to(torch.float8_e4m3fn)
        >>> b = torch.ones(384, 256).to(torch.float8_e4m3fn).t()
        >>> scale_a, rows = torch.ones(32, 2), ScalingType.BlockWise1x128
        >>> scale_b, squares = torch.full((2, 3), 0.5), ScalingType.BlockWise128x128
        >>> outblas.scaled_mm(a, b, scale_a, rows, scale_b, squares)[0, :2]
        tensor([128., 128.], dtype=torch.bfloat16)

        A result in fp8 with scales, which the next product takes:

        >>> values, scales = outblas.scaled_mm(
        ...     *(a, b, scale_a, rows, scale_b, squares),
        ...     output_dtype=torch.float8_e4m3fn,
        ...     out_recipe="1x128",
        ... )
        >>> values.dtype, scales.shape
        (torch.float8_e4m3fn, torch.Size([32, 3]))
    """
    operands = mat_a, mat_b, scale_a, scale_b, bias, residual
    recipes = scale_recipe_a, scale_recipe_b, swizzle_a, swizzle_b, contraction_dim
    options: tuple[Any, ...] = output_dtype, use_fast_accum, activation
    if out_recipe is not None or out_power_of_two is not False:
        options += out_recipe, out_power_of_two
    run = _run if sms is None else limited(_run, sms, mat_a, mat_b)
    return run(operands, recipes, options)


def _run(operands: tuple[Any, ...], recipes: tuple[Any, ...], options: tuple[Any, ...]) -> Result:
    """Computes a call by its plan, by an operator, or by the override of a tensor type. `operands`
    and `options` are those that `_TENSORS` and `_OPTIONS` name.
    """
    a, b, scale_a, scale_b, bias, residual = operands
    if type(scale_a) is not Tensor or type(scale_b) is not Tensor:
        scale_a = scaling_recipes.only("scale_a", scale_a)
        scale_b = scaling_recipes.only("scale_b", scale_b)
    traced = torch.compiler.is_dynamo_compiling()
    if not traced and has_override(a, b, scale_a, scale_b, bias, residual):
        tensors = dict(zip(_TENSORS, (a, b, scale_a, scale_b, bias, residual), strict=True))
        named = dict(zip(_OPTIONS, options, strict=False))
        result: Result = scaling_recipes.overridden(scaled_mm, tensors, recipes, named)
        return result
    recipe_a, recipe_b, swizzle_a, swizzle_b, contraction_dim = recipes
    if not (swizzle_a is swizzle_b is None) or contraction_dim:
        scaling_recipes.check_layout(a, b, swizzle_a, swizzle_b, contraction_dim)
    scale_a, scale_b = scaling_recipes.of_matrices(
        a, b, scale_a, recipe_a, scale_b, recipe_b, options[1]
    )
    operands = a, b, scale_a, scale_b, bias, residual
    if not traced:
        done = eager_scaled.run(operands, options)
        if done is not None:
            return done
    result = _by_operator(*_checked(operands, options))
    if not traced and eager_scaled.can_remember(operands, options):
        _remember(operands, options, result)
    return result


def _checked(operands: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the operator of a call and its arguments. Raises TypeError, ValueError or
    OperandError for arguments of which operators could not tell.
    """
    for name, t in zip(_TENSORS, operands, strict=True):
        if t is not None or name not in ("bias", "residual"):
            problem.check_tensor(name, t)
    *matrices, bias, residual = operands
    dtype, fast, activation, *rounding = options
    function = problem.check_activation(activation)
    scaled_output.check_dtype(dtype)
    check_bool(fast, "use_fast_accum")
    if not rounding:
        operator = torch.ops.outblas.scaled_mm.default
        return operator, *matrices, bias, dtype, fast, function, residual
    recipe, power_of_two = scaled_output.check_rounding(rounding, dtype)
    operator = torch.ops.outblas.scaled_mm_quantized.default
    return operator, *matrices, recipe, bias, power_of_two, fast, function, residual


def _by_operator(operator: Any, *arguments: Any) -> Any:
    return operator(*arguments)


def _remember(operands: tuple[Any, ...], options: tuple[Any, ...], result: Result) -> None:
    """Keeps the plan of a call for calls like it."""
    a, b, scale_a, scale_b, bias, residual = operands
    dtype, fast, activation, *rounding = options
    extra = EpilogueArgs(activation or "", bias, residual)
    wide = torch.float32 if rounding else dtype
    calls = [scaled_operator.call_of(a, b, scale_a, scale_b, wide, fast, extra)]
    if rounding:
        calls.insert(0, scaled_output.fused_call(calls[0], result[1], rounding[1]))
    eager_scaled.remember(operands, options, *calls)

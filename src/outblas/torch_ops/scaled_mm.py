"""Products of fp8 operands with scales, as `torch._scaled_mm`: `hopper.gemm` on sm_90, elsewhere
torch in fp32.

Only bias and residual have gradients. A bias before an activation needs x, which is computed again
for it. Other tensors may need gradients, as in torch: the backward pass raises then.
"""

import inspect
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch.overrides import handle_torch_function

from outblas.base.compat.torch_private import has_override
from outblas.call import problem
from outblas.call.arguments import renamed, show_signature
from outblas.call.context_flag import check_bool
from outblas.call.epilogue import Activation, EpilogueArgs
from outblas.call.errors import OperandError
from outblas.call.sm_carveout import limit
from outblas.torch_ops import eager_scaled, scaled_operator, scaled_output, scaling_recipes

Tensor = torch.Tensor


_REQUIRED: Any = None  # default of a parameter that may be passed by its other name
_ALIASES = {"a": "input", "b": "mat2"}  # the operator's names of A and B


@overload
def scaled_mm(
    input: Tensor = ...,
    mat2: Tensor = ...,
    scale_a: Tensor = ...,
    scale_b: Tensor = ...,
    bias: Tensor | None = None,
    *,
    scale_result: None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    out_recipe: None = None,
    out_power_of_two: bool = False,
    sms: int | None = None,
    **aliases: Tensor,
) -> Tensor: ...


@overload
def scaled_mm(
    input: Tensor = ...,
    mat2: Tensor = ...,
    scale_a: Tensor = ...,
    scale_b: Tensor = ...,
    bias: Tensor | None = None,
    *,
    out_recipe: Any,
    out_dtype: torch.dtype,
    scale_result: None = None,
    use_fast_accum: bool = False,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    out_power_of_two: bool = False,
    sms: int | None = None,
    **aliases: Tensor,
) -> tuple[Tensor, Tensor]: ...


@overload
def scaled_mm(
    input: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    scale_result: None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    sms: int | None = None,
) -> Tensor: ...


@overload
def scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor | list[Tensor],
    scale_recipe_a: Any,
    scale_b: Tensor | list[Tensor],
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
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
    scale_recipe_a: Any,
    scale_b: Tensor | list[Tensor],
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: Tensor | None = None,
    *,
    out_recipe: Any,
    output_dtype: torch.dtype,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    out_power_of_two: bool = False,
    sms: int | None = None,
) -> tuple[Tensor, Tensor]: ...


def scaled_mm(*positional: Any, **named: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Multiply two scaled fp8 matrices: (scale_a * input) @ (scale_b * mat2), with an epilogue.

    Without an sm_90 GPU torch multiplies in float32, with a `FallbackWarning`. `bias` and
    `residual` have gradients; that of a bias before an activation computes the product once more.
    The other tensors have none, as in torch: a backward pass that needs one raises
    NotImplementedError.

    A call may also be written as that of `torch.nn.functional.scaled_mm`, which has a recipe after
    each scale: `scaled_mm(mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, ...)`,
    with its keywords, and scales in the shapes that torch expects there. The recipes TensorWise,
    RowWise, BlockWise1x128 and BlockWise128x128 are covered; others are refused by name.

    Args:
        input: The left operand A: (M, K), float8_e4m3fn or float8_e5m2. It is copied first unless
            its rows are contiguous and K and the stride of its rows are multiples of 16. The
            keyword `a` is accepted too.
        mat2: The right operand B: (K, N), of either dtype and on the device of `input`. It is
            copied first unless its columns are contiguous, like those of a transposed weight. The
            keyword `b` is accepted too.
        scale_a: float32, with any strides: one element for all of `input`; (M, 1), one per row;
            (M, ceil(K/128)), one per 128 values of a row; or (ceil(M/128), ceil(K/128)), one per
            block of 128 by 128 values.
        scale_b: float32, with any strides: one element for all of `mat2`; (1, N), one per column;
            (ceil(K/128), N), one per 128 values of a column; or (ceil(K/128), ceil(N/128)), one per
            block. Either both scales are of blocks, in any pairing, or none is.
        bias: Added to the product, of `out_dtype`, as in `matmul`; float32 with `out_recipe`.
        scale_result: None. In `torch._scaled_mm` it scales results in fp8; here they have scales of
            their own (`out_recipe`).
        out_dtype: The dtype of the result: bfloat16, float16 or float32; float8_e4m3fn with
            `out_recipe`.
        use_fast_accum: True leaves the sums in the tensor cores of sm_90, which keep about 14 bits
            of them. False adds sums of 128 products in float32, as scales of blocks require.
        activation: Applied to product + bias, as in `matmul`.
        residual: Added after the activation, of `out_dtype`, as in `matmul`; float32 with
            `out_recipe`.
        out_recipe: "1x128", or BlockWise1x128 of `torch.nn.functional.ScalingType`, for a result in
            fp8 with a scale for 128 columns of a row, as `quantize` makes them. It is rounded once,
            from the float32 values that `out_dtype=torch.float32` returns for these arguments.
            On sm_90 the kernel that multiplies also quantizes, where N (N/2 for a gated linear
            unit) is a multiple of 128, there is no residual, and it takes less time so; it may add
            the products in another order then. There are no gradients: a backward pass that needs
            one raises NotImplementedError.
        out_power_of_two: Whether those scales are rounded up to powers of two, as in `quantize`.
        sms: The most SMs that the kernel may use, as in `matmul`.

    Returns:
        The (M, N) result of `out_dtype`, or (M, N/2) for a gated linear unit. With `out_recipe`
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
        >>> a = torch.randn(32, 64).to(torch.float8_e4m3fn)
        >>> b = torch.randn(16, 64).to(torch.float8_e4m3fn).t()
        >>> one_per_row = torch.full((32, 1), 0.5)
        >>> outblas.scaled_mm(a, b, one_per_row, torch.ones(())).dtype
        torch.bfloat16

        Blocks of 128 terms of a row of `input`, and of 128 by 128 values of `mat2`:

        >>> a = torch.ones(32, 256).to(torch.float8_e4m3fn)
        >>> b = torch.ones(384, 256).to(torch.float8_e4m3fn).t()
        >>> scale_a, scale_b = torch.ones(32, 2), torch.full((2, 3), 0.5)
        >>> outblas.scaled_mm(a, b, scale_a, scale_b)[0, :2]
        tensor([128., 128.], dtype=torch.bfloat16)

        A result in fp8 with scales, which the next product takes:

        >>> values, scales = outblas.scaled_mm(
        ...     a, b, scale_a, scale_b, out_dtype=torch.float8_e4m3fn, out_recipe="1x128"
        ... )
        >>> values.dtype, scales.shape
        (torch.float8_e4m3fn, torch.Size([32, 3]))
    """
    if (sms := named.pop("sms", None)) is not None:
        with limit(sms, *positional[:1], *named.values()):
            result: Tensor | tuple[Tensor, Tensor] = scaled_mm(*positional, **named)
            return result
    if scaling_recipes.is_given(positional, named):
        return _by_recipes(*positional, **named)
    return _by_scales(*positional, **named)


def _by_scales(
    input: Tensor = _REQUIRED,
    mat2: Tensor = _REQUIRED,
    scale_a: Tensor = _REQUIRED,
    scale_b: Tensor = _REQUIRED,
    bias: Tensor | None = None,
    scale_result: None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    out_recipe: Any = None,
    out_power_of_two: bool = False,
    **aliases: Tensor,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes a call with the arguments of `torch._scaled_mm`."""
    if scale_result is not None:
        raise OperandError(
            "scale_result is given, expected None: results in fp8 have scales of their own "
            "(out_recipe)"
        )
    if aliases:
        input, mat2 = renamed("scaled_mm", _ALIASES, aliases, input=input, mat2=mat2)
    traced = torch.compiler.is_dynamo_compiling()
    operands = input, mat2, scale_a, scale_b, bias, residual
    rounding = None
    if out_recipe is not None or out_power_of_two is not False:
        rounding = scaled_output.Rounding(out_recipe, out_power_of_two)
    options = out_dtype, use_fast_accum, activation, *(rounding or ())

    if not traced:
        done = eager_scaled.run(operands, options)
        if done is not None:
            return done
    result = _checked_call(traced, *operands, out_dtype, use_fast_accum, activation, rounding)
    if not traced and eager_scaled.can_remember(operands, options):
        extra = EpilogueArgs(activation or "", bias, residual)
        dtype = out_dtype if rounding is None else torch.float32
        calls = [
            scaled_operator.call_of(input, mat2, scale_a, scale_b, dtype, use_fast_accum, extra)
        ]
        if rounding is not None:
            calls.insert(0, scaled_output.fused_call(calls[0], result[1], out_power_of_two))
        eager_scaled.remember(operands, options, *calls)
    return result


def _by_recipes(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Any,
    scale_recipe_a: Any,
    scale_b: Any,
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes a call with the arguments of `torch.nn.functional.scaled_mm`. `options`: the
    keywords of both forms.
    """
    scale_a, scale_b = scaling_recipes.check_scales(
        mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, use_fast_accum
    )
    scaling_recipes.check_swizzle("swizzle_a", swizzle_a)
    scaling_recipes.check_swizzle("swizzle_b", swizzle_b)
    scaling_recipes.check_contraction(contraction_dim)
    return _by_scales(
        mat_a,
        mat_b,
        scale_a,
        scale_b,
        bias,
        out_dtype=output_dtype,
        use_fast_accum=use_fast_accum,
        **options,
    )


for _form in (_by_scales, _by_recipes):
    _form.__name__ = _form.__qualname__ = "scaled_mm"  # the name in Python's own errors


def _checked_call(
    traced: bool,
    input: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    activation: Activation | None,
    rounding: scaled_output.Rounding | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Checks the types of the arguments, then calls the operator, or the override of a tensor
    type. `rounding`: how the result becomes fp8, if it does.
    """
    result: Tensor | tuple[Tensor, Tensor]
    given = {"input": input, "mat2": mat2, "scale_a": scale_a, "scale_b": scale_b}
    given |= {name: t for name, t in (("bias", bias), ("residual", residual)) if t is not None}
    if not traced and has_override(*given.values()):
        keywords: dict[str, Any] = {n: t for n, t in given.items() if n in ("bias", "residual")}
        keywords |= {"out_dtype": out_dtype, "use_fast_accum": use_fast_accum}
        keywords |= {} if activation is None else {"activation": activation}
        keywords |= {} if rounding is None else rounding.keywords
        result = handle_torch_function(
            scaled_mm, tuple(given.values()), input, mat2, scale_a, scale_b, **keywords
        )
        return result
    for name, t in given.items():
        problem.check_tensor(name, t)
    function = problem.check_activation(activation)
    if not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype is {type(out_dtype).__name__}, expected a torch.dtype")
    check_bool(use_fast_accum, "use_fast_accum")
    operator: Any = torch.ops.outblas.scaled_mm.default
    arguments: Any = (input, mat2, scale_a, scale_b, bias, out_dtype, use_fast_accum, function)
    if rounding is not None:
        recipe, power_of_two = rounding.checked(out_dtype)
        operator = torch.ops.outblas.scaled_mm_quantized.default
        arguments = (
            *(input, mat2, scale_a, scale_b, recipe, bias),
            *(power_of_two, use_fast_accum, function),
        )
    if traced:
        result = _by_operator(operator, *arguments, residual)
        return result
    try:
        result = _by_operator(operator, *arguments, residual)
    except OperandError as error:
        error.rename(_ALIASES)
        raise
    return result


def _by_operator(operator: Any, *given: Any) -> Any:
    return operator(*given)


_SMS = inspect.Parameter("sms", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=int | None)
show_signature(scaled_mm, ("input", "mat2", "scale_a", "scale_b"), _by_scales, _SMS)

"""Products of fp8 operands with scales, as `torch._scaled_mm`: `hopper.gemm` on sm_90, elsewhere
torch in fp32.

Only bias and residual have gradients. A bias before an activation needs x, which is computed again
for it. Other tensors may need gradients, as in torch: the backward pass raises then.
"""

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch.overrides import handle_torch_function

from ..core import epilogue, invariance, problem, registry
from ..core.arguments import renamed, show_signature
from ..core.compat.torch_private import autocast_off, has_override
from ..core.compiling import CompileForbidden
from ..core.context_flag import check_bool
from ..core.epilogue import Activation, EpilogueArgs
from ..core.errors import A, B, OperandError
from ..core.sm_carveout import limit
from ..runtime import dispatch, fallback, launcher, recorded_shapes
from ..runtime.default_kernel import PRODUCTION
from ..runtime.dispatch import Call
from . import block_scales, eager_scaled, ops, scaled_output, scaling_recipes
from .schema import library

Tensor = torch.Tensor

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
OUT_DTYPES = torch.bfloat16, torch.float16, torch.float32

_autocast_off = autocast_off("cpu", "cuda")


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
    sms: int | None = None,
    **aliases: Tensor,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes a call with the arguments of `torch._scaled_mm`."""
    if sms is not None:
        with limit(sms, input, *aliases.values()):
            return _by_scales(
                input,
                mat2,
                scale_a,
                scale_b,
                bias,
                scale_result,
                out_dtype,
                use_fast_accum,
                activation=activation,
                residual=residual,
                out_recipe=out_recipe,
                out_power_of_two=out_power_of_two,
                sms=None,
                **aliases,
            )
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
        calls = [_call(input, mat2, scale_a, scale_b, dtype, use_fast_accum, extra)]
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
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    out_recipe: Any = None,
    out_power_of_two: bool = False,
    sms: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes a call with the arguments of `torch.nn.functional.scaled_mm`."""
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
        activation=activation,
        residual=residual,
        out_recipe=out_recipe,
        out_power_of_two=out_power_of_two,
        sms=sms,
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


show_signature(scaled_mm, ("input", "mat2", "scale_a", "scale_b"), _by_scales)


def _checked(
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
    for name, t in ((A, a), (B, b)):
        if t.dim() != 2:
            raise OperandError(f"{name} has {t.dim()} dimensions, expected 2")
        if t.dtype not in FORMATS:
            raise OperandError(
                f"{name}.dtype is {t.dtype}, expected one of {', '.join(map(str, FORMATS))}"
            )
        if t.device != a.device:
            raise OperandError(f"{name} is on {t.device} but {A} is on {a.device}")
    if a.shape[1] != b.shape[0]:
        raise OperandError(f"{A}.shape[1] is {a.shape[1]} but {B}.shape[0] is {b.shape[0]}")
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
        raise OperandError(f"out_dtype is {dtype}, expected one of {known}{others}")
    extra = EpilogueArgs(activation, bias, residual)
    return problem.check_epilogue_args(extra, shape, dtype, a.device), dtype, use_fast_accum, extra


def _scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *given: Any) -> Tensor:
    _, dtype, use_fast_accum, extra = _checked(a, b, scale_a, scale_b, *given)
    activation, bias, residual, _ = extra
    invariance.refuse_promise("scaled_mm")
    reason = _no_kernel_reason(a)
    if reason is not None:
        if recorded_shapes.is_recording():  # what a kernel computes is recorded as it is planned
            recorded_shapes.note(
                dispatch.problem_of(_call(a, b, scale_a, scale_b, dtype, use_fast_accum, extra))
            )
        return _by_torch(reason, a, b, scale_a, scale_b, dtype, extra)
    if 0 in (*a.shape, *b.shape):
        x = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
        x = x if bias is None else x + bias
        return epilogue.apply(x, activation, residual).to(dtype)
    try:
        return dispatch.run(_call(a, b, scale_a, scale_b, dtype, use_fast_accum, extra))
    except CompileForbidden as error:
        return _by_torch(str(error), a, b, scale_a, scale_b, dtype, extra)


def _scaled_mm_quantized(
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
) -> tuple[Tensor, Tensor]:
    kind = scaled_output.recipe_name(recipe)
    given = bias, torch.float32, use_fast_accum, activation, residual
    shape, dtype, _, extra = _checked(a, b, scale_a, scale_b, *given)
    invariance.refuse_promise("scaled_mm")
    reason = _no_kernel_reason(a)
    if reason is not None:
        if recorded_shapes.is_recording():
            call = _call(a, b, scale_a, scale_b, dtype, use_fast_accum, extra)
            scaled_output.record(call, shape, power_of_two)
        x = _by_torch(reason, a, b, scale_a, scale_b, dtype, extra)
        return scaled_output.quantized(x, kind, power_of_two)
    if 0 not in (*a.shape, *b.shape):
        call = _call(a, b, scale_a, scale_b, dtype, use_fast_accum, extra)
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


def _call(
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


def _no_kernel_reason(a: Tensor) -> str | None:
    """Returns why torch computes a call, or None if a kernel does."""
    return unsupported_reason(a.device)


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
    library.impl("scaled_mm", _scaled_mm, _key)
    library.impl("scaled_mm_quantized", _scaled_mm_quantized, _key)


@ops.fake("scaled_mm")
def _(a: Tensor, *given: Any) -> Tensor:
    shape, dtype, *_ = _checked(a, *given)
    return a.new_empty(shape, dtype=dtype)


@ops.fake("scaled_mm_quantized")
def _(
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
) -> tuple[Tensor, Tensor]:
    kind = scaled_output.recipe_name(recipe)
    given = bias, torch.float32, use_fast_accum, activation, residual
    shape, dtype, *_ = _checked(a, b, scale_a, scale_b, *given)
    return scaled_output.empty(a.new_empty(shape, dtype=dtype), kind)

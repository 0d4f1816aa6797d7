"""Grouped products of fp8 operands with scales of blocks: the experts of checkpoints that are
stored so, in a forward pass, and the gradients of their weights. Its arguments are those of
`torch.nn.functional.scaled_grouped_mm`.

What is checked, planned and launched is a grouped product with two more tensors (`grouped_mm`).
"""

from collections.abc import Sequence
from typing import Any

import torch

from outblas.base.compat.torch_private import has_override
from outblas.call import grouped, problem
from outblas.call.context_flag import check_bool
from outblas.call.epilogue import Activation
from outblas.call.grouped import GroupedTensors
from outblas.call.sm_carveout import limited
from outblas.torch_ops import grouped_plans, ops, scaled_output, scaling_recipes
from outblas.torch_ops.autograd_levels import refuse_gradients
from outblas.torch_ops.flop_formulas import register_if_counted
from outblas.torch_ops.grouped_mm import KERNELS, GroupedCall, compute, fake_results
from outblas.torch_ops.scaling_recipes import Recipe, Swizzle
from outblas.torch_ops.schema import ARGUMENTS, fake, implement

Tensor = torch.Tensor

# The tensors and the options of a call.
_TENSORS = (
    *("mat_a", "mat_b", "scale_a", "scale_b", "offs", "bias", "residual"),
    *("a_index", "scatter_index", "scatter_weights", "counts"),
)
_OPTIONS = "output_dtype", "use_fast_accum", "activation", "kernel"


def scaled_grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor | list[Tensor],
    scale_recipe_a: Recipe,
    scale_b: Tensor | list[Tensor],
    scale_recipe_b: Recipe,
    swizzle_a: Swizzle = None,
    swizzle_b: Swizzle = None,
    bias: Tensor | None = None,
    offs: Tensor | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    a_index: Tensor | None = None,
    scatter_index: Tensor | None = None,
    scatter_weights: Tensor | None = None,
    counts: Tensor | None = None,
    kernel: str | None = None,
    sms: int | None = None,
) -> Tensor:
    """Multiply the fp8 matrices of each group, whose blocks of 128 terms have scales.

    The products of a block are summed up in tensor cores; the sum is multiplied by the scales of
    its row and of its columns, and added in float32.

    ============  ============  ============  ======================  ===========================
    mat_a         mat_b         result        scale_a                 scale_b
    ============  ============  ============  ======================  ===========================
    (M, K)        (G, K, N)     (M, N)        (M, ceil(K/128))        (G, ceil(K/128),
                                                                      ceil(N/128))
    (G, C, K)     (G, K, N)     (G, C, N)     (G, C, ceil(K/128))     the same
    (M, K)        (K, N)        (G, M, N)     (M, ceil(K/128))        (N, ceil(K/128))
    ============  ============  ============  ======================  ===========================

    In the first form groups are rows of `mat_a`, of any size and alignment, and `offs` has their
    ends; in the second each has room for C rows, of which `counts` are there; in the third they
    are terms of the sums, as in gradients of weights. A group of terms ends at a multiple of 128,
    or at K; the result of one that does not, and of the next, is undefined. A group without terms
    gets zeros.

    As with `grouped_mm`, `offs` and `counts` are read on the device alone. Without a CUDA device
    torch multiplies group by group in float32, with a `FallbackWarning`.

    No tensor has a gradient: a backward pass that needs one raises NotImplementedError.

    Args:
        mat_a: float8_e4m3fn or float8_e5m2. Contiguous rows at multiples of 16 bytes are fastest.
        mat_b: Of either dtype, on the same device. Contiguous columns, as those of transposed
            weights (G, N, K), are fastest.
        scale_a: float32, of any strides: one of each row and 128 terms. A list of one is taken
            too, as it is of recipes and swizzles.
        scale_recipe_a: BlockWise1x128 of `torch.nn.functional.ScalingType`.
        scale_b: float32, of any strides: one of each 128 terms and 128 columns; where terms are
            divided, of each column and 128 terms.
        scale_recipe_b: BlockWise128x128; where terms are divided, BlockWise1x128.
        swizzle_a: None or NO_SWIZZLE of `torch.nn.functional.SwizzleType`.
        swizzle_b: The same.
        bias: (G, N), of `output_dtype`, added to each group's rows.
        offs: As in `grouped_mm`, where an operand has two dimensions.
        output_dtype: The dtype of the result: bfloat16, float16 or float32.
        contraction_dim: (), or the last dimension of `mat_a` and the last but one of `mat_b`.
        use_fast_accum: False: sums of 128 products are added in float32.
        activation: As in `grouped_mm`, applied to product + bias.
        residual: Added after the activation; of the shape and dtype of the result.
        a_index: As in `grouped_mm`. It chooses rows of `mat_a` and of `scale_a`.
        scatter_index: As in `grouped_mm`.
        scatter_weights: As in `grouped_mm`.
        counts: As in `grouped_mm`, where both operands have three dimensions.
        kernel: None for the best one; "hopper.grouped", on sm_90; or "portable", which also runs on
            CPU tensors, through Triton's interpreter.
        sms: The most SMs that the kernel may use, as in `matmul`.

    Returns:
        The result, contiguous.

    Raises:
        TypeError: An argument has the wrong type.
        OperandError: The operands do not fit together (shapes, dtypes, devices, scales), or carry
            forward-mode gradients; a recipe or a swizzle is not covered, or `use_fast_accum` is
            True.
        ValueError: `activation` or `kernel` is unknown, or the kernel does not support the
            operands; or `outblas.batch_invariant` asks for a promise that this function does not
            make.
        RuntimeError: As in `matmul`, for CUDA graphs and OUTBLAS_STRICT.

    Example:
        Two experts with weights of 128 rows and 256 columns, as a checkpoint stores them:

        >>> import torch, outblas
        >>> from torch.nn.functional import ScalingType
        >>> tokens = torch.ones(6, 256).to(torch.float8_e4m3fn)
        >>> weights = torch.ones(2, 128, 256).to(torch.float8_e4m3fn)
        >>> of_tokens, rows = torch.full((6, 2), 0.5), ScalingType.BlockWise1x128
        >>> of_weights, squares = torch.full((2, 1, 2), 0.25), ScalingType.BlockWise128x128
        >>> offs = torch.tensor([2, 6], dtype=torch.int32)
        >>> y = outblas.scaled_grouped_mm(
        ...     tokens, weights.mT, of_tokens, rows, of_weights.mT, squares, offs=offs
        ... )
        >>> y.shape, y[0, 0].item()
        (torch.Size([6, 128]), 32.0)
    """
    rows = a_index, scatter_index, scatter_weights, counts
    tensors = mat_a, mat_b, scale_a, scale_b, offs, bias, residual, *rows
    recipes = scale_recipe_a, scale_recipe_b, swizzle_a, swizzle_b, contraction_dim
    run = _run if sms is None else limited(_run, sms, mat_a, mat_b)
    return run(tensors, recipes, (output_dtype, use_fast_accum, activation, kernel))


def _run(tensors: tuple[Any, ...], recipes: tuple[Any, ...], options: tuple[Any, ...]) -> Tensor:
    """Computes a call by its plan, by the operator, or by the override of a tensor type. `tensors`
    and `options` are those that `_TENSORS` and `_OPTIONS` name.
    """
    mat_a, mat_b, scale_a, scale_b, offs, bias, residual, *rows = tensors
    scale_a = scaling_recipes.only("scale_a", scale_a)
    scale_b = scaling_recipes.only("scale_b", scale_b)
    beside = offs, bias, residual, *rows
    is_traced = torch.compiler.is_dynamo_compiling()
    result: Tensor
    if not is_traced:
        overriding = mat_a, mat_b, scale_a, scale_b, *beside
        if has_override(*overriding):
            by_name = dict(zip(_TENSORS, overriding, strict=True))
            named = dict(zip(_OPTIONS, options, strict=True))
            result = scaling_recipes.overridden(scaled_grouped_mm, by_name, recipes, named)
            return result
        register_if_counted()
    output_dtype, use_fast_accum, activation, kernel = options
    recipe_a, recipe_b, swizzle_a, swizzle_b, contraction_dim = recipes
    if not (swizzle_a is swizzle_b is None) or contraction_dim:
        scaling_recipes.check_layout(mat_a, mat_b, swizzle_a, swizzle_b, contraction_dim)
    check_bool(use_fast_accum, "use_fast_accum")
    scale_b = scaling_recipes.of_groups(mat_a, mat_b, scale_b, recipe_a, recipe_b, use_fast_accum)
    name = problem.check_name("kernel", kernel, KERNELS, " or None", "None or ")
    function = problem.check_activation(activation) if activation is not None else ""
    for required, t in (("scale_a", scale_a), ("scale_b", scale_b)):
        problem.check_tensor(required, t)
    scaled_output.check_dtype(output_dtype)
    grouped.check_types(mat_a, mat_b, None, _TENSORS[4:], beside)
    a_index, scatter_index, weights, counts = rows
    others = GroupedTensors(
        bias, residual, None, a_index, scatter_index, weights, counts, scale_a, scale_b
    )
    plan_options = function, output_dtype, name, False
    if not is_traced:
        found = grouped_plans.run(mat_a, mat_b, offs, others, plan_options)
        if found is not None:
            return found
    operands = mat_a, mat_b, scale_a, scale_b, *beside
    result = ops.scaled_grouped_mm(*operands, function, output_dtype, name)
    if not is_traced:
        grouped_plans.remember_call(mat_a, mat_b, offs, others, plan_options)
    return result


# ---- the operator
_DEFAULTS = tuple(argument.default for argument in ARGUMENTS["scaled_grouped_mm"])


def _call(given: tuple[Any, ...]) -> GroupedCall:
    """Returns the call that the arguments of the operator describe."""
    given += _DEFAULTS[len(given) :]
    mat_a, mat_b, scale_a, scale_b, offs, *beside, activation, dtype, name = given
    ops.check_activation(activation)
    bias, residual, a_index, scatter_index, scatter_weights, counts = beside
    tensors = GroupedTensors(
        bias, residual, None, a_index, scatter_index, scatter_weights, counts, scale_a, scale_b
    )
    return mat_a, mat_b, offs, tensors, activation, dtype, name, False, False


def _scaled_grouped_mm(*given: Any) -> Tensor:
    return compute(_call(given))[0]


for _key in ("CPU", "CUDA"):
    implement("scaled_grouped_mm", _key, _scaled_grouped_mm)
refuse_gradients("scaled_grouped_mm", "scaled_grouped_mm")


@fake("scaled_grouped_mm")
def _(*given: Any) -> Tensor:
    return fake_results(_call(given))[0]

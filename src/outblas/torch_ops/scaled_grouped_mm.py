"""Grouped products of fp8 operands with scales of blocks: the experts of checkpoints that are
stored so, in a forward pass, and the gradients of their weights.

What is checked, planned and launched is a grouped product with two more tensors (`grouped_mm`).
"""

from typing import Any

import torch
from torch.overrides import handle_torch_function

from outblas.base.compat.torch_private import has_override
from outblas.call import grouped, problem
from outblas.call.epilogue import Activation
from outblas.call.grouped import GroupedTensors
from outblas.call.sm_carveout import limited
from outblas.torch_ops import grouped_plans, ops
from outblas.torch_ops.autograd_levels import refuse_gradients
from outblas.torch_ops.flop_formulas import register_if_counted
from outblas.torch_ops.grouped_mm import KERNELS, GroupedCall, compute, fake_results
from outblas.torch_ops.schema import ARGUMENTS, library

Tensor = torch.Tensor

_TENSORS = (
    "scale_a",
    "scale_b",
    "offs",
    "bias",
    "residual",
    "a_index",
    "scatter_index",
    "scatter_weights",
    "counts",
)


def scaled_grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
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
    (M, K)        (K, N)        (G, M, N)     (M, ceil(K/128))        (ceil(K/128), N)
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
        scale_a: float32, of any strides: one of each row and 128 terms.
        scale_b: float32, of any strides: one of each 128 terms and 128 columns; where terms are
            divided, of each 128 terms and column.
        offs: As in `grouped_mm`, where an operand has two dimensions.
        bias: (G, N), of `out_dtype`, added to each group's rows.
        out_dtype: The dtype of the result: bfloat16, float16 or float32.
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
            forward-mode gradients.
        ValueError: `activation` or `kernel` is unknown, or the kernel does not support the
            operands; or `outblas.batch_invariant` asks for a promise that this function does not
            make.
        RuntimeError: As in `matmul`, for CUDA graphs and OUTBLAS_STRICT.

    Example:
        Two experts with weights of 128 rows and 256 columns, as a checkpoint stores them:

        >>> import torch, outblas
        >>> tokens = torch.ones(6, 256).to(torch.float8_e4m3fn)
        >>> weights = torch.ones(2, 128, 256).to(torch.float8_e4m3fn)
        >>> of_tokens, of_weights = torch.full((6, 2), 0.5), torch.full((2, 1, 2), 0.25)
        >>> offs = torch.tensor([2, 6], dtype=torch.int32)
        >>> y = outblas.scaled_grouped_mm(
        ...     tokens, weights.mT, of_tokens, of_weights.mT, offs=offs
        ... )
        >>> y.shape, y[0, 0].item()
        (torch.Size([6, 128]), 32.0)
    """
    rows = a_index, scatter_index, scatter_weights, counts
    tensors = scale_a, scale_b, offs, bias, residual, *rows
    run = _run if sms is None else limited(_run, sms, mat_a, mat_b)
    return run(mat_a, mat_b, tensors, out_dtype, activation, kernel)


def _run(
    mat_a: Tensor,
    mat_b: Tensor,
    tensors: tuple[Tensor | None, ...],
    out_dtype: torch.dtype,
    activation: Activation | None,
    kernel: str | None,
) -> Tensor:
    """Computes a call by its plan, by the operator, or by the override of a tensor type. `tensors`
    are those that `_TENSORS` names.
    """
    scale_a, scale_b, offs, bias, residual, *rows = tensors
    is_traced = torch.compiler.is_dynamo_compiling()
    result: Tensor
    if not is_traced:
        if has_override(mat_a, mat_b, *tensors):
            named: dict[str, Any] = dict(zip(_TENSORS[2:], tensors[2:], strict=True))
            named |= {"out_dtype": out_dtype, "activation": activation, "kernel": kernel}
            overriding = mat_a, mat_b, *tensors
            result = handle_torch_function(
                scaled_grouped_mm, overriding, mat_a, mat_b, scale_a, scale_b, **named
            )
            return result
        register_if_counted()
    name = problem.check_name("kernel", kernel, KERNELS, " or None", "None or ")
    function = problem.check_activation(activation) if activation is not None else ""
    for required, t in (("scale_a", scale_a), ("scale_b", scale_b)):
        problem.check_tensor(required, t)
    grouped.check_types(mat_a, mat_b, out_dtype, _TENSORS, tensors)
    beside = GroupedTensors(bias, residual, None, *rows, scale_a, scale_b)
    options = function, out_dtype, name, False
    if not is_traced:
        found = grouped_plans.run(mat_a, mat_b, offs, beside, options)
        if found is not None:
            return found
    result = ops.scaled_grouped_mm(mat_a, mat_b, *tensors, function, out_dtype, name)
    if not is_traced:
        grouped_plans.remember_call(mat_a, mat_b, offs, beside, options)
    return result


# ---- the operator
_DEFAULTS = tuple(argument.default for argument in ARGUMENTS["scaled_grouped_mm"])


def _call(given: tuple[Any, ...]) -> GroupedCall:
    """Returns the call that the arguments of the operator describe."""
    given += _DEFAULTS[len(given) :]
    mat_a, mat_b, scale_a, scale_b, offs, *beside, activation, out_dtype, name = given
    ops.check_activation(activation)
    bias, residual, a_index, scatter_index, scatter_weights, counts = beside
    tensors = GroupedTensors(
        bias, residual, None, a_index, scatter_index, scatter_weights, counts, scale_a, scale_b
    )
    return mat_a, mat_b, offs, tensors, activation, out_dtype, name, False, False


def _scaled_grouped_mm(*given: Any) -> Tensor:
    return compute(_call(given))[0]


for _key in ("CPU", "CUDA"):
    library.impl("scaled_grouped_mm", _scaled_grouped_mm, _key)
refuse_gradients("scaled_grouped_mm", "scaled_grouped_mm")


@ops.fake("scaled_grouped_mm")
def _(*given: Any) -> Tensor:
    return fake_results(_call(given))[0]

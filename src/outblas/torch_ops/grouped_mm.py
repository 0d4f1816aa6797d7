"""Grouped products, as `torch.nn.functional.grouped_mm`: the experts of a mixture, forward and
backward. The sizes of groups stay on the device.
"""

from typing import Any

import torch
from torch.overrides import handle_torch_function

from ..core import grouped
from ..core.compat.torch_private import (
    any_autocast,
    autocast_off,
    has_override,
)
from ..core.compiling import CompileForbidden
from ..core.grouped import GroupedTensors
from ..core.problem import check_name
from ..runtime import fallback, hooks
from ..runtime.cuda_graphs import capturing, not_ready
from . import ops
from .autograd_levels import autograd_kernel, within_forward
from .flop_formulas import register_if_counted
from .schema import ARGUMENTS, define, library

Tensor = torch.Tensor

HOPPER, PORTABLE = "hopper.grouped", "portable"
KERNELS = (HOPPER, PORTABLE)
_autocast_off = autocast_off("cpu", "cuda")

define(
    "grouped_mm(Tensor mat_a, Tensor mat_b, Tensor? offs=None, Tensor? bias=None, "
    "ScalarType? out_dtype=None, str kernel_name='', bool zero_tail=False) -> Tensor"
)


def grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Multiply the matrices of each group, such as the tokens of each expert with its weights.

    ============  ============  ========================  ===================================
    mat_a         mat_b         result                    groups are divided along
    ============  ============  ========================  ===================================
    (M, K)        (G, K, N)     (M, N)                    M: rows of mat_a and of the result
    (G, M, K)     (K, N)        (M, N)                    N: columns of mat_b and of the result
    (M, K)        (K, N)        (G, M, N)                 K: a sum for each group
    (G, M, K)     (G, K, N)     (G, M, N)                 nothing; `offs` is None
    ============  ============  ========================  ===================================

    `offs` is read on the device alone: a call waits for nothing, and a CUDA graph that captured it
    may be replayed with other groups. Groups may be empty, and need no alignment. Without a CUDA
    device torch multiplies group by group, with a `FallbackWarning`.

    The operands and the bias have gradients of any order, also where the result has another dtype,
    but no forward-mode gradients. Autocast casts nothing, as with torch's function.

    Args:
        mat_a: bfloat16, float16 or float32, of any strides.
        mat_b: Of the same dtype, on the same device, of any strides.
        offs: int32, (G,): where each group ends in the divided dimension; not decreasing. G is at
            most 1024. What lies behind the last end belongs to no group: it is not read, and the
            result there is undefined. Ends beyond the operand count as its own end.
        bias: (G, N), of the dtype of the result, added to each group's rows; not where N is
            divided.
        out_dtype: The dtype of the result: that of the operands, or float32.
        kernel: None for the best one; "hopper.grouped", for 16-bit operands on sm_90; or
            "portable", which also runs on CPU tensors, through Triton's interpreter.

    Returns:
        The result, contiguous.

    Raises:
        TypeError: An argument has the wrong type.
        OperandError: The operands do not fit together, or carry forward-mode gradients.
        ValueError: `kernel` is unknown, or does not support the operands.
        RuntimeError: As in `matmul`, for CUDA graphs and OUTBLAS_STRICT.

    Example:
        Three experts, of which the second one has no token:

        >>> import torch, outblas
        >>> tokens, weights = torch.ones(6, 8), torch.ones(3, 8, 4)
        >>> offs = torch.tensor([2, 2, 6], dtype=torch.int32)
        >>> outblas.grouped_mm(tokens, weights, offs=offs).shape
        torch.Size([6, 4])
    """
    if not torch.compiler.is_dynamo_compiling() and has_override(mat_a, mat_b):
        result: Tensor = handle_torch_function(
            grouped_mm,
            (mat_a, mat_b),
            mat_a,
            mat_b,
            offs=offs,
            bias=bias,
            out_dtype=out_dtype,
            kernel=kernel,
        )
        return result
    name = check_name("kernel", kernel, KERNELS, " or None", "None or ")
    if not torch.compiler.is_dynamo_compiling():
        register_if_counted()
    grouped.check_types(mat_a, mat_b, offs, bias, out_dtype)
    result = torch.ops.outblas.grouped_mm.default(mat_a, mat_b, offs, bias, out_dtype, name)
    return result


def _compute(*given: Any) -> Tensor:
    """The operator. Like torch's own it is not cast by autocast, and nothing in it may be."""
    if not any_autocast():
        return _compute_as_given(*given)
    with _autocast_off():
        return _compute_as_given(*given)


def _compute_as_given(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kernel_name: str = "",
    zero_tail: bool = False,
) -> Tensor:
    form, shape, dtype = grouped.check(mat_a, mat_b, offs, bias, out_dtype)
    if form == "batch":
        return _batch(mat_a, mat_b, bias, out_dtype, kernel_name)
    assert offs is not None, "`check` demands it"
    out = torch.empty(shape, dtype=dtype, device=mat_a.device)
    reason = _no_kernel_reason(mat_a) if not kernel_name else None
    if reason is not None:
        fallback.warn_fallback(reason)
        return by_torch(mat_a, mat_b, offs, bias, dtype)
    given = form, mat_a, mat_b, out
    tensors = GroupedTensors(bias)
    problem = grouped.describe(*given, offs.shape[0], tensors, zero_tail=zero_tail)
    a, b, c, tensors = grouped.in_planned_form(*given, tensors)
    try:
        kernels_for(problem, kernel_name).run(problem, a, b, c, offs.contiguous(), tensors)
    except CompileForbidden as error:
        if kernel_name:
            raise
        if capturing(mat_a.device):  # torch would ask the device for the ends of groups
            raise not_ready() from None
        fallback.warn_fallback(str(error))
        return by_torch(mat_a, mat_b, offs, bias, dtype)
    return out


def kernels_for(problem: grouped.GroupedProblem, name: str) -> hooks.GroupedKernels:
    """Returns the module of the kernel `name`, or of the best one for "".

    Raises ValueError where the named kernel does not support the product.
    """
    if name != PORTABLE:
        reason = _no_hopper_reason(problem)
        if reason is None:
            return hooks.hopper_grouped.get()
        if name:
            raise ValueError(f"kernel {name!r}: {reason}")
    kernels = hooks.portable_grouped.get()
    if reason := kernels.unsupported(problem):
        raise ValueError(f"kernel {PORTABLE!r}: {reason}")
    return kernels


def _no_hopper_reason(problem: grouped.GroupedProblem) -> str | None:
    """Returns why `hopper.grouped` does not compute a product, or None if it does."""
    if problem.device.type != "cuda" or torch.version.cuda is None:
        return f"needs an NVIDIA GPU, but was given tensors on {problem.device}"
    capability = torch.cuda.get_device_capability(problem.device)
    if capability != (9, 0):
        return f"needs sm_90, but was given a GPU of sm_{capability[0]}{capability[1]}"
    try:
        return hooks.hopper_grouped.get().unsupported(problem)
    except ImportError as error:
        return str(error)


def _batch(
    mat_a: Tensor,
    mat_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    kernel_name: str,
) -> Tensor:
    """Computes the products of two batches, with the bias as a residual that repeats along rows."""
    if kernel_name == HOPPER:
        raise ValueError(
            f"kernel {HOPPER!r}: it multiplies groups that offs divides, but was given two "
            "batches, which hopper.gemm multiplies"
        )
    shape = (*mat_a.shape[:-1], mat_b.shape[-1])
    extra = None if bias is None else bias.unsqueeze(1).expand(shape)
    given: Any = mat_a, mat_b, None, None, extra, 1, 0, "", out_dtype, kernel_name
    result: Tensor = torch.ops.outblas.gemm.default(*given)
    return result


def _no_kernel_reason(mat_a: Tensor) -> str | None:
    """Returns why torch computes a call that names no kernel, or None if a kernel does."""
    if mat_a.device.type != "cuda":
        return "CPU tensors"
    if torch.version.cuda is None:
        return "grouped products on a GPU of another vendor than NVIDIA"
    try:
        hooks.portable_grouped.get()
    except ImportError as error:
        return str(error)
    return None


def by_torch(
    mat_a: Tensor, mat_b: Tensor, offs: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Computes the products group by group. The ends of groups are read by the host. What no group
    covers is zero.
    """
    form, shape, _ = grouped.check(mat_a, mat_b, offs, bias, dtype)
    out = torch.zeros(shape, dtype=dtype, device=mat_a.device)
    extent = mat_b.shape[-1] if form == "ragged_n" else mat_a.shape[0 if form == "ragged_m" else 1]
    begin = 0
    for group, end in enumerate(offs.tolist()):
        end = min(max(end, begin), extent)
        part = slice(begin, end)
        match form:
            case "ragged_m":
                a, b, target = mat_a[part], mat_b[group], out[part]
            case "ragged_n":
                a, b, target = mat_a[group], mat_b[:, part], out[:, part]
            case _:
                a, b, target = mat_a[:, part], mat_b[part], out[group]
        product = a.to(dtype) @ b.to(dtype)
        target.copy_(product if bias is None else product + bias[group])
        begin = end
    return out


@ops.fake("grouped_mm")
def _(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *rest: Any,
) -> Tensor:
    _, shape, dtype = grouped.check(mat_a, mat_b, offs, bias, out_dtype)
    return mat_a.new_empty(shape, dtype=dtype)


# ---- gradients
class _Gradients(torch.autograd.Function):
    """The autograd function of grouped products. `apply` takes all arguments of the operator."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        mat_a, mat_b, offs, _, _, kernel_name, _ = given
        ctx.save_for_backward(mat_a, mat_b, offs)
        ctx.set_materialize_grads(False)
        # On a GPU gradients take the best kernel, whichever computed the result.
        ctx.kernel_name = kernel_name if mat_a.is_cpu else ""
        with within_forward():
            result: Tensor = _operator(*given)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Each gradient is a grouped product itself. What belongs to no group gets zeros."""
        found: list[Tensor | None] = [None] * len(_ARGUMENTS)
        if grad is None:
            return tuple(found)
        mat_a, mat_b, offs = ctx.saved_tensors

        def product(a: Tensor, b: Tensor) -> Tensor:
            result: Tensor = _operator(a, b, offs, None, None, ctx.kernel_name, True)
            return result

        narrow = grad.to(mat_a.dtype)
        if ctx.needs_input_grad[_A]:
            found[_A] = product(narrow, mat_b.mT)
        if ctx.needs_input_grad[_B]:
            found[_B] = product(mat_a.mT, narrow)
        if ctx.needs_input_grad[_BIAS] and grad.dim() == 3:
            found[_BIAS] = grad.sum(1)  # of the result's dtype, as the bias is
        elif ctx.needs_input_grad[_BIAS]:
            ones = grad.new_ones(1, 1).expand(1, grad.shape[0])
            found[_BIAS] = product(ones, grad).squeeze(1)
        return tuple(found)


_operator = torch.ops.outblas.grouped_mm.default
_ARGUMENTS = {each.name: each.default for each in ARGUMENTS["grouped_mm"]}
_A, _B, _BIAS = (list(_ARGUMENTS).index(name) for name in ("mat_a", "mat_b", "bias"))


for _key in ("CPU", "CUDA"):
    library.impl("grouped_mm", _compute, _key)
library.impl("grouped_mm", autograd_kernel("grouped_mm", _ARGUMENTS, _Gradients, {}), "Autograd")

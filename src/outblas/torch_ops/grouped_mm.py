"""Grouped products, as `torch.nn.functional.grouped_mm`: the experts of a mixture, forward and
backward. The sizes of groups stay on the device.
"""

import contextlib
import os
from typing import Any, NamedTuple

import torch
from torch.overrides import handle_torch_function

from outblas.base.compat.torch_private import (
    any_autocast,
    autocast_off,
    has_override,
)
from outblas.base.compiling import CompileForbidden
from outblas.base.cuda_graphs import capturing, not_ready
from outblas.call import epilogue, fallback, grouped, hooks, invariance, problem, recorded_shapes
from outblas.call.epilogue import Activation
from outblas.call.grouped import NO_TENSORS, Checked, GroupedTensors
from outblas.call.sm_carveout import limited
from outblas.torch_ops import grouped_gradients, grouped_plans, ops
from outblas.torch_ops.flop_formulas import register_if_counted
from outblas.torch_ops.grouped_by_torch import by_torch
from outblas.torch_ops.schema import ARGUMENTS, fake, implement

Tensor = torch.Tensor

HOPPER, PORTABLE = "hopper.grouped", "portable"
KERNELS = (HOPPER, PORTABLE)
_TENSORS = (
    "offs",
    "bias",
    "residual",
    "aux",
    "a_index",
    "scatter_index",
    "scatter_weights",
    "counts",
)
_REGISTERED = grouped_gradients  # it registers itself with the operators on import
_autocast_off = autocast_off("cpu", "cuda")


def grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    aux: Tensor | None = None,
    a_index: Tensor | None = None,
    scatter_index: Tensor | None = None,
    scatter_weights: Tensor | None = None,
    counts: Tensor | None = None,
    kernel: str | None = None,
    sms: int | None = None,
) -> Tensor:
    """Multiply the matrices of each group, such as the tokens of each expert with its weights.

    ============  ============  ========================  ===================================
    mat_a         mat_b         result                    groups are divided along
    ============  ============  ========================  ===================================
    (M, K)        (G, K, N)     (M, N)                    M: rows of mat_a and of the result
    (G, M, K)     (K, N)        (M, N)                    N: columns of mat_b and of the result
    (M, K)        (K, N)        (G, M, N)                 K: a sum for each group
    (G, M, K)     (G, K, N)     (G, M, N)                 nothing; `offs` is None
    (G, C, K)     (G, K, N)     (G, C, N)                 C: the first `counts` rows of each group
    ============  ============  ========================  ===================================

    `offs` and `counts` are read on the device alone: a call waits for nothing, and a CUDA graph
    that captured it may be replayed with other groups. Groups may be empty, and need no alignment.
    Without a CUDA device torch multiplies group by group, with a `FallbackWarning`.

    With an activation and a residual the result is activation(product + bias) + residual, computed
    in float32 and rounded once. With ragged rows (the first line of the table) the rows of groups
    may be gathered from `mat_a` and scattered to the result, so that no permutation of tokens has
    to be stored. Row m of the groups then is mat_a[a_index[m]], and with x = product + bias of it:

        result[scatter_index[m]] = scatter_weights[m] activation(x) + residual[scatter_index[m]]

    All tensors but `aux` and indices have gradients of any order, also where the result has another
    dtype, but no forward-mode gradients. Autocast casts nothing, as with torch's function.

    Args:
        mat_a: bfloat16, float16 or float32, of any strides.
        mat_b: Of the same dtype, on the same device, of any strides.
        offs: int32, (G,): where each group ends in the divided dimension; not decreasing (which
            is checked on a CPU, and with OUTBLAS_CHECK_OFFS=1; else the result is undefined). G is
            at most 1024. What lies behind the last end belongs to no group: it is not read, and
            the result there is undefined. Ends below 0 count as 0, and those beyond the operand as
            its own end.
        bias: (G, N), of the dtype of the result, added to each group's rows; not where N is
            divided.
        out_dtype: The dtype of the result: that of the operands, or float32.
        activation: As in `matmul`: "relu", "gelu", "gelu_tanh" or "silu"; or a gated linear unit,
            "reglu", "geglu", "geglu_tanh" or "swiglu", whose gate is the first half of the columns
            of `mat_b`, so that the result has half as many; not where N is divided.
        residual: Added after the activation; exactly of the shape and dtype of the result.
        aux: The tensor to write product + bias to, before the activation: of the shape that the
            result has without one, and of its dtype. It shares no memory with another tensor. What
            belongs to no group is not written. No tensor of the call may need a gradient then.
        a_index: int32 or int64, (M,), with ragged rows: the row of `mat_a` that each row of the
            groups is. `offs` and the result count these M rows; `mat_a` has any number of them.
            Indices beyond it stand for its first or last row.
        scatter_index: int32 or int64, (M,), with ragged rows: the row of the result in which each
            row of the groups is stored. Its elements must be distinct. Rows of the result that it
            does not name are undefined, and for an index outside of the result nothing is stored.
        scatter_weights: (M,), float32 or of the dtype of the result, beside `scatter_index`: the
            factors of the rows of the groups, before the residual is added.
        counts: int32, (G,), where both operands have three dimensions: how many rows each group
            has, of the C for which it has room. Those below 0 count as 0, those above C as C. What
            lies in all other rows does not matter; the result is undefined there, and `aux` stays
            as it is. G is at most 1024. No `offs`, gather or scatter then, and no gradients.
        kernel: None for the best one; "hopper.grouped", for 16-bit operands on sm_90; or
            "portable", which also runs on CPU tensors, through Triton's interpreter.
        sms: The most SMs that the kernel may use, as in `matmul`.

    Returns:
        The result, contiguous.

    Raises:
        TypeError: An argument has the wrong type.
        OperandError: The operands do not fit together, carry forward-mode gradients, or `offs` is
            seen to decrease.
        ValueError: `activation` or `kernel` is unknown, or the kernel does not support the
            operands.
        RuntimeError: As in `matmul`, for CUDA graphs and OUTBLAS_STRICT.

    Example:
        Three experts, of which the second one has no token:

        >>> import torch, outblas
        >>> tokens, weights = torch.ones(6, 8), torch.ones(3, 8, 4)
        >>> offs = torch.tensor([2, 2, 6], dtype=torch.int32)
        >>> outblas.grouped_mm(tokens, weights, offs=offs).shape
        torch.Size([6, 4])
    """
    tensors = offs, bias, residual, aux, a_index, scatter_index, scatter_weights, counts
    run = _run if sms is None else limited(_run, sms, mat_a, mat_b)
    return run(mat_a, mat_b, tensors, out_dtype, activation, kernel)


def _run(
    mat_a: Tensor,
    mat_b: Tensor,
    tensors: tuple[Tensor | None, ...],
    out_dtype: torch.dtype | None,
    activation: Activation | None,
    kernel: str | None,
) -> Tensor:
    """Computes a call by its plan, by an operator, or by the override of a tensor type. `tensors`
    are those that `_TENSORS` names.
    """
    result: Tensor
    if not torch.compiler.is_dynamo_compiling():
        if has_override(mat_a, mat_b, *tensors):
            named: dict[str, Any] = dict(zip(_TENSORS, tensors, strict=True))
            named |= {"activation": activation, "out_dtype": out_dtype, "kernel": kernel}
            overriding = mat_a, mat_b, *tensors
            result = handle_torch_function(grouped_mm, overriding, mat_a, mat_b, **named)
            return result
        register_if_counted()
    name = problem.check_name("kernel", kernel, KERNELS, " or None", "None or ")
    function = problem.check_activation(activation) if activation is not None else ""
    grouped.check_types(mat_a, mat_b, out_dtype, _TENSORS, tensors)
    offs, bias, residual, aux, a_index, scatter_index, scatter_weights, counts = tensors
    if aux is not None:
        read = _after_operands(tensors, function, out_dtype, name)
        result = ops.grouped_gemm_to_aux(aux, mat_a, mat_b, *read)
        return result
    has_rows = not (a_index is scatter_index is scatter_weights is counts is None)
    beside = NO_TENSORS
    if has_rows or not (bias is residual is None):
        beside = GroupedTensors(*tensors[1:])
    options = function, out_dtype, name, False
    is_traced = torch.compiler.is_dynamo_compiling()
    if not is_traced:
        found = grouped_plans.run(mat_a, mat_b, offs, beside, options)
        if found is not None:
            return found
    if function or has_rows or residual is not None:
        read = _after_operands(tensors, function, out_dtype, name)
        result = ops.grouped_gemm(mat_a, mat_b, *read)
    else:
        result = ops.grouped_mm(mat_a, mat_b, offs, bias, out_dtype, name)
    if not is_traced:
        grouped_plans.remember_call(mat_a, mat_b, offs, beside, options)
    return result


def _after_operands(
    tensors: tuple[Tensor | None, ...], function: str, out_dtype: torch.dtype | None, name: str
) -> tuple[Any, ...]:
    """Returns the arguments of `grouped_gemm` after its operands. `tensors` are those that
    `_TENSORS` names.
    """
    return (*tensors[:3], *tensors[4:7], function, out_dtype, name, False, tensors[7])


# ---- the operators
# The arguments of `_compute_as_given`.
GroupedCall = tuple[
    Tensor, Tensor, Tensor | None, GroupedTensors, str, torch.dtype | None, str, bool, bool
]


def _plain(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kernel_name: str = "",
    zero_tail: bool = False,
) -> GroupedCall:
    tensors = NO_TENSORS if bias is None else GroupedTensors(bias)
    return mat_a, mat_b, offs, tensors, "", out_dtype, kernel_name, zero_tail, False


def _whole(aux: Tensor | None, given: tuple[Any, ...], *, new_aux: bool = False) -> GroupedCall:
    """Returns the call that the arguments of `grouped_gemm` describe."""
    given += _DEFAULTS[len(given) :]
    mat_a, mat_b, offs, bias, residual, *rows, activation, out_dtype, name, zero_tail, counts = (
        given
    )
    ops.check_activation(activation)
    a_index, scatter_index, weights = rows
    tensors = GroupedTensors(bias, residual, aux, a_index, scatter_index, weights, counts)
    return mat_a, mat_b, offs, tensors, activation, out_dtype, name, zero_tail, new_aux


_DEFAULTS = tuple(each.default for each in ARGUMENTS["grouped_gemm"])


def _grouped_mm(*given: Any) -> Tensor:
    return compute(_plain(*given))[0]


def _grouped_gemm(*given: Any) -> Tensor:
    return compute(_whole(None, given))[0]


def _grouped_gemm_aux(*given: Any) -> tuple[Tensor, Tensor]:
    out, aux = compute(_whole(None, given, new_aux=True))
    assert aux is not None, "`new_aux` asks for it"
    return out, aux


def _grouped_gemm_to_aux(aux: Tensor, *given: Any) -> Tensor:
    out, _ = compute(_whole(aux, given))
    ops.mark_written(aux)
    return out


def compute(call: GroupedCall) -> tuple[Tensor, Tensor | None]:
    """Returns the result and aux. Like torch's own operator this is not cast by autocast, and
    nothing in it may be.
    """
    if not any_autocast():
        return _compute_as_given(*call)
    with _autocast_off():
        return _compute_as_given(*call)


def _compute_as_given(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None,
    tensors: GroupedTensors,
    activation: str,
    out_dtype: torch.dtype | None,
    kernel_name: str,
    zero_tail: bool,
    new_aux: bool,
) -> tuple[Tensor, Tensor | None]:
    """`new_aux`: an aux is made."""
    own, options = tensors, (activation, out_dtype, kernel_name, zero_tail)
    plan = None
    if not new_aux and not invariance.wanted(None):
        plan = grouped_plans.known(mat_a, mat_b, offs, own, options)
    if plan is not None:
        with contextlib.suppress(CompileForbidden):  # torch's settings are others; it is met below
            return plan(mat_a, mat_b, offs, own), None
    checked = _check(mat_a, mat_b, offs, tensors, activation, out_dtype, zero_tail)
    if checked.form != "batch":
        is_scaled = tensors.scale_a is not None
        invariance.refuse_promise("scaled_grouped_mm" if is_scaled else "grouped_mm of groups")
    aux = tensors.aux
    if checked.form == "masked" and aux is not None and not grouped.is_one_matrix(aux):
        copied = aux.contiguous()
        whole = tensors._replace(aux=copied)
        out, _ = _compute_as_given(mat_a, mat_b, offs, whole, *options, new_aux)
        return out, aux.copy_(copied)
    if new_aux:
        aux = torch.empty(checked.product, dtype=checked.dtype, device=mat_a.device)
        tensors = tensors._replace(aux=aux)
    if checked.form == "batch":
        return _batch(mat_a, mat_b, tensors, activation, out_dtype, kernel_name), tensors.aux
    ends = grouped.ends(offs, tensors)
    out = torch.empty(checked.result, dtype=checked.dtype, device=mat_a.device)
    reason = _no_kernel_reason(mat_a) if not kernel_name else None
    if recorded_shapes.is_recording() and kernel_name != PORTABLE:
        recorded_shapes.note_groups(
            grouped.describe(
                *(checked.form, mat_a, mat_b, out, checked.groups),
                grouped.in_kernel_form(tensors, mat_a.shape[0]),
                activation=activation,
                zero_tail=zero_tail,
            )
        )
    if reason is not None:
        fallback.warn_fallback(reason)
        by_torch(checked, mat_a, mat_b, ends, out, tensors, activation)
        return out, tensors.aux
    if tensors is not NO_TENSORS:
        tensors = grouped.in_kernel_form(tensors, mat_a.shape[0])
    given = checked.form, mat_a, mat_b, out
    planned = grouped.describe(
        *given, checked.groups, tensors, activation=activation, zero_tail=zero_tail
    )
    a, b, c, moved = grouped.in_planned_form(*given, tensors)
    try:
        kernels = kernels_for(planned, kernel_name)
        kernels.run(planned, a, b, c, ends, moved)
    except CompileForbidden as error:
        if kernel_name:
            raise
        if capturing(mat_a.device):  # torch would ask the device for the ends of groups
            raise not_ready() from None
        fallback.warn_fallback(str(error))
        by_torch(checked, mat_a, mat_b, ends, out, tensors, activation)
        return out, tensors.aux
    if not new_aux:
        plan = grouped_plans.plan_of(planned, checked, kernels)
        grouped_plans.remember(mat_a, mat_b, offs, own, options, plan)
    return out, tensors.aux


def _check(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None,
    tensors: GroupedTensors,
    activation: str,
    out_dtype: torch.dtype | None,
    zero_tail: bool,
) -> Checked:
    """Checks the arguments of an operator. Raises OperandError."""
    checked = grouped.check(mat_a, mat_b, offs, tensors, activation, out_dtype, zero_tail=zero_tail)
    if tensors.aux is not None:
        others = tensors._replace(aux=None)._asdict()
        problem.check_overlap(tensors.aux, "aux", mat_a=mat_a, mat_b=mat_b, offs=offs, **others)
    return checked


class _InOrder(NamedTuple):
    """Kernels that look at the ends of groups first. Each `run` waits for the device."""

    kernels: hooks.GroupedKernels

    def unsupported(self, problem: grouped.GroupedProblem) -> str | None:
        return self.kernels.unsupported(problem)

    def run(
        self,
        problem: grouped.GroupedProblem,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        offs: Tensor,
        tensors: GroupedTensors,
    ) -> None:
        """Raises OperandError where ends decrease."""
        are_counts = problem.capacity > 0 or not problem.M
        if not (are_counts or capturing(offs.device)):
            grouped.check_order(offs.tolist())
        self.kernels.run(problem, a, b, out, offs, tensors)


def kernels_for(problem: grouped.GroupedProblem, name: str) -> hooks.GroupedKernels:
    """Returns the module of the kernel `name`, or of the best one for "". On a CPU, and with
    OUTBLAS_CHECK_OFFS=1, it refuses ends that decrease.

    Raises ValueError where the named kernel does not support the product.
    """
    kernels = _kernels_for(problem, name)
    is_checked = problem.device.type == "cpu" or os.environ.get("OUTBLAS_CHECK_OFFS") == "1"
    return _InOrder(kernels) if is_checked else kernels


def _kernels_for(problem: grouped.GroupedProblem, name: str) -> hooks.GroupedKernels:
    if name != PORTABLE:
        reason = _no_hopper_reason(problem)
        if reason is None:
            hopper: hooks.GroupedKernels = hooks.hopper_grouped.get()
            return hopper
        if name:
            raise ValueError(f"kernel {name!r}: {reason}")
    kernels: hooks.GroupedKernels = hooks.portable_grouped.get()
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
        reason: str | None = hooks.hopper_grouped.get().unsupported(problem)
    except ImportError as error:
        return str(error)
    return reason


def _batch(
    mat_a: Tensor,
    mat_b: Tensor,
    tensors: GroupedTensors,
    activation: str,
    out_dtype: torch.dtype | None,
    kernel_name: str,
) -> Tensor:
    """Computes the products of two batches. A bias alone is a residual that repeats along rows."""
    if kernel_name == HOPPER:
        raise ValueError(
            f"kernel {HOPPER!r}: it multiplies groups that offs divides, but was given two "
            "batches, which hopper.gemm multiplies"
        )
    bias, residual, aux, *_ = tensors
    if bias is not None:
        bias = bias.unsqueeze(1)
        if not activation and residual is None and aux is None:
            repeated = bias.expand(*mat_a.shape[:-1], mat_b.shape[-1])
            bias, residual = None, repeated
    given: Any = mat_a, mat_b, None, bias, residual, 1, 0, activation, out_dtype, kernel_name
    if aux is None:
        result: Tensor = ops.gemm(*given)
        return result
    shape = epilogue.check_columns(activation, aux.shape)
    result = torch.empty(shape, dtype=aux.dtype, device=aux.device)
    ops.gemm_out(result, aux, *given)
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


# ---- registration
for _key in ("CPU", "CUDA"):
    for _function in (_grouped_mm, _grouped_gemm, _grouped_gemm_aux, _grouped_gemm_to_aux):
        implement(_function.__name__[1:], _key, _function)
for _key in ("Negative", "Conjugate"):
    implement("grouped_gemm_to_aux", _key, ops.resolving("grouped_gemm_to_aux"))


def fake_results(call: GroupedCall) -> tuple[Tensor, Tensor]:
    """Returns new tensors like the result and like x."""
    mat_a, *_, zero_tail, _ = call
    checked = _check(*call[:6], zero_tail)
    return (
        mat_a.new_empty(checked.result, dtype=checked.dtype),
        mat_a.new_empty(checked.product, dtype=checked.dtype),
    )


@fake("grouped_mm")
def _(*given: Any) -> Tensor:
    return fake_results(_plain(*given))[0]


@fake("grouped_gemm")
def _(*given: Any) -> Tensor:
    return fake_results(_whole(None, given))[0]


@fake("grouped_gemm_aux")
def _(*given: Any) -> tuple[Tensor, Tensor]:
    return fake_results(_whole(None, given))


@fake("grouped_gemm_to_aux")
def _(aux: Tensor, *given: Any) -> Tensor:
    result, _ = fake_results(_whole(aux, given))
    ops.mark_written(aux)
    return result

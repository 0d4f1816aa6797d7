"""Gradients of the operators, computed by the operators, so that a backward pass can itself be
differentiated.

    g = gradient of x = alpha · A B + beta · C + bias, through the activation dA = alpha · g Bᵀ
    dB = alpha · Aᵀ g    dC = beta · g    dbias = g    dresidual = gradient of the output

Each gradient is summed over the dimensions along which its operand was broadcast. Transposed
operands are views. Where A or B is stored by columns, as the transposed weight of a linear layer
is, its gradient is computed transposed, dB = (gᵀ A)ᵀ. It then has the operand's layout, and
autograd keeps it as `.grad` without a copy.

Products of a backward pass run on the best kernel known, whatever kernel the forward pass named,
and are batch-invariant if the forward pass was. (A batch-invariant product on the CPU must name its
kernel; the gradients' products name the portable one.) If 16-bit operands have an fp32 product, g
is rounded to 16 bits for dA and dB, which are 16-bit themselves; bias and residual get fp32
gradients.

These formulas hold for real numbers. Where complex operands need gradients, and where forward-mode
gradients are active, torch computes the call under its own autograd.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from outblas.base.compat.torch_private import (
    below_autograd,
    forward_levels,
    from_below,
    increment_version,
    version,
)
from outblas.call import fallback, invariance
from outblas.call.dispatch import Plan
from outblas.call.epilogue import EpilogueArgs, apply
from outblas.call.errors import OperandError
from outblas.call.problem import dtype_name
from outblas.call.sizes import is_one
from outblas.torch_ops import eager, native, ops
from outblas.torch_ops.activation_backward import activation_backward
from outblas.torch_ops.autograd_levels import (
    direct_apply,
    has_tangent,
    recorder,
    requires_grad,
    unobserved,
    unseen_by_types,
    within_forward,
)
from outblas.torch_ops.call import OperatorChoice, is_plain_scalar
from outblas.torch_ops.schema import ARGUMENTS, implement

Tensor = torch.Tensor


class _Saved(NamedTuple):
    """Everything that the backward pass of a product needs besides tensors.

    Shapes are None where a tensor is missing, strides are empty where an operand needs no gradient.
    `dtype` is that of A.
    """

    shape_a: Sequence[int]
    shape_b: Sequence[int]
    shape_c: Sequence[int] | None
    shape_bias: Sequence[int] | None
    shape_residual: Sequence[int] | None
    strides_a: Sequence[int]
    strides_b: Sequence[int]
    alpha: Any
    beta: Any
    activation: str
    dtype: torch.dtype
    choice: OperatorChoice


# Every forward pass creates one of each; this skips the Python-level __new__ of a NamedTuple.
_new_tuple = tuple.__new__


class MatmulFunction(torch.autograd.Function):
    """The autograd function of all products.

    `apply` takes a plan, or None to call the operators; the tensors of `ops.gemm`; `arguments`, the
    other arguments of `ops.gemm`; and `aux`, which says whether x is requested, or gives its shape
    where the plan writes it. It returns the output, and also x if there is one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan | None,
        a: Tensor,
        b: Tensor,
        c: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        arguments: tuple[Any, ...],
        aux: bool | Sequence[int] | None,
    ) -> Any:
        alpha, beta, activation, _, kernel, _, tune, batch_invariant = arguments
        _, needs_a, needs_b, needs_c, needs_bias, *_ = ctx.needs_input_grad
        if plan is not None:
            x = None if aux is None else a.new_empty(aux)
            bare = x is None and bias is None and residual is None
            epilogue = () if bare else (bias, residual, x)
            y = plan(a, b, c, None, alpha, beta, *epilogue)
        else:
            x_needed = needs_a or needs_b or needs_c or needs_bias
            with within_forward():
                found = _by_operator((a, b, c, bias, residual), arguments, bool(aux), x_needed)
            y, x = from_below(found)
            if x is not None and not x_needed:
                ctx.mark_non_differentiable(x)
        ctx.save_for_backward(
            a if needs_b else None, b if needs_a else None, x if activation else None
        )
        ctx.set_materialize_grads(False)
        # Read the caller's context now: autograd's threads have another one.
        if batch_invariant is None and invariance.flag.requested():
            batch_invariant = True
        # A batch-invariant product on the CPU names its kernel, and products of its gradients must
        # name theirs too.
        named = "portable" if batch_invariant and kernel and a.is_cpu else ""
        saved = (
            a.shape,
            b.shape,
            None if c is None else c.shape,
            None if bias is None else bias.shape,
            None if residual is None else residual.shape,
            a.stride() if needs_a else (),
            b.stride() if needs_b else (),
            alpha,
            beta,
            activation,
            a.dtype,
            _new_tuple(OperatorChoice, (named, "", tune, batch_invariant)),
        )
        ctx.saved = _new_tuple(_Saved, saved)
        return y if x is None else (y, x)

    @staticmethod
    @unseen_by_types
    def backward(
        ctx: Any, g_out: Tensor | None, g: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        _, needs_a, needs_b, needs_c, needs_bias, needs_residual, *_ = ctx.needs_input_grad
        a, b, x = ctx.saved_tensors
        saved: _Saved = ctx.saved
        d_a = d_b = d_c = d_bias = d_residual = None
        if g_out is not None:
            if needs_residual and saved.shape_residual is not None:
                d_residual = summed(g_out, saved.shape_residual)
            g = gradient_of_x(g_out, g, x, saved.activation)
        if g is not None:
            if needs_bias and saved.shape_bias is not None:
                d_bias = summed(g, saved.shape_bias)
            if needs_c and saved.shape_c is not None:
                d_c = summed(g if saved.beta == 1 else g * saved.beta, saved.shape_c)
                d_c = d_c.to(saved.dtype)
            if g.dtype is not saved.dtype:
                g = g.to(saved.dtype)
            if len(saved.shape_b) == 1:
                g = g.unsqueeze(-1)
            if len(saved.shape_a) == 1:
                g = g.unsqueeze(-2)
            if needs_a:
                d_a = _gradient_of_a(g, b, saved)
            if needs_b:
                d_b = _gradient_of_b(g, a, saved)
        return None, d_a, d_b, d_c, d_bias, d_residual, None, None


def _by_operator(
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
    arguments: tuple[Any, ...],
    aux: bool,
    x_needed: bool,
) -> tuple[Tensor, Tensor | None]:
    """Returns the output of the simplest suitable operator, and x where it is requested or a
    gradient needs it.
    """
    a, b, c, bias, residual = tensors
    alpha, beta, activation, out_dtype, *choice = arguments
    if aux or (activation and x_needed):
        y, x = ops.gemm_aux(*tensors, *arguments)
        return y, x
    if activation or bias is not None or residual is not None:
        return ops.gemm(*tensors, *arguments), None
    if c is not None:
        return ops.addmm(c, a, b, alpha, beta, *choice), None
    return ops.matmul(a, b, out_dtype, *choice), None


# ---- gradients
def gradient_of_x(
    g_out: Tensor, g: Tensor | None, x: Tensor | None, activation: str
) -> Tensor | None:
    """Returns the gradient of x: the gradient through the activation plus `g`, the gradient from
    other uses of x.
    """
    if not activation:
        return g_out if g is None else g + g_out
    if x is None:
        return g
    direct = type(x) is Tensor and unobserved()
    through: Tensor = (activation_backward if direct else ops.activation_backward)(
        g_out, x, activation
    )
    return through if g is None else g + through


def _by_columns(strides: Sequence[int]) -> bool:
    """Returns whether the columns of matrices are contiguous and the rows are not.

    It does not compare symbolic strides, because a compiled program would need a guard for that.
    """
    if len(strides) < 2:
        return False
    row, column = strides[-2:]
    return type(row) is int and row == 1 and (type(column) is not int or column > 1)


def _gradient_of_a(g: Tensor, b: Tensor, saved: _Saved) -> Tensor:
    """Computes alpha · g Bᵀ, transposed where A is stored by columns.

    If the operands have 16 bits and all batches share A, the batch becomes part of the sum: one
    product, which accumulates in fp32. For wider dtypes the products of the batch are computed
    separately and added afterwards, as torch does; their sums are shorter, so their errors are
    smaller.
    """
    shape, columns = saved.shape_a, _by_columns(saved.strides_a)
    if b.dim() == 1:
        b = b.unsqueeze(-1)
    shared = b.element_size() == 2 and b.dim() > 2 and all(map(is_one, shape[:-2]))
    if shared:
        b, g = (
            t.reshape(t.shape[0], math.prod(t.shape[1:]))
            for t in (b.movedim(-2, 0), g.movedim(-2, 0))
        )
    d_a = _product(b, g.mT, saved) if columns else _product(g, b.mT, saved)
    stored = _transposed(shape) if columns else shape
    if len(shape) == 1:
        d_a = d_a.squeeze(-2)
    d_a = d_a.reshape(stored) if shared else summed(d_a, stored)
    return d_a.mT if columns else d_a


def _gradient_of_b(g: Tensor, a: Tensor, saved: _Saved) -> Tensor:
    """Computes alpha · Aᵀ g, transposed where B is stored by columns.

    If all batches share B, the batch becomes rows: one product, which accumulates in fp32.
    """
    shape, columns = saved.shape_b, _by_columns(saved.strides_b)
    if a.dim() == 1:
        a = a.unsqueeze(0)
    batched = not all(map(is_one, shape[:-2]))
    if g.dim() > 2 and not batched:
        a, g = as_rows(a), as_rows(g)
    d_b = _product(g.mT, a, saved) if columns else _product(a.mT, g, saved)
    stored = _transposed(shape) if columns else shape
    if batched:
        d_b = summed(d_b, stored)
    elif len(shape) != 2:
        d_b = d_b.reshape(stored)
    return d_b.mT if columns else d_b


def _transposed(shape: Sequence[int]) -> Sequence[int]:
    """Returns the shape of the transposed matrices."""
    return (*shape[:-2], shape[-1], shape[-2])


def as_rows(t: Tensor) -> Tensor:
    """Returns a batch of matrices as one matrix. `flatten` would do so too, but not for the batches
    of gradients that `torch.autograd.grad(is_grads_batched=True)` passes on.
    """
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def summed(t: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns the gradient of a tensor of `shape` that was broadcast to t's shape."""
    lead = t.dim() - len(shape)
    repeated = [i for i, n in enumerate(shape, lead) if is_one(n) and not is_one(t.shape[i])]
    dims = (*range(lead), *repeated)
    return t.sum(dims, keepdim=True).reshape(shape) if dims else t


def _product(a: Tensor, b: Tensor, saved: _Saved) -> Tensor:
    """Returns alpha · A B, differentiable."""
    if saved.alpha != 1:
        scaled: Tensor = ops.addmm(a.new_empty(()), a, b, saved.alpha, 0, *saved.choice)
        return scaled
    return product(a, b, saved.choice)


def product(a: Tensor, b: Tensor, choice: OperatorChoice) -> Tensor:
    """Returns A B, differentiable."""
    result = None
    if not (choice.kernel or choice.tune) and not torch.compiler.is_compiling():
        result = eager.run(a, b, None, None, 1, 0, choice.batch_invariant)
    return ops.matmul(a, b, None, *choice) if result is None else result


def _native_product(a: Tensor, b: Tensor, batch_invariant: bool) -> Tensor:
    return product(a, b, OperatorChoice(batch_invariant=batch_invariant))


native.configure(_native_product)


# ---- registration with autograd
# Calls without gradients, for example those of compiled programs, go from here straight to their
# plans: the rest of torch's dispatcher would cost as much again.
_apply = direct_apply(MatmulFunction)
_record = recorder(MatmulFunction)
_NO_EPILOGUE = EpilogueArgs()


def recorded_run(
    plan: Plan,
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    alpha: Any,
    beta: Any,
    batch_invariant: bool,
    extra: EpilogueArgs | None,
    x_shape: tuple[int, ...] | None,
) -> Tensor:
    """Runs the plan of a call that needs gradients."""
    activation, bias, residual, _ = extra or _NO_EPILOGUE
    arguments = alpha, beta, activation, None, "", "", "", batch_invariant
    found = _apply(plan, a, b, c, bias, residual, arguments, x_shape)
    result: Tensor = found if x_shape is None else found[0]
    return result


eager.register_recorded_run(recorded_run)


def _split_gemm(*given: Any) -> tuple[Any, ...]:
    given = ops.completed(given)
    return *given[:5], given[5:]


# Splits an operator's arguments into a, b, c, bias, residual and the other arguments of `ops.gemm`.
_SPLIT: dict[str, Callable[..., tuple[Any, ...]]] = {
    "matmul": lambda a, b, dtype=None, *choice: _split_gemm(
        a, b, None, None, None, 1, 0, "", dtype, *choice
    ),
    "addmm": lambda c, a, b, alpha=1, beta=1, *choice: _split_gemm(
        a, b, c, None, None, alpha, beta, "", None, *choice
    ),
    "gemm": _split_gemm,
    "gemm_aux": _split_gemm,
}


# ---- warm calls of operators
def _warm_matmul(a: Tensor, b: Tensor) -> Tensor | None:
    return eager.run(a, b, None, None, 1, 0, None)


def _warm_addmm(c: Tensor, a: Tensor, b: Tensor, alpha: Any = 1, beta: Any = 1) -> Tensor | None:
    if not (is_plain_scalar(alpha) and is_plain_scalar(beta)):
        return None
    return eager.run(a, b, c, None, alpha, beta, None)


def _warm_gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: Any = 1,
    beta: Any = 1,
    activation: str = "",
) -> Tensor | None:
    if c is None:
        if alpha != 1:
            return None
        beta = 0
    elif not (is_plain_scalar(alpha) and is_plain_scalar(beta)):
        return None
    return eager.run(a, b, c, None, alpha, beta, None, ops.epilogue(activation, bias, residual))


def _not_warm(*given: Any) -> None:
    """Runs no call by its plan."""


# What runs an operator's call by its plan, or returns None, and the most arguments that it takes:
# all before the output's dtype and the choice of a kernel.
_WARM: dict[str, tuple[Callable[..., Tensor | None], int]] = {
    "matmul": (_warm_matmul, 2),
    "addmm": (_warm_addmm, 5),
    "gemm": (_warm_gemm, 8),
}


def _below(name: str) -> Callable[..., Tensor]:
    """Returns the kernel of an operator at the key of a device, which tensors of inference mode
    reach without autograd.
    """
    (warm, most), compute = _WARM[name], ops.KERNELS[name]

    def run(*given: Any) -> Tensor:
        # With gradients on, a tensor may require one that autograd has recorded already.
        if len(given) <= most and not torch.is_grad_enabled() and unobserved():
            done = warm(*given)
            if done is not None:
                return done
        result: Tensor = compute(*given)
        return result

    return run


def _autograd(name: str) -> Callable[..., Any]:
    """Returns the Autograd kernel of an operator."""
    operator, split, aux = getattr(ops, name), _SPLIT[name], name == "gemm_aux" or None
    warm, most = _WARM.get(name, (_not_warm, -1))

    def run(*given: Any) -> Any:
        if len(given) <= most and unobserved():
            done = warm(*given)
            if done is not None:
                return done
        a, b, c, bias, residual, arguments = split(*given)
        if forward_levels._current_level >= 0 and has_tangent(a, b, c, bias, residual):
            tensors = a, b, c, bias, residual
            return _by_torch("forward-mode gradients", tensors, arguments, aux)
        if requires_grad(a, b, c, bias, residual):
            if a.is_complex():
                cause = f"gradients of {dtype_name(a.dtype)} tensors"
                return _by_torch(cause, (a, b, c, bias, residual), arguments, aux)
            found = _record(None, a, b, c, bias, residual, arguments, aux)
            return found[0] if isinstance(found, tuple) and not aux else found
        with below_autograd():
            found = operator(*given)
        return from_below(found)

    return run


def _by_torch(
    cause: str, tensors: Sequence[Any], arguments: tuple[Any, ...], aux: bool | None
) -> Any:
    """Runs a call by torch functions, each of which autograd records."""
    a, b, c, bias, residual = tensors
    alpha, beta, activation, out_dtype, kernel, _, _, batch_invariant = arguments
    ops.check(a, b, c, bias, residual, *arguments)
    if kernel:
        raise ValueError(f"kernel {kernel!r} does not support {cause}")
    if invariance.wanted(batch_invariant):
        raise invariance.unsupported(cause)
    fallback.warn_fallback(cause)
    x = fallback.fused(a, b, c, None, alpha, beta, out_dtype, EpilogueArgs(bias=bias))
    y = apply(x, activation, residual)
    return (x.clone() if y is x else y, x) if aux else y


def without_gradients(name: str, shown: str = "out") -> Callable[..., Any]:
    """Returns the Autograd kernel of an operator that writes to its arguments, which has no
    gradients. `shown`: the argument that messages name.
    """
    operator = getattr(torch.ops.outblas, name).default
    places = [i for i, each in enumerate(ARGUMENTS[name]) if each.is_written]

    def run(*given: Any) -> Any:
        tensors = [t for t in given if isinstance(t, Tensor)]
        if requires_grad(*tensors):
            raise OperandError(
                f"{shown} is given with inputs that need gradients, expected no {shown} (or "
                "torch.no_grad())"
            )
        if has_tangent(*tensors):
            raise OperandError(
                f"{shown} is given with inputs that carry forward-mode gradients, expected no "
                f"{shown}"
            )
        written = [t for t in (given[i] for i in places) if t is not None and not t.is_inference()]
        versions = [version(t) for t in written]
        with below_autograd():
            found = operator(*given)
        for t, before in zip(written, versions, strict=True):
            if version(t) == before:  # a subclass: the operator wrote to the tensor that it wraps
                increment_version((t,))
        return from_below(found)

    return run


for _name in _WARM:
    for _key in ("CPU", "CUDA"):
        implement(_name, _key, _below(_name))
for _name in _SPLIT:
    implement(_name, "Autograd", _autograd(_name))
for _name in ("matmul_out", "addmm_out", "gemm_out"):
    implement(_name, "Autograd", without_gradients(_name))

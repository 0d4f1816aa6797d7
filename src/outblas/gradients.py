"""Gradients of the operators, by operators: a backward pass has a backward pass of its own.

    g = gradient of x = alpha · A B + beta · C + bias, through the activation
    dA = alpha · g Bᵀ    dB = alpha · Aᵀ g    dC = beta · g    dbias = g    dresidual = gradient of the output

each summed over the dimensions along which its operand was repeated. Transposed operands are views. Products run on the
best kernel known, whatever kernel the forward pass named, batch-invariant ones where it was. Where 16-bit operands have
a fp32 product, g is rounded to 16 bits for dA and dB, which are 16-bit themselves; bias and residual get fp32 ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function

from . import eager, fallback, ops
from .dispatch import Plan
from .epilogue import ACTIVATIONS, FUNCTIONS, GATED, Extra, halves
from .invariance import asked

Tensor = torch.Tensor
_aten = torch.ops.aten
_BELOW = torch._C._AutoDispatchBelowAutograd
_operators = torch.ops.outblas
_modes = torch._C._len_torch_dispatch_stack


class Product(torch.autograd.Function):
    """All products. `apply` takes a plan, or None to go by the operators; the tensors of `ops.gemm`; how: what else it
    takes; and whether x is wanted too. It returns the output; and x, where it is wanted or its derivative will be."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan | None,
        a: Tensor,
        b: Tensor,
        c: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        how: tuple[Any, ...],
        aux: bool | Sequence[int] | None,
    ) -> Any:
        alpha, beta, activation, out_dtype, kernel, config, tune, batch_invariant = how
        _, needs_a, needs_b, needs_c, needs_bias, *_ = ctx.needs_input_grad
        x = None
        if plan is not None:
            if aux is not None:
                x = a.new_empty(aux)
                y = plan(a, b, c, None, alpha, beta, bias, residual, x)
            elif bias is not None or residual is not None:
                y = plan(a, b, c, None, alpha, beta, bias, residual, None)
            else:
                y = plan(a, b, c, None, alpha, beta)
        else:
            choice = kernel, config, tune, batch_invariant
            # Gradients are off here, but not on the other levels of torch.func's transforms.
            with torch.set_grad_enabled(torch._C._functorch.maybe_current_level() is not None), _BELOW():
                if aux or (activation and (needs_a or needs_b or needs_c or needs_bias)):
                    y, x = ops.gemm_aux(a, b, c, bias, residual, *how)
                elif activation or bias is not None or residual is not None or (c is not None and out_dtype):
                    y = ops.gemm(a, b, c, bias, residual, *how)
                elif c is not None:
                    y = ops.addmm(c, a, b, alpha, beta, *choice)
                else:
                    y = ops.matmul(a, b, out_dtype, *choice)
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None, x if activation else None)
        ctx.set_materialize_grads(False)
        if batch_invariant is None and asked():  # by the caller's context: autograd's threads have another
            batch_invariant = True
        shapes = a.shape, b.shape, c if c is None else c.shape, bias if bias is None else bias.shape
        ctx.given = *shapes, residual if residual is None else residual.shape, alpha, beta, activation, a.dtype
        ctx.how = tune, batch_invariant
        return y if x is None else (y, x)

    @staticmethod
    def backward(ctx: Any, g_out: Tensor | None, g: Tensor | None = None) -> tuple[Tensor | None, ...]:
        _, needs_a, needs_b, needs_c, needs_bias, needs_residual, *_ = ctx.needs_input_grad
        a, b, x = ctx.saved_tensors
        shape_a, shape_b, shape_c, shape_bias, shape_residual, alpha, beta, activation, dtype = ctx.given
        d_a = d_b = d_c = d_bias = d_residual = None
        if g_out is not None:
            if needs_residual:
                d_residual = _summed(g_out, shape_residual)
            if not activation:
                g = g_out if g is None else g + g_out
            elif x is not None:
                short = type(x) is Tensor and _unwatched()
                through = (_activation_backward if short else ops.activation_backward)(g_out, x, activation)
                g = through if g is None else g + through
        if g is not None:
            if needs_bias:
                d_bias = _summed(g, shape_bias)
            if needs_c:
                d_c = _summed(g if beta == 1 else g * beta, shape_c).to(dtype)
            if g.dtype is not dtype:
                g = g.to(dtype)
            if len(shape_b) == 1:
                g = g.unsqueeze(-1)
            if len(shape_a) == 1:
                g = g.unsqueeze(-2)
            if needs_a:
                d_a = _of_a(g, b, shape_a, alpha, ctx.how)
            if needs_b:
                d_b = _of_b(g, a, shape_b, alpha, ctx.how)
        return None, d_a, d_b, d_c, d_bias, d_residual, None, None


def _of_a(g: Tensor, b: Tensor, shape: Sequence[int], alpha: Any, how: tuple[Any, ...]) -> Tensor:
    found = _product(g, b.unsqueeze(0) if b.dim() == 1 else b.mT, alpha, how)
    return _summed(found.squeeze(-2) if len(shape) == 1 else found, shape)


def _of_b(g: Tensor, a: Tensor, shape: Sequence[int], alpha: Any, how: tuple[Any, ...]) -> Tensor:
    """The batch of a shared B becomes rows: one product, whose sums stay in fp32."""
    if a.dim() == 1:
        a = a.unsqueeze(0)
    if len(shape) > 2 and any(size != 1 for size in shape[:-2]):
        return _summed(_product(a.mT, g, alpha, how), shape)
    if g.dim() > 2:
        a, g = a.flatten(0, -2), g.flatten(0, -2)
    found = _product(a.t(), g, alpha, how)
    return found if len(shape) == 2 else found.reshape(shape)


def _summed(t: Tensor, shape: Sequence[int]) -> Tensor:
    if t.shape == shape:
        return t
    lead = t.dim() - len(shape)
    return t.sum(tuple(range(lead))) if t.shape[lead:] == shape else t.sum_to_size(shape)


def _product(a: Tensor, b: Tensor, alpha: Any, how: tuple[Any, ...]) -> Tensor:
    """alpha · A B, differentiable."""
    tune, batch_invariant = how
    if alpha != 1:
        scaled: Tensor = ops.addmm(a.new_empty(()), a, b, alpha, 0, "", "", tune, batch_invariant)
        return scaled
    if not tune and not torch.compiler.is_compiling():
        done = eager.run(a, b, None, None, 1, 0, batch_invariant)
        if done is not None:
            return done
    found: Tensor = ops.matmul(a, b, None, "", "", tune, batch_invariant)
    return found


# ---- the activation's derivative ----
def formula(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """As the operator, by torch: differentiable. 16-bit gradients are rounded once."""
    dtype = x.dtype
    if dtype in (torch.float16, torch.bfloat16):
        grad, x = grad.float(), x.float()
    if activation not in GATED:
        return _DERIVATIVES[activation](grad, x).to(dtype)
    gate, other = x.chunk(2, -1)
    function = GATED[activation]
    return torch.cat((_DERIVATIVES[function](grad * other, gate), grad * FUNCTIONS[function](gate)), -1).to(dtype)


_DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda grad, x: _aten.threshold_backward(grad, x, 0),
    "gelu": lambda grad, x: _aten.gelu_backward(grad, x),
    "gelu_tanh": lambda grad, x: _aten.gelu_backward(grad, x, approximate="tanh"),
    "silu": lambda grad, x: _silu_backward(grad, x) if torch.is_grad_enabled() else _aten.silu_backward(grad, x),
}


def _silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """aten's has no derivative."""
    s = torch.sigmoid(x)
    return grad * s * (1 + x * (1 - s))


def _check_derivative(grad: Tensor, x: Tensor, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    shape = (*x.shape[:-1], x.shape[-1] // halves(activation)) if x.dim() else x.shape
    if tuple(grad.shape) != tuple(shape) or grad.dtype != x.dtype or grad.device != x.device:
        given, expected = (grad.shape, grad.dtype, grad.device), (shape, x.dtype, x.device)
        for name, have, want in zip(("shape", "dtype", "device"), given, expected, strict=True):
            if have != want:
                raise ValueError(f"grad.{name} is {have}, expected {want}, as x has for {activation!r}")


def _by_torch(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    _check_derivative(grad, x, activation)
    return formula(grad, x, activation).contiguous()


def _by_kernel(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    _check_derivative(grad, x, activation)
    if x.dtype in (torch.float16, torch.bfloat16, torch.float32) and x.numel():
        try:
            from .kernels import activation as kernel
        except ImportError as error:
            fallback.complain(str(error))
        else:
            found: Tensor = kernel.backward(grad, x, activation)
            return found
    return formula(grad, x, activation).contiguous()


# ---- what autograd does with each operator ----
# Calls without gradients, of compiled programs say, go from here to their plans: the rest of torch's dispatcher costs
# as much again.
_apply: Callable[..., Any] = super(torch.autograd.Function, Product).apply


def _record(*given: Any) -> Any:
    """Where torch.func differentiates, of one level of its transforms: the dispatcher sees to the others."""
    if torch._C._functorch.maybe_current_level() is None:
        return _apply(*given)
    with enable_single_level_autograd_function():
        return _apply(*given)


def recorded(
    plan: Plan,
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    alpha: Any,
    beta: Any,
    batch_invariant: bool,
    extra: Extra | None,
    x: Sequence[int] | None,
) -> Tensor:
    """A call that has a plan, and needs gradients. `x`: the shape of x, where the plan writes it."""
    activation, bias, residual, _ = extra or _NOTHING
    how = alpha, beta, activation, None, "", "", "", batch_invariant
    found = _apply(plan, a, b, c, bias, residual, how, x)
    result: Tensor = found if x is None else found[0]
    return result


_NOTHING = Extra()


def _grows(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def _unwatched() -> bool:
    """Whether nobody behind autograd sees operators: `eager`'s guards are of tensors that have not come that far."""
    return _modes() == 0 and torch._C._get_tracing_state() is None and torch._C._functorch.maybe_current_level() is None


def _matmul(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, *how: Any) -> Any:
    if _grows(a, b):
        return _record(None, a, b, None, None, None, (1, 0, "", out_dtype, *how, *_HOW[len(how) :]), None)
    done = eager.run(a, b, None, None, 1, 0, None) if out_dtype is None and not how and _unwatched() else None
    if done is not None:
        return done
    with _BELOW():
        return _operators.matmul.default(a, b, out_dtype, *how)


def _addmm(c: Tensor, a: Tensor, b: Tensor, alpha: Any = 1, beta: Any = 1, *how: Any) -> Any:
    if _grows(a, b, c):
        return _record(None, a, b, c, None, None, (alpha, beta, "", None, *how, *_HOW[len(how) :]), None)
    done = eager.run(a, b, c, None, alpha, beta, None) if not how and _unwatched() else None
    if done is not None:
        return done
    with _BELOW():
        return _operators.addmm.default(c, a, b, alpha, beta, *how)


def _split(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `ops.gemm` as `Product` takes them."""
    given += _GEMM[len(given) :]
    return *given[:5], given[5:]


def _gemm(*given: Any) -> Any:
    if _grows(*given[:5]):
        found = _record(None, *_split(given), None)
        return found[0] if isinstance(found, tuple) else found
    if len(given) < 9 and _unwatched():  # out_dtype and all behind it are left to us
        a, b, c, bias, residual, alpha, beta, activation = given + _GEMM[len(given) : 8]
        done = None
        if c is not None or alpha == 1:
            beta = 0 if c is None else beta
            done = eager.run(a, b, c, None, alpha, beta, None, Extra(activation, bias, residual))
        if done is not None:
            return done
    with _BELOW():
        return _operators.gemm.default(*given)


def _gemm_aux(*given: Any) -> Any:
    if _grows(*given[:5]):
        return _record(None, *_split(given), True)
    with _BELOW():
        return _operators.gemm_aux.default(*given)


def _activation_backward(grad: Tensor, x: Tensor, activation: str) -> Any:
    if _grows(grad, x):
        _check_derivative(grad, x, activation)
        return formula(grad, x, activation)
    if type(x) is Tensor and _unwatched() and (x.is_cuda or x.is_cpu):
        return (_by_kernel if x.is_cuda else _by_torch)(grad, x, activation)
    with _BELOW():
        return _operators.activation_backward.default(grad, x, activation)


def _without(operator: Any) -> Callable[..., None]:
    """An operator that writes to its arguments has no gradients."""

    def run(*given: Any) -> None:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*given):
            raise ValueError("out is given with inputs that need gradients, expected no out (or torch.no_grad())")
        with _BELOW():
            operator(*given)

    return run


_HOW = "", "", "", None  # the defaults of the schemas, which the dispatcher leaves out
_GEMM = None, None, None, None, None, 1, 1, "", None, *_HOW

ops.library.impl("activation_backward", _by_torch, "CPU")
ops.library.impl("activation_backward", _by_kernel, "CUDA")


@torch.library.register_fake("outblas::activation_backward", lib=ops.library)
def _(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    _check_derivative(grad, x, activation)
    return x.new_empty(x.shape)


for _name, _function in {
    "matmul": _matmul,
    "addmm": _addmm,
    "gemm": _gemm,
    "gemm_aux": _gemm_aux,
    "activation_backward": _activation_backward,
    **{name: _without(getattr(ops, name)) for name in ("matmul_out", "addmm_out", "gemm_out")},
}.items():
    ops.library.impl(_name, _function, "Autograd")

"""Gradients of aten's products with an `out_dtype` under `outblas.enable`, where torch has none.

    dA = (alpha · g) Bᵀ    dB = Aᵀ (alpha · g)    dC = beta · g, summed along what C was broadcast

alpha · g is rounded to the dtype of A and B, which is that of their gradients. These products are
torch's, and differentiable.
"""

from collections.abc import Callable
from typing import Any

import torch

from outblas.torch_ops.autograd import summed
from outblas.torch_ops.autograd_levels import (
    has_tangent,
    recorder,
    requires_grad,
    unseen_by_types,
    within_forward,
)

Tensor = torch.Tensor

OPERATORS = "mm.dtype", "bmm.dtype", "addmm.dtype", "baddbmm.dtype"


def are_missing() -> bool:
    """Returns whether torch has no gradients of these operators."""
    with torch.enable_grad():
        a = torch.ones(1, 1, dtype=torch.bfloat16, device="meta", requires_grad=True)
        node = torch.mm(a, a, out_dtype=torch.float32).grad_fn
    return node is None or "NotImplemented" in node.name()


class _Gradients(torch.autograd.Function):
    """The autograd function of these operators. `apply` takes the operator, C or None, A, B, the
    dtype, beta and alpha.
    """

    @staticmethod
    def forward(
        ctx: Any,
        operator: Callable[..., Tensor],
        c: Tensor | None,
        a: Tensor,
        b: Tensor,
        out_dtype: torch.dtype,
        beta: Any,
        alpha: Any,
    ) -> Tensor:
        _, _, needs_a, needs_b, *_ = ctx.needs_input_grad
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        ctx.addend, ctx.dtype = c is not None and (c.shape, c.dtype), a.dtype
        ctx.beta, ctx.alpha = beta, alpha
        with within_forward():
            if c is None:
                return operator(a, b, out_dtype)
            return operator(c, a, b, out_dtype, beta=beta, alpha=alpha)

    @staticmethod
    @unseen_by_types
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        _, needs_c, needs_a, needs_b, *_ = ctx.needs_input_grad
        d_c = d_a = d_b = None
        if needs_c:
            shape, dtype = ctx.addend
            d_c = (summed(g, shape) * ctx.beta).to(dtype)
        g = (g if ctx.alpha == 1 else g * ctx.alpha).to(ctx.dtype)
        if needs_a:
            d_a = g @ b.mT
        if needs_b:
            d_b = a.mT @ g
        return None, d_c, d_a, d_b, None, None, None


_record = recorder(_Gradients)


def with_gradients(name: str, previous: Any) -> Callable[..., Tensor]:
    """Returns the Autograd kernel of an operator. `previous` is the one that it has in torch."""
    operator = getattr(torch.ops.aten, name.partition(".")[0]).dtype
    has_addend = name.startswith(("addmm", "baddbmm"))

    def product(keys: Any, *given: Any, beta: Any = 1, alpha: Any = 1) -> Tensor:
        tensors, out_dtype = given[:-1], given[-1]
        if not requires_grad(*tensors) or has_tangent(*tensors):
            factors = {"beta": beta, "alpha": alpha} if has_addend else {}
            result: Tensor = previous.call_boxed(keys, *given, **factors)
            return result
        c, a, b = tensors if has_addend else (None, *tensors)
        recorded: Tensor = _record(operator, c, a, b, out_dtype, beta, alpha)
        return recorded

    return product

"""What autocast and `torch.vmap` make of the operators: what they make of torch's own products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import ops
from .epilogue import apply

Tensor = torch.Tensor
_NARROW = torch.float16, torch.bfloat16


# ---- autocast ----
def _cast(operator: Any, device: str, key: torch.DispatchKey) -> Callable[..., Any]:
    """Operands become tensors of autocast's dtype, but float64 ones; bias and residual of the product's. Inside,
    autocast is off."""
    keys = torch._C.DispatchKeySet(key)
    place = 8 if operator is not ops.matmul else 2  # of out_dtype
    wide = {ops.gemm: (3, 4), ops.gemm_aux: (3, 4)}.get(operator, ())
    if operator is ops.addmm:
        place = len(operator._schema.arguments)

    def run(*given: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        out_dtype = (given[place] if len(given) > place else None) or dtype

        def cast(i: int, value: Any) -> Any:
            fits = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
            return value.to(out_dtype if i in wide else dtype) if fits and value.device.type == device else value

        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operator(*(cast(i, value) for i, value in enumerate(given)))

    return run


# ---- vmap ----
# A rule takes what is mapped over, the mapped dimension of each argument or None, and the arguments; it returns the
# result and its mapped dimension.
def _lifted(t: Tensor, dim: int | None, rank: int) -> Tensor:
    """Its mapped dimension, which is the first if there is one, before `rank` others."""
    return t if dim is None else t[(slice(None), *[None] * (rank + 1 - t.dim()))]


class _Operands:
    """A and B of a mapped product as batches of matrices, and what of the product is not theirs."""

    def __init__(self, a: Tensor, b: Tensor, dim_a: int | None, dim_b: int | None) -> None:
        a, b = _first(a, dim_a), _first(b, dim_b)
        rank_a, rank_b = a.dim() - (dim_a is not None), b.dim() - (dim_b is not None)
        self.row, self.column = rank_a == 1, rank_b == 1
        self.rank = max(rank_a, rank_b, 2)
        self.a = _lifted(a.unsqueeze(-2) if self.row else a, dim_a, self.rank)
        self.b = _lifted(b.unsqueeze(-1) if self.column else b, dim_b, self.rank)

    def extra(self, t: Tensor | None, dim: int | None) -> Tensor | None:
        """A bias or a residual of the product of the matrices."""
        if t is None:
            return None
        t = _first(t, dim)
        if self.column:
            t = t.unsqueeze(-1)
        if self.row and t.dim() > (dim is not None):
            t = t.unsqueeze(-2)
        return _lifted(t, dim, self.rank)

    def given(self, product: Tensor) -> Tensor:
        if self.column:
            product = product.squeeze(-1)
        return product.squeeze(-1 if self.column else -2) if self.row else product


def _first(t: Tensor, dim: int | None) -> Tensor:
    return t if dim is None else t.movedim(dim, 0)


def _matmul(info: Any, dims: Any, a: Tensor, b: Tensor, *how: Any) -> tuple[Tensor, int]:
    mapped = _Operands(a, b, *dims[:2])
    return mapped.given(ops.matmul(mapped.a, mapped.b, *how)), 0


def _addmm(
    info: Any, dims: Any, c: Tensor, a: Tensor, b: Tensor, alpha: Any = 1, beta: Any = 1, *choice: Any
) -> tuple[Tensor, int]:
    dim_c, dim_a, dim_b = dims[:3]
    c = _first(c, dim_c)
    if dim_b is None and dim_a is not None:  # rows of one product
        a = _first(a, dim_a)
        size, rows, columns = a.shape[0], a.shape[1], b.shape[1]
        if dim_c is not None or (c.dim() == 2 and c.shape[0] != 1):
            c = _lifted(c, dim_c, 2).expand(size, rows, columns).reshape(-1, columns)
        return ops.addmm(c, a.flatten(0, 1), b, alpha, beta, *choice).unflatten(0, (size, rows)), 0
    return _scaled(dims, c, a, b, alpha, beta, None, choice), 0


def _scaled(
    dims: Any, c: Tensor, a: Tensor, b: Tensor, alpha: Any, beta: Any, out_dtype: torch.dtype | None, choice: Any
) -> Tensor:
    """alpha · A B + beta · C of batches, rounded once. `c` has its mapped dimension in front."""
    dim_c, dim_a, dim_b = dims[:3]
    mapped = _Operands(a, b, dim_a, dim_b)
    x = ops.matmul(mapped.a, mapped.b, torch.float32 if a.dtype in _NARROW else None, *choice) * alpha
    if beta != 0:
        x = x + _lifted(c, dim_c, 2).to(x.dtype) * beta
    elif dim_a is None and dim_b is None:
        x = x.expand(c.shape[0], *x.shape)
    result: Tensor = x.to(out_dtype or a.dtype)
    return result


def _gemm(info: Any, dims: Any, *given: Any, aux: bool = False) -> Any:
    a, b, c, bias, residual, alpha, beta, activation, out_dtype, *choice = given + _DEFAULTS[len(given) :]
    dim_a, dim_b, dim_c, dim_bias, dim_residual = (*dims, *[None] * 5)[:5]
    mapped = _Operands(a, b, dim_a, dim_b)
    bias, residual = mapped.extra(bias, dim_bias), mapped.extra(residual, dim_residual)
    if c is None and (dim_a is not None or dim_b is not None):
        operator = ops.gemm_aux if aux else ops.gemm
        found = operator(mapped.a, mapped.b, None, bias, residual, alpha, beta, activation, out_dtype, *choice)
        return (tuple(map(mapped.given, found)), (0, 0)) if aux else (mapped.given(found), 0)
    if c is None:  # one product, whose epilogues differ
        x = ops.matmul(mapped.a, mapped.b, out_dtype, *choice).expand(info.batch_size, *[-1] * mapped.rank)
    else:
        x = _scaled((dim_c, dim_a, dim_b), _first(c, dim_c), a, b, alpha, beta, out_dtype, choice)
        x = x.expand(info.batch_size, *x.shape[-2:])
    x = x if bias is None else x + bias
    y = mapped.given(apply(x, activation, residual))
    return ((y, mapped.given(x)), (0, 0)) if aux else (y, 0)


def _gemm_aux(info: Any, dims: Any, *given: Any) -> Any:
    return _gemm(info, dims, *given, aux=True)


def _activation_backward(info: Any, dims: Any, grad: Tensor, x: Tensor, activation: str) -> tuple[Tensor, int]:
    grad, x = (
        t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip((grad, x), dims, strict=False)
    )
    return ops.activation_backward(grad, x, activation), 0


_DEFAULTS = None, None, None, None, None, 1, 1, "", None, "", "", "", None  # of `gemm`'s schema

for _name in ("matmul", "addmm", "gemm", "gemm_aux"):
    for _device, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        ops.library.impl(_name, _cast(getattr(ops, _name), _device, getattr(torch.DispatchKey, _key)), _key)

_RULES: dict[str, Callable[..., Any]] = {
    "matmul": _matmul,
    "addmm": _addmm,
    "gemm": _gemm,
    "gemm_aux": _gemm_aux,
    "activation_backward": _activation_backward,
}
for _name, _rule in _RULES.items():
    torch.library.register_vmap(f"outblas::{_name}", _rule, lib=ops.library)

"""What autocast and `torch.vmap` make of the operators: what they make of torch's own products."""

from collections.abc import Callable
from typing import Any

import torch

from . import ops
from .epilogue import apply

Tensor = torch.Tensor
_NARROW = torch.float16, torch.bfloat16


# ---- autocast
def _cast(operator: Any, device: str, key: torch.DispatchKey) -> Callable[..., Any]:
    """Operands become tensors of autocast's dtype, but float64 ones; bias and residual of the product's. Inside,
    autocast is off."""
    keys = torch._C.DispatchKeySet(key)
    names = [argument.name for argument in operator._schema.arguments]
    place = names.index("out_dtype") if "out_dtype" in names else len(names)

    def run(*given: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        out_dtype = (given[place] if len(given) > place else None) or dtype

        def cast(name: str, value: Any) -> Any:
            fits = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
            wanted = out_dtype if name in ("bias", "residual") else dtype
            return value.to(wanted) if fits and value.device.type == device else value

        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operator(*map(cast, names, given))

    return run


# ---- vmap
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
    dims = *dims[1:3], dims[0]
    found: tuple[Tensor, int] = _gemm(info, dims, a, b, c, None, None, alpha, beta, "", None, *choice)
    return found


def _gemm(info: Any, dims: Any, *given: Any, aux: bool = False) -> Any:
    a, b, c, bias, residual, alpha, beta, activation, out_dtype, *choice = ops.completed(given)
    dim_a, dim_b, dim_c, dim_bias, dim_residual = (*dims, *[None] * 5)[:5]
    mapped = _Operands(a, b, dim_a, dim_b)
    bias, residual = mapped.extra(bias, dim_bias), mapped.extra(residual, dim_residual)
    if c is None and (dim_a is not None or dim_b is not None):
        operator = ops.gemm_aux if aux else ops.gemm
        found = operator(mapped.a, mapped.b, None, bias, residual, alpha, beta, activation, out_dtype, *choice)
        return (tuple(map(mapped.given, found)), (0, 0)) if aux else (mapped.given(found), 0)
    # Operators have no batch of addends, and one product with several epilogues is still one.
    wide = torch.float32 if c is not None and a.dtype in _NARROW else out_dtype
    x = ops.matmul(mapped.a, mapped.b, wide, *choice)
    if c is not None:
        x = x * alpha
        x = (x if beta == 0 else x + _lifted(_first(c, dim_c), dim_c, 2).to(x.dtype) * beta).to(a.dtype)
    x = x.expand(info.batch_size, *x.shape[-mapped.rank :])
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

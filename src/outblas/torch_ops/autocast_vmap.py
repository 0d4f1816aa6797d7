"""Rules for the operators under autocast and `torch.vmap`, equal to those of torch's own
products.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from outblas.base.compat.torch_private import AUTOCAST_KEYS, autocast_off
from outblas.call.epilogue import GATED, apply
from outblas.call.errors import OperandError
from outblas.torch_ops import activation_backward, ops
from outblas.torch_ops.schema import ARGUMENTS, implement, library

Tensor = torch.Tensor
_NARROW = torch.float16, torch.bfloat16


# ---- autocast
def _cast(function: Callable[..., Any], operator: str, device: str) -> Callable[..., Any]:
    """Wraps `function`, which takes the arguments of `operator`, so that tensors are cast as
    autocast requires.

    Operands get autocast's dtype (float64 ones stay), bias and residual that of the product.
    Autocast is off inside.
    """
    without_autocast = autocast_off(device)
    names = [each.name for each in ARGUMENTS[operator]]
    out_dtype_index = names.index("out_dtype") if "out_dtype" in names else len(names)

    def run(*given: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        out_dtype = (given[out_dtype_index] if len(given) > out_dtype_index else None) or dtype

        def cast(name: str, value: Any) -> Any:
            fits = (
                isinstance(value, Tensor)
                and value.is_floating_point()
                and value.dtype != torch.float64
            )
            wanted = out_dtype if name in ("bias", "residual") else dtype
            return value.to(wanted) if fits and value.device.type == device else value

        with without_autocast():
            return function(*map(cast, names, given))

    return run


# ---- vmap
def _lifted(t: Tensor, dim: int | None, rank: int) -> Tensor:
    """Returns a tensor whose mapped dimension is first, if there is one, followed by `rank`
    others.
    """
    return t if dim is None else t[(slice(None), *[None] * (rank + 1 - t.dim()))]


def _sample(t: Any, dim: int | None) -> Any:
    """Returns the tensor that a call without vmap would have, for the checks."""
    if dim is None:
        return t
    return t.select(dim, 0) if t.shape[dim] else t.new_empty((*t.shape[:dim], *t.shape[dim + 1 :]))


class _Operands:
    """A and B of a mapped product as batches of matrices.

    `row`: A was a vector, so the product has no rows; `column`: B was a vector, so it has no
    columns. `rank`: the dimensions of the product of matrices, without the mapped one.
    """

    def __init__(self, a: Tensor, b: Tensor, dim_a: int | None, dim_b: int | None) -> None:
        a, b = _first(a, dim_a), _first(b, dim_b)
        rank_a, rank_b = a.dim() - (dim_a is not None), b.dim() - (dim_b is not None)
        self.row, self.column = rank_a == 1, rank_b == 1
        self.rank = max(rank_a, rank_b, 2)
        self.a = _lifted(a.unsqueeze(-2) if self.row else a, dim_a, self.rank)
        self.b = _lifted(b.unsqueeze(-1) if self.column else b, dim_b, self.rank)

    def extra(self, t: Tensor | None, dim: int | None) -> Tensor | None:
        """Returns a bias or a residual in the shape that the product of matrices needs."""
        if t is None:
            return None
        t = _first(t, dim)
        if self.column:
            t = t.unsqueeze(-1)
        if self.row and t.dim() > (dim is not None):
            t = t.unsqueeze(-2)
        return _lifted(t, dim, self.rank)

    def added(self, t: Tensor | None, dim: int | None) -> Tensor | None:
        """Returns a bias or a residual in the shape that the returned product needs."""
        return (
            None if t is None else _lifted(_first(t, dim), dim, self.rank - self.row - self.column)
        )

    def output(self, product: Tensor) -> Tensor:
        """Returns the product of the matrices without the dimensions that vectors lack."""
        if self.column:
            product = product.squeeze(-1)
        return product.squeeze(-1 if self.column else -2) if self.row else product


def _first(t: Tensor, dim: int | None) -> Tensor:
    """Moves the mapped dimension of a tensor, if there is one, to the front."""
    return t if dim is None else t.movedim(dim, 0)


def _matmul(
    info: Any, dims: Any, a: Tensor, b: Tensor, out_dtype: Any = None, *choice: Any
) -> tuple[Tensor, int]:
    ops.check(_sample(a, dims[0]), _sample(b, dims[1]), None, None, None, 1, 0, "", out_dtype)
    mapped = _Operands(a, b, *dims[:2])
    return mapped.output(ops.matmul(mapped.a, mapped.b, out_dtype, *choice)), 0


def _addmm(
    info: Any,
    dims: Any,
    c: Tensor,
    a: Tensor,
    b: Tensor,
    alpha: Any = 1,
    beta: Any = 1,
    *choice: Any,
) -> tuple[Tensor, int]:
    dims = *dims[1:3], dims[0]
    found: tuple[Tensor, int] = _gemm(
        info, dims, a, b, c, None, None, alpha, beta, "", None, *choice
    )
    return found


def _integer(name: str, value: Any, dtype: torch.dtype) -> int:
    """Converts alpha or beta of a product of integers. Raises OperandError."""
    try:
        return int(value)
    except (ValueError, OverflowError):
        raise OperandError(f"{name} is {value}, expected a number that {dtype} can hold") from None


def _gemm(info: Any, dims: Any, *given: Any, aux: bool = False) -> Any:
    given = ops.completed(given)
    a, b, c, bias, residual, alpha, beta, activation, out_dtype, *choice = given
    dims = dim_a, dim_b, dim_c, dim_bias, dim_residual = (*dims, *[None] * 5)[:5]
    ops.check(*map(_sample, given, (*dims, *[None] * len(given))))
    mapped = _Operands(a, b, dim_a, dim_b)
    by_column = mapped.column and activation in GATED  # the gate pairs rows of the matrices
    if c is None and not by_column and (dim_a is not None or dim_b is not None):
        operator = ops.gemm_aux if aux else ops.gemm
        bias, residual = mapped.extra(bias, dim_bias), mapped.extra(residual, dim_residual)
        found = operator(
            mapped.a, mapped.b, None, bias, residual, alpha, beta, activation, out_dtype, *choice
        )
        return (tuple(map(mapped.output, found)), (0, 0)) if aux else (mapped.output(found), 0)
    factors = (alpha, beta) if c is not None and (a.is_floating_point() or a.is_complex()) else ()
    if any(factor not in (0, 1) for factor in factors) and info.batch_size:
        # A single call rounds once; here each factor would.
        return _one_by_one(ops.gemm_aux if aux else ops.gemm, info.batch_size, dims, given)
    # The operators take no batch of addends, and a single product may have several epilogues.
    wide = torch.float32 if c is not None and a.dtype in _NARROW else out_dtype
    x = ops.matmul(mapped.a, mapped.b, wide, *choice)
    if c is not None:
        if not (a.is_floating_point() or a.is_complex()):  # as in torch.addmm
            alpha, beta = _integer("alpha", alpha, a.dtype), _integer("beta", beta, a.dtype)
        x = (
            torch.zeros_like(x) if alpha == 0 else x * alpha
        )  # without a product, whatever A and B hold
        x = (x if beta == 0 else x + _lifted(_first(c, dim_c), dim_c, 2).to(x.dtype) * beta).to(
            a.dtype
        )
    x = mapped.output(x.expand(info.batch_size, *x.shape[-mapped.rank :]))
    added = mapped.added(bias, dim_bias)
    x = x if added is None else x + added
    y = apply(x, activation, mapped.added(residual, dim_residual))
    if aux:
        return (x.clone() if y is x else y, x), (0, 0)
    return y, 0


def _one_by_one(operator: Any, count: int, dims: Sequence[int | None], given: Any) -> Any:
    """Returns what so many single calls of an operator return, stacked."""
    mapped = [*dims, *[None] * (len(given) - len(dims))]
    results = [
        operator(
            *(t if dim is None else t.select(dim, i) for t, dim in zip(given, mapped, strict=True))
        )
        for i in range(count)
    ]
    if isinstance(results[0], tuple):
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])
    return torch.stack(results), 0


def _activation_backward(
    info: Any, dims: Any, grad: Tensor, x: Tensor, activation: str
) -> tuple[Tensor, int]:
    activation_backward.check(_sample(grad, dims[0]), _sample(x, dims[1]), activation)
    grad, x = (
        t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip((grad, x), dims, strict=False)
    )
    return ops.activation_backward(grad, x, activation), 0


_RULES: dict[str, Callable[..., Any]] = {
    "matmul": _matmul,
    "addmm": _addmm,
    "gemm": _gemm,
    "gemm_aux": functools.partial(_gemm, aux=True),
}


def _mapped(operator: str, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a vmap rule that casts first where autocast is on, because the dispatcher calls vmap
    rules before autocast.
    """

    def run(info: Any, dims: Any, *given: Any) -> Any:
        for device in AUTOCAST_KEYS:
            if given[0].device.type == device and torch.is_autocast_enabled(device):
                return _cast(lambda *cast: rule(info, dims, *cast), operator, device)(*given)
        return rule(info, dims, *given)

    return run


for _name, _rule in _RULES.items():
    _operator = getattr(ops, _name)
    for _device, _key in AUTOCAST_KEYS.items():
        implement(_name, _key, _cast(_operator, _name, _device))
    torch.library.register_vmap(f"outblas::{_name}", _mapped(_name, _rule), lib=library)
torch.library.register_vmap("outblas::activation_backward", _activation_backward, lib=library)

"""Gradients of grouped products, which are grouped products themselves. The operators are those of
`grouped_mm`.

    g = gradient of x = A B + bias, through the order of rows, their weights and the activation
    dA = g Bᵀ    dB = Aᵀ g    dbias = sum of g's rows    dresidual = gradient of the result

Rows of the result are read in the order of groups. Where rows of A were gathered, those of dA are
added up in fp32 in the order of their places in `a_index`, which is deterministic on a GPU too.

What belongs to no group gets zeros: the products do not read it, whatever x and g hold there. Under
`create_graph` x is cleared there, because a NaN would pass through products with zero.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from outblas.base.compat.torch_private import from_below
from outblas.call.epilogue import composed
from outblas.call.errors import OperandError
from outblas.call.grouped import NO_TENSORS, Form
from outblas.call.sizes import is_certain
from outblas.torch_ops import grouped_plans, ops
from outblas.torch_ops.autograd import gradient_of_x, without_gradients
from outblas.torch_ops.autograd_levels import record_gradients, unseen_by_types, within_forward
from outblas.torch_ops.call import has_address
from outblas.torch_ops.schema import ARGUMENTS, implement

Tensor = torch.Tensor

_NAMES = tuple(each.name for each in ARGUMENTS["grouped_gemm"])
_SUMMED = "mat_a", "mat_b", "bias"  # of which x is made


class _Saved(NamedTuple):
    """What a backward pass needs besides tensors. The kernel is named on the CPU only: on a GPU
    gradients take the best one, whichever computed the result.
    """

    form: Form
    rows_of_a: int
    dtype: torch.dtype
    activation: str
    kernel_name: str


class _Gradients(torch.autograd.Function):
    """The autograd function of grouped products. `apply` takes whether x is asked for, and all
    arguments of `grouped_gemm`. It returns the result, and x where it is asked for or needed.
    """

    @staticmethod
    def forward(ctx: Any, aux: bool, *given: Any) -> Any:
        mat_a, mat_b, offs, bias, residual, *rows, activation, out_dtype, kernel_name, tail, _ = (
            given
        )
        needs = dict(zip(_NAMES, ctx.needs_input_grad[1:], strict=True))
        x_needs = any(needs[name] for name in _SUMMED)
        x = None
        with within_forward():
            if aux or needs["scatter_weights"] or (activation and x_needs):
                result, x = from_below(ops.grouped_gemm_aux(*given))
            elif activation or any(t is not None for t in (residual, *rows)):
                result = from_below(ops.grouped_gemm(*given))
            else:
                plain = mat_a, mat_b, offs, bias, out_dtype, kernel_name, tail
                result = from_below(ops.grouped_mm(*plain))
        if x is not None and not x_needs:
            ctx.mark_non_differentiable(x)
        ctx.save_for_backward(
            mat_a if needs["mat_b"] else None,
            mat_b if needs["mat_a"] else None,
            offs,
            *rows,
            x if activation or needs["scatter_weights"] else None,
        )
        ctx.set_materialize_grads(False)
        forms: dict[tuple[int, int], Form] = {
            (2, 3): "ragged_m",
            (3, 2): "ragged_n",
            (2, 2): "ragged_k",
        }
        ctx.saved = _Saved(
            forms.get((mat_a.dim(), mat_b.dim()), "batch"),
            mat_a.shape[-2],
            mat_a.dtype,
            activation,
            kernel_name if mat_a.is_cpu else "",
        )
        return result if x is None else (result, x)

    @staticmethod
    @unseen_by_types
    def backward(
        ctx: Any, g_out: Tensor | None, g: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        needs = dict(zip(_NAMES, ctx.needs_input_grad[1:], strict=True))
        mat_a, mat_b, offs, a_index, scatter_index, weights, x = ctx.saved_tensors
        saved: _Saved = ctx.saved
        found: dict[str, Tensor | None] = {}
        product = _products(offs, saved.kernel_name)
        if x is not None and torch.is_grad_enabled():
            x = torch.where(_covered(saved.form, offs, x), x, 0)
        if g_out is not None:
            if needs["residual"]:
                found["residual"] = g_out
            if scatter_index is not None:
                rows, factors = _in_order_of_groups(g_out, scatter_index, weights)
                if needs["scatter_weights"]:
                    found["scatter_weights"] = _of_weights(rows, x, scatter_index, offs, saved).to(
                        weights.dtype
                    )
                g_out = (rows * factors.unsqueeze(1)).to(g_out.dtype)
            g = gradient_of_x(g_out, g, x, saved.activation)
        if g is None:
            return _in_order(found)
        narrow = g.to(saved.dtype)
        if needs["mat_a"]:
            found["mat_a"] = _of_a(product, narrow, mat_b, a_index, saved)
        if needs["mat_b"]:
            if a_index is not None:
                mat_a = mat_a.index_select(0, _clamped(a_index, saved.rows_of_a))
            found["mat_b"] = product(mat_a.mT, narrow)
        if needs["bias"]:  # of the result's dtype, as g is
            found["bias"] = _of_bias(product, g)
        return _in_order(found)


def _in_order(found: dict[str, Tensor | None]) -> tuple[Tensor | None, ...]:
    """Returns the gradients in the order of the arguments of `apply`."""
    return None, *(found.get(name) for name in _NAMES)


def _products(offs: Tensor | None, kernel_name: str) -> Callable[..., Tensor]:
    """Returns a function that multiplies groups. What belongs to no group gets zeros."""

    def product(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        choice = out_dtype, kernel_name, True
        call = a, b, offs, NO_TENSORS, ("", *choice)
        may_have_plan = not torch.compiler.is_dynamo_compiling() and all(
            t is None or has_address(t) for t in (a, b, offs)
        )
        result = grouped_plans.run(*call) if may_have_plan else None
        if result is None:
            result = ops.grouped_mm(a, b, offs, None, *choice)
            if may_have_plan:
                grouped_plans.remember_call(*call)
        return result

    return product


def _of_a(
    product: Callable[..., Tensor],
    g: Tensor,
    mat_b: Tensor,
    a_index: Tensor | None,
    saved: _Saved,
) -> Tensor:
    if a_index is None:
        return product(g, mat_b.mT)
    wide = product(g, mat_b.mT, torch.float32)
    if is_certain(wide.shape[0] == 0):  # of which the operator below has no second gradient
        empty = wide.new_zeros(saved.rows_of_a, wide.shape[1])
        return empty.index_add(0, a_index, wide).to(saved.dtype)
    # It sorts the indices: equal ones are added in one order, and not by atomics.
    summed: Tensor = torch.ops.aten.embedding_dense_backward(
        wide, _clamped(a_index, saved.rows_of_a), saved.rows_of_a, -1, False
    )
    return summed.to(saved.dtype)


def _of_bias(product: Callable[..., Tensor], g: Tensor) -> Tensor:
    if g.dim() == 3:
        return g.sum(1)
    return product(g.new_ones(1, 1).expand(1, g.shape[0]), g).squeeze(1)


def _clamped(index: Tensor, count: int) -> Tensor:
    return index.clamp(0, torch.sym_max(count - 1, 0))


def _factors(scatter_index: Tensor, weights: Tensor | None, count: int) -> Tensor:
    """Returns the weights of rows, or whether they are stored; 0 for those that are not."""
    is_stored = (scatter_index >= 0) & (scatter_index < count)
    return is_stored if weights is None else torch.where(is_stored, weights, 0)


def _in_order_of_groups(
    g_out: Tensor, scatter_index: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the rows of a gradient in the order of groups, and their factors. Rows that are not
    stored get zeros: what the gradient holds elsewhere may not be finite.
    """
    count = g_out.shape[0]
    is_stored = _factors(scatter_index, None, count)
    rows = g_out.index_select(0, _clamped(scatter_index, count))
    return rows.where(is_stored.unsqueeze(1), 0), _factors(scatter_index, weights, count)


def _of_weights(
    rows: Tensor, x: Tensor, scatter_index: Tensor, offs: Tensor, saved: _Saved
) -> Tensor:
    """Returns the gradient of scatter_weights in fp32; 0 for rows that are not stored."""
    sums = (rows.float() * composed(x.float(), saved.activation, None)).sum(-1)
    is_stored = _factors(scatter_index, None, rows.shape[0])
    is_stored = is_stored & _covered("ragged_m", offs, x).squeeze(1)
    return torch.where(is_stored, sums, 0)


def _covered(form: Form, offs: Tensor | None, x: Tensor) -> Tensor:
    """Returns a mask, which broadcasts to x, of what belongs to groups."""
    if offs is None or form in ("ragged_k", "batch"):
        return torch.ones((), dtype=torch.bool, device=x.device)
    dim = 0 if form == "ragged_m" else 1
    mask = torch.arange(x.shape[dim], device=x.device) < offs[-1]
    return mask.unsqueeze(1 - dim)


# ---- registration
def _of_plain(
    mat_a: Tensor, mat_b: Tensor, offs: Tensor | None, bias: Tensor | None, *choice: Any
) -> tuple[Any, ...]:
    return False, mat_a, mat_b, offs, bias, None, None, None, None, "", *choice, None


def _of_whole(aux: bool, given: tuple[Any, ...]) -> tuple[Any, ...]:
    *others, counts = given
    if counts is None:
        return aux, *given
    needing = [
        name
        for name, t in zip(_NAMES, others, strict=False)
        if isinstance(t, Tensor) and t.requires_grad
    ]
    raise OperandError(
        f"counts is given with inputs that need gradients ({', '.join(needing)}), expected no "
        "counts (or torch.no_grad())"
    )


_ARRANGED: dict[str, Callable[..., tuple[Any, ...]]] = {
    "grouped_mm": _of_plain,
    "grouped_gemm": lambda *given: _of_whole(False, given),
    "grouped_gemm_aux": lambda *given: _of_whole(True, given),
}
for _name, _arranged in _ARRANGED.items():
    record_gradients(_name, _Gradients, arrange=_arranged)
implement("grouped_gemm_to_aux", "Autograd", without_gradients("grouped_gemm_to_aux", "aux"))

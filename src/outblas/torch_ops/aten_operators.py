"""What overrides the operators of aten under `outblas.enable`. It attempts a product by a kernel
of outblas, and calls the kernel that the operator had before where there is none.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from outblas.torch_ops.aten_calls import (
    attempt,
    attempt_addmm,
    attempt_grouped,
    attempt_grouped_batch,
    attempt_scaled,
    attempt_with_residual,
    refuse,
)
from outblas.torch_ops.aten_grouped import Grouped
from outblas.torch_ops.aten_rules import GROUPED
from outblas.torch_ops.aten_scaled import OPERATOR as SCALED
from outblas.torch_ops.aten_scaled import Scaled, scales_of

Tensor = torch.Tensor
Previous = Any  # the kernel that an operator had before


def _by_torch(previous: Previous, keys: Any, *given: Any, **named: Any) -> Tensor:
    result: Tensor = previous.call_boxed(keys, *given, **named)
    return result


def _bare(operator: str, previous: Previous) -> Callable[..., Tensor]:
    """Returns what overrides `mm` or `bmm`, with or without an `out_dtype` and `out`."""

    def product(keys: Any, a: Tensor, b: Tensor, *dtype: torch.dtype, **out: Tensor) -> Tensor:
        out_dtype = dtype[0] if dtype else None
        result = attempt(operator, a, b, out=out.get("out"), out_dtype=out_dtype)
        return _by_torch(previous, keys, a, b, *dtype, **out) if result is None else result

    return product


def _attempted(operator: str) -> Callable[..., Tensor | None]:
    """Returns what attempts a product with an addend."""
    return attempt_addmm if operator == "addmm" else partial(attempt_with_residual, operator)


def _with_addend(operator: str, previous: Previous) -> Callable[..., Tensor]:
    """Returns what overrides `addmm` or `baddbmm`, with or without an `out_dtype` and `out`."""
    attempted = _attempted(operator)

    def product(
        keys: Any,
        c: Tensor,
        a: Tensor,
        b: Tensor,
        *dtype: torch.dtype,
        beta: Any = 1,
        alpha: Any = 1,
        **out: Tensor,
    ) -> Tensor:
        result = attempted(c, a, b, alpha, beta, out.get("out"), *dtype)
        if result is not None:
            return result
        return _by_torch(previous, keys, c, a, b, *dtype, beta=beta, alpha=alpha, **out)

    return product


def _in_place(operator: str, previous: Previous) -> Callable[..., Tensor]:
    """Returns what overrides `addmm_` or `baddbmm_`."""
    attempted = _attempted(operator)

    def product(
        keys: Any, c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1
    ) -> Tensor:
        # Autograd, which is above, has recorded what it needs of a tensor that is written.
        written = c.detach() if c.requires_grad else c
        if attempted(written, a, b, alpha, beta, written) is not None:
            return c
        return _by_torch(previous, keys, c, a, b, beta=beta, alpha=alpha)

    return product


def _scaled(operator: str, previous: Previous) -> Callable[..., Tensor]:
    """Returns what overrides `_scaled_mm`, with or without `out`."""

    def product(
        keys: Any,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        bias: Tensor | None = None,
        scale_result: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
        **out: Tensor,
    ) -> Tensor:
        given = (a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
        result = attempt_scaled(Scaled(*given, out.get("out")))
        return _by_torch(previous, keys, *given, **out) if result is None else result

    return product


def _scaled_by_recipe(operator: str, previous: Previous) -> Callable[..., Tensor]:
    """Returns what overrides `_scaled_mm_v2`, with or without `out`: the operator behind
    `torch.nn.functional.scaled_mm`. After A and B it is given the scale, recipe and swizzle of
    each, then bias, out_dtype, contraction_dim and use_fast_accum.
    """

    def product(keys: Any, a: Tensor, b: Tensor, *given: Any, **out: Tensor) -> Tensor:
        by_recipe, options = given[:6], given[6:]
        options += ((), False)[len(options) - 2 :]
        bias, out_dtype, contraction_dim, use_fast_accum = options
        scales = scales_of(a, b, *by_recipe, contraction=contraction_dim)
        others = bias, out_dtype, use_fast_accum, out.get("out")
        result = None if scales is None else attempt_scaled(Scaled.of(a, b, scales, *others))
        return _by_torch(previous, keys, a, b, *given, **out) if result is None else result

    return product


def _grouped(operator: str, previous: Previous) -> Callable[..., Tensor]:
    """Returns what overrides `_grouped_mm`: the operator behind
    `torch.nn.functional.grouped_mm`.
    """

    def product(
        keys: Any,
        a: Tensor,
        b: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        if offs is None:
            result = attempt_grouped_batch(a, b, bias, out_dtype)
        else:
            result = attempt_grouped(Grouped(a, b, offs, bias, out_dtype))
        if result is not None:
            return result
        return _by_torch(previous, keys, a, b, offs, bias, out_dtype)

    return product


REFUSED = "refused"  # where batch invariance is promised, and left alone elsewhere


def _refused(name: str, previous: Previous) -> Callable[..., Tensor]:
    """Returns what overrides an operator that multiplies, and that has no kernel here."""

    def product(keys: Any, *given: Any, **named: Any) -> Tensor:
        refuse(name, *[t for t in given if isinstance(t, Tensor)][-2:])
        return _by_torch(previous, keys, *given, **named)

    return product


# What overrides an operator of aten: the product that it computes, and a function that makes the
# kernel from this name and the kernel that the operator had before.
OVERRIDES: dict[str, tuple[str, Callable[[str, Previous], Callable[..., Tensor]]]] = {
    "mm": ("mm", _bare),
    "mm.out": ("mm", _bare),
    "bmm": ("bmm", _bare),
    "bmm.out": ("bmm", _bare),
    "addmm": ("addmm", _with_addend),
    "addmm.out": ("addmm", _with_addend),
    "addmm_": ("addmm", _in_place),
    "baddbmm": ("baddbmm", _with_addend),
    "baddbmm.out": ("baddbmm", _with_addend),
    "baddbmm_": ("baddbmm", _in_place),
    "_scaled_mm": (SCALED, _scaled),
    "_scaled_mm.out": (SCALED, _scaled),
    "_scaled_mm_v2": (SCALED, _scaled_by_recipe),
    "_scaled_mm_v2.out": (SCALED, _scaled_by_recipe),
    GROUPED: (GROUPED, _grouped),
    **{
        f"{name}.dtype{out}": (f"{name}.dtype", override)
        for name, override in (
            ("mm", _bare),
            ("bmm", _bare),
            ("addmm", _with_addend),
            ("baddbmm", _with_addend),
        )
        for out in ("", "_out")
    },
    **dict.fromkeys(
        ("_addmm_activation", "_addmm_activation.out", "addmv", "addmv.out", "addmv_"),
        (REFUSED, _refused),
    ),
}

"""Calls of torch's products under `outblas.enable`: each runs the plan of calls like it, or is left
to torch.
"""

import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from outblas.base import forks
from outblas.call import dispatch, invariance, warm
from outblas.call.dispatch import Call
from outblas.call.epilogue import EpilogueArgs
from outblas.call.errors import OperandError
from outblas.call.invariance import flag as _invariance
from outblas.call.warm import Kind, Others, WarmPlan
from outblas.torch_ops import native
from outblas.torch_ops.aten_choice import IN_CAPTURE, PENDING, choose, choose_grouped, choose_scaled
from outblas.torch_ops.aten_grouped import NOT_INVARIANT as GROUPED_NOT_INVARIANT
from outblas.torch_ops.aten_grouped import Grouped, padded_strides
from outblas.torch_ops.aten_rules import GROUPED, NOTHING, Rules
from outblas.torch_ops.aten_scaled import NOT_INVARIANT, Scaled
from outblas.torch_ops.aten_scaled import OPERATOR as SCALED
from outblas.torch_ops.call import is_plain_scalar

Tensor = torch.Tensor

OURS = "outblas"  # what `Enabled.decisions` says of a product that a kernel of outblas computes
_NATIVE = {"mm": Kind.MM, "bmm": Kind.BMM, "addmm": Kind.ADDMM}
_is_native = native.is_used()
_ATEN = int(Kind.ATEN)
_find = warm.find


class Active(NamedTuple):
    """What holds in the process.

    rules: those of one call of `enable`. decisions: what became of each kind of product.
    generation: rises whenever other rules hold. It is a part of keys, so that nothing is found
        that was decided before.
    """

    rules: Rules
    decisions: dict[str, str]
    generation: int = 0


class _Thread(threading.local):
    """inside: whether this thread is choosing a kernel; products of the choice belong to torch."""

    inside = False


_thread = _Thread()
lock = forks.Lock(held=True)  # a fork finds the operators all overridden, or none
_active: Active | None = None
_generations = itertools.count()


def activate(active: Active | None) -> None:
    """Decides products by other rules from now on; None leaves them all to torch."""
    global _active
    with lock:
        _active = active and active._replace(generation=next(_generations))
        native.activate(active is not None and active.rules.batch_invariant)


def attempt_addmm(
    c: Tensor, a: Tensor, b: Tensor, alpha: Any, beta: Any, out: Tensor | None = None
) -> Tensor | None:
    if not (is_plain_scalar(alpha) and is_plain_scalar(beta)):
        _left_to_torch(f"alpha and beta are {alpha} and {beta}")
        return None
    return attempt("addmm", a, b, c, out, alpha, beta)


def attempt_with_residual(
    operator: str,
    c: Tensor,
    a: Tensor,
    b: Tensor,
    alpha: Any,
    beta: Any,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | None:
    """Computes a product with an addend that is a residual, or is not read. Kernels have no other
    addend of a batch or of another dtype, and they do not write over a residual.
    """
    if alpha != 1 or beta not in (0, 1):
        _left_to_torch(f"{operator} scales")
        return None
    if out is c and beta != 0:
        _left_to_torch(f"{operator} adds to its own addend")
        return None
    extra = None
    if beta != 0:
        converts = out_dtype is not None and c.dtype is a.dtype
        extra = EpilogueArgs("", None, c.to(out_dtype) if converts else c, None)
    return attempt(operator, a, b, out=out, extra=extra, out_dtype=out_dtype)


def _left_to_torch(reason: str) -> None:
    """Raises ValueError where batch invariance is requested, which torch does not promise. Where
    nothing is multiplied, a row depends on no other.
    """
    enabled = _active
    if enabled is None or _thread.inside or reason == NOTHING:
        return
    if enabled.rules.batch_invariant or invariance.flag.requested():
        raise invariance.unsupported(reason)


def refuse(name: str, a: Tensor, b: Tensor) -> None:
    """Raises ValueError for a product by an operator that has no kernel here, where batch
    invariance is promised.
    """
    enabled = _active
    if enabled is None or _thread.inside or not (a.numel() and b.numel()):
        return
    if enabled.rules.batch_invariant:
        raise ValueError(
            f"batch_invariant is True, and torch alone has a kernel of aten's {name}, which does "
            "not promise it: expected mm, addmm, bmm or baddbmm, or a call of outblas"
        )


def attempt(
    operator: str,
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    out: Tensor | None = None,
    alpha: Any = 1,
    beta: Any = 1,
    extra: EpilogueArgs | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | None:
    """Computes a product by a kernel of outblas. Returns None, before anything is written, where
    torch is to compute it.

    Raises ValueError where batch invariance is requested and torch would have to compute it.
    """
    enabled = _active
    if enabled is None or _thread.inside:
        return None
    invariant = enabled.rules.batch_invariant or (_invariance.ever and _invariance.requested())
    others: Others = ()
    addend: Any = None
    if c is not None:
        others = (c,) if out is None else (c, out)
        addend = alpha == 1, alpha == 0, beta == 0
    elif extra is not None:
        others, addend = (extra.residual, out), "residual"
    elif out is not None:
        others = (out,)
    options = operator, enabled.generation, invariant, out_dtype, addend
    entry = _find(_ATEN, options, a, b, others)
    if entry is None:
        _left_to_torch("an operand has no address")
        return None
    plan = entry.plan
    if plan is None:
        rules = enabled.rules
        call = Call(a, b, c, out, out_dtype, alpha, beta, rules.kernel, "", "", invariant, extra)
        plan = _decide(enabled, entry, partial(choose, rules, operator, call))
    if _is_native and entry.offered != native.generation and not isinstance(plan, str):
        entry.offered = native.generation
        is_bare = extra is None and out_dtype is None and (out is None or out is not c)
        if operator in _NATIVE and is_bare:
            native.remember(
                _NATIVE[operator],
                (a, b, c, None, None, out),
                plan,
                batch_invariant=invariant,
                alpha=1 if c is None else alpha,
                beta=0 if c is None else beta,
            )
    if isinstance(plan, str):
        _left_to_torch(plan)
        return None
    try:
        epilogue = () if extra is None else extra[1:]
        result: Tensor = plan(a, b, c, out, alpha, beta, *epilogue)
        return result
    except OperandError:  # operands that overlap: torch accepts some of them
        if invariant:
            raise
        return None


def attempt_scaled(call: Scaled) -> Tensor | None:
    """Computes a product of fp8 operands by a kernel of outblas. Returns None, before anything is
    written, where torch is to compute it. Raises as `attempt`.
    """
    enabled = _active
    if enabled is None or _thread.inside:
        return None
    if _invariance.ever and _invariance.requested():
        raise invariance.unsupported(NOT_INVARIANT)
    a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum, out = call
    others = scale_a, scale_b, bias, out
    options = SCALED, enabled.generation, scale_result is None, out_dtype, use_fast_accum
    entry = _find(_ATEN, options, a, b, others)
    if entry is None:  # an operand without an address
        return None
    plan = entry.plan or _decide(enabled, entry, partial(choose_scaled, enabled.rules, call))
    if isinstance(plan, str):
        return None
    try:
        return call.run(plan)
    except OperandError:  # operands that overlap
        return None


def attempt_grouped(call: Grouped) -> Tensor | None:
    """Computes a product whose groups `offs` divides by a kernel of outblas. Returns None, before
    anything is written, where torch is to compute it. Raises as `attempt`.
    """
    enabled = _active
    if enabled is None or _thread.inside:
        return None
    a, b, offs, bias, out_dtype = call
    options = GROUPED, enabled.generation, bias is None, out_dtype
    entry = _find(_ATEN, options, a, b, (offs,))
    if entry is None:
        _left_to_torch("an operand has no address")
        return None
    if enabled.rules.batch_invariant or (_invariance.ever and _invariance.requested()):
        if a.numel() and b.numel():
            raise invariance.unsupported(GROUPED_NOT_INVARIANT)
        return None
    plan = entry.plan or _decide(enabled, entry, partial(choose_grouped, enabled.rules, call))
    return None if isinstance(plan, str) else plan(a, b, offs)


def attempt_grouped_batch(
    a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor | None:
    """Computes `_grouped_mm` without an `offs`, the product of two batches. Returns and raises as
    `attempt`.
    """
    if bias is not None or out_dtype not in (None, a.dtype):
        _left_to_torch(f"bias and out_dtype of {GROUPED} are {bias} and {out_dtype}")
        return None
    out = None
    if a.dim() == b.dim() == 3 and b.shape[-1] * b.element_size() % 16:
        shape = (a.shape[0], a.shape[1], b.shape[2])
        out = a.new_empty_strided(shape, padded_strides(shape, a.element_size()))
    return attempt(GROUPED, a, b, out=out)


def _decide(
    enabled: Active, entry: WarmPlan, choose: Callable[[], tuple[dispatch.Plan | str, str]]
) -> dispatch.Plan | str:
    """Returns the plan for calls like this one, or why torch computes them, and keeps it in their
    entry. `choose` finds it, and says how `decisions` calls the product.
    """
    _thread.inside = True
    native.set_choosing(True)
    try:
        plan, product = choose()
    finally:
        _thread.inside = False
        native.set_choosing(False)
    if plan not in (IN_CAPTURE, PENDING):
        entry.keep(plan)
        with lock:
            by = plan if isinstance(plan, str) else OURS
            dispatch.remember(enabled.decisions, product, by)
    return plan

"""Calls of torch's products under `outblas.enable`: each runs the plan of calls like it, or is left
to torch.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from outblas.base import forks
from outblas.base.compat.torch_private import tensor_guard
from outblas.call import dispatch, invariance
from outblas.call.dispatch import Call
from outblas.call.epilogue import EpilogueArgs
from outblas.call.errors import OperandError
from outblas.call.sm_carveout import reserved
from outblas.call.tensor_memory import LINE
from outblas.call.tensor_memory import read_address as _address
from outblas.torch_ops import native
from outblas.torch_ops.aten_choice import IN_CAPTURE, PENDING, choose, choose_grouped, choose_scaled
from outblas.torch_ops.aten_grouped import NOT_INVARIANT as GROUPED_NOT_INVARIANT
from outblas.torch_ops.aten_grouped import Grouped, padded_strides
from outblas.torch_ops.aten_rules import GROUPED, NOTHING, Rules
from outblas.torch_ops.aten_scaled import NOT_INVARIANT, Scaled
from outblas.torch_ops.call import is_plain_scalar

Tensor = torch.Tensor

OURS = "outblas"  # what `Enabled.decisions` says of a product that a kernel of outblas computes
_NATIVE = {"mm": native.Kind.MM, "bmm": native.Kind.BMM, "addmm": native.Kind.ADDMM}
_MOST_ALIKE = 16  # kinds that differ in layouts, dtypes and devices only
_LINE_MASK = LINE - 1


class Active(NamedTuple):
    """What holds in the process.

    rules: those of one call of `enable`. decisions: what became of each kind of product.
    """

    rules: Rules
    decisions: dict[str, str]


class _Thread(threading.local):
    """inside: whether this thread is choosing a kernel; products of the choice belong to torch."""

    inside = False


_thread = _Thread()
lock = forks.Lock(held=True)  # a fork finds the operators all overridden, or none
_active: Active | None = None
# For calls of the same sizes: a guard that compares the other properties of their tensors, and the
# plan by which a kernel computes them, or the reason why torch does.
Decision = tuple[Callable[..., bool], dispatch.Plan | str]
_decided: dict[tuple[Any, ...], tuple[Decision, ...]] = dispatch.aten_plans


def activate(active: Active | None) -> None:
    """Decides products by other rules from now on; None leaves them all to torch."""
    global _active
    with lock:
        _active = active
        _decided.clear()
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
    invariant = enabled.rules.batch_invariant or (
        invariance.flag.ever and invariance.flag.requested()
    )
    residual = None if extra is None else extra.residual
    tensors: tuple[Tensor, ...] = (a, b)
    try:
        in_line = _address(a) & _LINE_MASK, _address(b) & _LINE_MASK
        options = operator, out_dtype, invariant, reserved()
        key: tuple[Any, ...] = (options, a.shape, b.shape, in_line)
        if c is not None:
            tensors = (a, b, c)
            key = (key, "c", _address(c) & 15, alpha == 1, alpha == 0, beta == 0)
        if residual is not None:
            tensors = (*tensors, residual)
            key = (key, "residual", _address(residual) & 15)
        if out is not None and out is c:
            key = (key, "in place")
        elif out is not None:
            tensors = (*tensors, out)
            key = (key, "out", _address(out) & 15)
    except RuntimeError:  # an operand without an address
        _left_to_torch("an operand has no address")
        return None
    if a.dtype is torch.float32:
        key = (key, "tf32", dispatch.tf32_requested())
    for matches, known in _decided.get(key, ()):
        if matches(*tensors):
            plan = known
            break
    else:
        rules = enabled.rules
        call = Call(a, b, c, out, out_dtype, alpha, beta, rules.kernel, "", "", invariant, extra)
        plan = _decide(enabled, partial(choose, rules, operator, call), key, tensors)
        is_plain = extra is None and (out is None or out is not c)
        if not isinstance(plan, str) and is_plain and operator in _NATIVE:
            operands = a, b, c, None, None, out
            native.remember(
                _NATIVE[operator],
                operands,
                plan,
                batch_invariant=invariant,
                alpha=1 if c is None else alpha,
                beta=0 if c is None else beta,
            )
    if isinstance(plan, str):
        _left_to_torch(plan)
        return None
    try:
        if extra is None:
            return plan(a, b, c, out, alpha, beta)
        return plan(a, b, c, out, alpha, beta, *extra[1:])
    except OperandError:  # operands that overlap: torch accepts some of them
        if invariant:
            raise
        return None


def attempt_scaled(given: Scaled) -> Tensor | None:
    """Computes a product of fp8 operands by a kernel of outblas. Returns None, before anything is
    written, where torch is to compute it. Raises as `attempt`.
    """
    enabled = _active
    if enabled is None or _thread.inside:
        return None
    if invariance.flag.ever and invariance.flag.requested():
        raise invariance.unsupported(NOT_INVARIANT)
    tensors = given.tensors
    try:
        key = given.key()
    except RuntimeError:  # an operand without an address
        return None
    plan = _known(key, tensors)
    if plan is None:
        plan = _decide(enabled, partial(choose_scaled, enabled.rules, given), key, tensors)
    if isinstance(plan, str):
        return None
    try:
        return given.run(plan)
    except OperandError:  # operands that overlap
        return None


def attempt_grouped(given: Grouped) -> Tensor | None:
    """Computes a product whose groups `offs` divides by a kernel of outblas. Returns None, before
    anything is written, where torch is to compute it. Raises as `attempt`.
    """
    enabled = _active
    if enabled is None or _thread.inside:
        return None
    try:
        key = given.key()
    except RuntimeError:  # an operand without an address
        _left_to_torch("an operand has no address")
        return None
    if enabled.rules.batch_invariant or (invariance.flag.ever and invariance.flag.requested()):
        if given.a.numel() and given.b.numel():
            raise invariance.unsupported(GROUPED_NOT_INVARIANT)
        return None
    plan = _known(key, given.tensors)
    if plan is None:
        choose = partial(choose_grouped, enabled.rules, given)
        plan = _decide(enabled, choose, key, given.tensors)
    return None if isinstance(plan, str) else plan(*given.tensors)


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


def _known(key: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> dispatch.Plan | str | None:
    """Returns what was decided for calls like this one, if there were any."""
    for matches, known in _decided.get(key, ()):
        if matches(*tensors):
            return known
    return None


def _decide(
    enabled: Active,
    choose: Callable[[], tuple[dispatch.Plan | str, str]],
    key: tuple[Any, ...],
    tensors: tuple[Tensor, ...],
) -> dispatch.Plan | str:
    """Returns the plan for calls like this one, or why torch computes them, and remembers it.
    `choose` finds it, and says how `decisions` calls the product.
    """
    _thread.inside = True
    native.set_choosing(True)
    try:
        found, product = choose()
    finally:
        _thread.inside = False
        native.set_choosing(False)
    if found in (IN_CAPTURE, PENDING):
        return found
    with lock:
        if enabled is _active:
            alike = _decided.get(key, ())[1 - _MOST_ALIKE :]
            dispatch.remember(_decided, key, (*alike, (_guard(tensors), found)))
        by = found if isinstance(found, str) else OURS
        dispatch.remember(enabled.decisions, product, by)
    return found


def _guard(tensors: tuple[Tensor, ...]) -> Callable[..., bool]:
    """Returns a function that compares tensors with these in all that a plan depends on."""
    is_repeated = len({id(t) for t in tensors}) < len(tensors)  # torch's guard fits no such call
    guard = None if is_repeated else tensor_guard(tensors)
    if guard is not None:
        return guard
    layouts = [_layout(t) for t in tensors]
    return lambda *given: [_layout(t) for t in given] == layouts


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device

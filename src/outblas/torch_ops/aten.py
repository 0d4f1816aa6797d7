"""`outblas.enable`: torch's own dense products run on kernels of outblas, whoever calls them.

aten's `mm`, `addmm`, `bmm` and `baddbmm`, their forms with `out`, `addmm_` and `baddbmm_`, and on
request `_scaled_mm`, are overridden at the dispatch key of a device. That key lies below autograd,
autocast, vmap and tracing, so these see torch's own operators, and only the arithmetic changes. The
kernels that the operators had before are kept: they compute whatever outblas does not cover, and
`disable` gives the operators back to them.
"""

import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch

from ..core import forks, invariance, registry
from ..core.compat.torch_private import tensor_guard
from ..core.epilogue import EpilogueArgs
from ..core.errors import OperandError
from ..core.problem import Problem
from ..core.tensor_memory import LINE
from ..core.tensor_memory import read_address as _address
from ..runtime import dispatch, fallback, hooks, launcher
from ..runtime.cuda_graphs import capturing
from ..runtime.dispatch import Call
from .aten_rules import NOTHING, Product, Rules, checked_rules, unwanted_reason
from .aten_scaled import DTYPES as FP8
from .aten_scaled import NOT_INVARIANT, Scaled, scales_of
from .aten_scaled import OPERATOR as SCALED
from .call import is_plain_scalar

Tensor = torch.Tensor

OURS = "outblas"  # what `Enabled.decisions` says of a product that a kernel of outblas computes
_MOST_ALIKE = 16  # kinds that differ in layouts, dtypes and devices only
_LINE_MASK = LINE - 1


class Enabled:
    """What `enable` returns: a context manager, and an account of what became of each product.

    Attributes:
        decisions: Every kind of product that was met, such as "addmm 512x512x512 bfloat16". Its
            value is "outblas" where a kernel of outblas computes it, and otherwise the reason why
            torch does.

    Example:
        >>> import torch, outblas
        >>> with outblas.enable() as enabled:
        ...     y = torch.ones(2, 3) @ torch.ones(3, 4)  # on a CPU: torch computes it
        >>> enabled.decisions
        {}
    """

    _rules: Rules
    _before: "Enabled | None"

    def __init__(self) -> None:
        self.decisions: dict[str, str] = {}

    @classmethod
    def _by(cls, rules: Rules, before: "Enabled | None") -> "Enabled":
        made = cls()
        made._rules, made._before = rules, before
        return made

    def __enter__(self) -> "Enabled":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Goes back to what was enabled when this was made."""
        _activate(self._before)


class _Thread(threading.local):
    """inside: whether this thread is choosing a kernel; products of the choice belong to torch."""

    inside = False


_thread = _Thread()
_lock = forks.Lock(held=True)  # a fork finds the operators all overridden, or none
_active: Enabled | None = None
_library: torch.library.Library | None = None
# For calls of the same sizes: a guard that compares the other properties of their tensors, and the
# plan by which a kernel computes them, or the reason why torch does.
Decision = tuple[Callable[..., bool], dispatch.Plan | str]
_decided: dict[tuple[Any, ...], tuple[Decision, ...]] = dispatch.aten_plans


def enable(
    *,
    dtypes: Collection[torch.dtype] | None = None,
    min_flops: float = 0,
    min_gain: float | None = None,
    filter: Callable[[Product], bool] | None = None,
    batch_invariant: bool = False,
) -> Enabled:
    """Make torch's own dense products run on kernels of outblas, in the whole process.

    aten's `mm`, `addmm`, `bmm` and `baddbmm` on CUDA tensors, with `out` and in place too, then run
    on a kernel of outblas if the arguments below admit them. That includes `torch.matmul`,
    `F.linear`, `torch.einsum`, `torch.tensordot`, `nn.MultiheadAttention` and local products of
    distributed tensors, their backward passes by torch's own formulas, and what `torch.compile`
    calls. Everything else stays with torch, errors included. Results differ from cuBLAS's in the
    last bits.

    The call takes effect at once and until `disable`. As a context manager it ends with the block,
    and then what was enabled before holds again. All threads are affected.

    Args:
        dtypes: The dtypes of operands that are taken; by default float16 and bfloat16, and float32
            too with `batch_invariant`. float32 products follow torch's setting of tf32. With
            float8_e4m3fn or float8_e5m2 among them, aten's `_scaled_mm` and `_scaled_mm_v2` are
            overridden too, behind which `torch.nn.functional.scaled_mm` is: products with a scale
            for each operand, or one for each row of A and column of B, whose results are bfloat16,
            float16 or float32.
        min_flops: The least 2 · batch · M · N · K of a product that is taken. Small products cost
            the host more than torch's own.
        min_gain: The least time of cuBLAS over ours, where a sweep measured exactly this product; a
            product that was slower stays with torch. Products that nobody measured are taken. 0
            takes all. The default is 1, and 0 with `batch_invariant`.
        filter: A function that is asked once for each kind of product, and returns whether to take
            it.
        batch_invariant: True gives a row of a product the same bits alone, in any batch and beside
            any other rows, in every thread, as `outblas.batch_invariant` does for one. A product
            that no kernel computes raises ValueError, rather than be torch's unnoticed. Products
            of a vector (aten's `mv` and `dot`) and of fp8 operands are not overridden.

    Returns:
        A context manager, whose `decisions` say what became of each kind of product.

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If `dtypes` has one that no kernel takes, a limit is negative, or
            `batch_invariant` is True beside an argument that leaves products to torch.

    Example:
        >>> import torch, outblas
        >>> enabled = outblas.enable(min_flops=1e6)
        >>> layer = torch.nn.Linear(8, 4)
        >>> layer(torch.ones(2, 8)).shape  # on a CUDA device: computed by outblas
        torch.Size([2, 4])
        >>> outblas.disable()
    """
    return _enable(checked_rules(dtypes, min_flops, min_gain, filter, batch_invariant))


def disable() -> None:
    """Give aten's products back to the kernels that they had before `enable`.

    Without a call of `enable` before it does nothing. All threads are affected.

    Example:
        >>> import outblas
        >>> _ = outblas.enable()
        >>> outblas.disable()
    """
    _activate(None)


def _enable(rules: Rules) -> Enabled:
    with _lock:
        made = Enabled._by(rules, _active)
        _activate(made)
    return made


def _activate(enabled: Enabled | None) -> None:
    """Overrides the operators by the rules of `enabled`; None gives them back."""
    global _active
    with _lock:
        before = _active and _overridden(_active._rules)
        _active = None
        _decided.clear()
        if enabled is None:
            _uninstall()
            return
        if before != _overridden(enabled._rules):
            _uninstall()
            _install(*_overridden(enabled._rules))
        _active = enabled


# ---- operators
def _overridden(rules: Rules) -> tuple[str, tuple[str, ...]]:
    """Returns the dispatch key, and the names of the operators that are overridden there."""
    takes_fp8 = any(dtype in FP8 for dtype in rules.dtypes)
    names = [name for name, (operator, _) in _OVERRIDES.items() if operator != SCALED or takes_fp8]
    # An older torch does not have them all.
    there = [name for name in names if hasattr(torch.ops.aten, name.partition(".")[0])]
    return rules.key, tuple(there)


def _install(key: str, names: tuple[str, ...]) -> None:
    """Overrides operators at a dispatch key. A torch without CUDA has none there."""
    global _library
    if key == "CUDA" and not torch.backends.cuda.is_built():
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # torch warns, once in a process, that an operator has a kernel already
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name in names:
            operator, override = _OVERRIDES[name]
            previous = torch.library.get_kernel(f"aten::{name}", key)
            kernel = override(operator, previous)
            library.impl(name, kernel, key, with_keyset=True, allow_override=True)
    _library = library


def _uninstall() -> None:
    """Gives the operators back to the kernels that they had before."""
    global _library
    _library = None  # its registrations end with it


Previous = Any  # the kernel that an operator had before


def _by_torch(previous: Previous, keys: Any, *given: Any, **named: Any) -> Tensor:
    result: Tensor = previous.call_boxed(keys, *given, **named)
    return result


def _bare(operator: str, previous: Previous) -> Callable[..., Tensor]:
    """Returns what overrides `mm` or `bmm`, with or without `out`."""

    def product(keys: Any, a: Tensor, b: Tensor, **out: Tensor) -> Tensor:
        result = _attempt(operator, a, b, out=out.get("out"))
        return _by_torch(previous, keys, a, b, **out) if result is None else result

    return product


def _with_addend(operator: str, previous: Previous) -> Callable[..., Tensor]:
    """Returns what overrides `addmm` or `baddbmm`, with or without `out`."""
    attempt = _attempt_addmm if operator == "addmm" else _attempt_baddbmm

    def product(
        keys: Any, c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, **out: Tensor
    ) -> Tensor:
        result = attempt(c, a, b, alpha, beta, **out)
        if result is not None:
            return result
        return _by_torch(previous, keys, c, a, b, beta=beta, alpha=alpha, **out)

    return product


def _in_place(operator: str, previous: Previous) -> Callable[..., Tensor]:
    """Returns what overrides `addmm_` or `baddbmm_`."""
    attempt = _attempt_addmm if operator == "addmm" else _attempt_baddbmm

    def product(
        keys: Any, c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1
    ) -> Tensor:
        # Autograd, which is above, has recorded what it needs of a tensor that is written.
        written = c.detach() if c.requires_grad else c
        if attempt(written, a, b, alpha, beta, written) is not None:
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
        result = _attempt_scaled(Scaled(*given, out.get("out")))
        return _by_torch(previous, keys, *given, **out) if result is None else result

    return product


def _scaled_by_recipe(operator: str, previous: Previous) -> Callable[..., Tensor]:
    """Returns what overrides `_scaled_mm_v2`, with or without `out`: the operator behind
    `torch.nn.functional.scaled_mm`.
    """

    def product(
        keys: Any,
        a: Tensor,
        b: Tensor,
        scale_a: list[Tensor],
        recipe_a: list[int],
        swizzle_a: list[int],
        scale_b: list[Tensor],
        recipe_b: list[int],
        swizzle_b: list[int],
        bias: Tensor | None,
        out_dtype: torch.dtype | None,
        contraction_dim: Sequence[int] = (),
        use_fast_accum: bool = False,
        **out: Tensor,
    ) -> Tensor:
        by_recipe = (scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b)
        scales = scales_of(a, b, *by_recipe, contraction_dim)
        options = bias, out_dtype, use_fast_accum, out.get("out")
        result = None if scales is None else _attempt_scaled(Scaled.of(a, b, scales, *options))
        if result is not None:
            return result
        rest = bias, out_dtype, contraction_dim, use_fast_accum
        return _by_torch(previous, keys, a, b, *by_recipe, *rest, **out)

    return product


# What overrides an operator of aten: the product that it computes, and a function that makes the
# kernel from this name and the kernel that the operator had before.
_OVERRIDES: dict[str, tuple[str, Callable[[str, Previous], Callable[..., Tensor]]]] = {
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
}


# ---- calls
def _attempt_addmm(
    c: Tensor, a: Tensor, b: Tensor, alpha: Any, beta: Any, out: Tensor | None = None
) -> Tensor | None:
    if not (is_plain_scalar(alpha) and is_plain_scalar(beta)):
        _left_to_torch(f"alpha and beta are {alpha} and {beta}")
        return None
    return _attempt("addmm", a, b, c, out, alpha, beta)


def _attempt_baddbmm(
    c: Tensor, a: Tensor, b: Tensor, alpha: Any, beta: Any, out: Tensor | None = None
) -> Tensor | None:
    """Computes baddbmm with an addend that is a residual, or is not read. Kernels have no other
    addend of a batch, and they do not write over a residual.
    """
    if alpha != 1 or beta not in (0, 1):
        _left_to_torch("baddbmm scales")
        return None
    if out is c and beta != 0:
        _left_to_torch("baddbmm adds to its own addend")
        return None
    extra = None if beta == 0 else EpilogueArgs("", None, c, None)
    return _attempt("baddbmm", a, b, out=out, extra=extra)


def _left_to_torch(reason: str) -> None:
    """Raises ValueError where batch invariance is requested, which torch does not promise. Where
    nothing is multiplied, a row depends on no other.
    """
    enabled = _active
    if enabled is None or _thread.inside or reason == NOTHING:
        return
    if enabled._rules.batch_invariant or invariance.flag.requested():
        raise invariance.unsupported(reason)


def _attempt(
    operator: str,
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    out: Tensor | None = None,
    alpha: Any = 1,
    beta: Any = 1,
    extra: EpilogueArgs | None = None,
) -> Tensor | None:
    """Computes a product by a kernel of outblas. Returns None, before anything is written, where
    torch is to compute it.

    Raises ValueError where batch invariance is requested and torch would have to compute it.
    """
    enabled = _active
    if enabled is None or _thread.inside:
        return None
    invariant = enabled._rules.batch_invariant or (
        invariance.flag.ever and invariance.flag.requested()
    )
    residual = None if extra is None else extra.residual
    tensors: tuple[Tensor, ...] = (a, b)
    try:
        in_line = _address(a) & _LINE_MASK, _address(b) & _LINE_MASK
        key: tuple[Any, ...] = (operator, a.shape, b.shape, in_line, invariant)
        if c is not None:
            tensors = (a, b, c)
            key = (key, _address(c) & 15, alpha == 1, alpha == 0, beta == 0)
        if residual is not None:
            tensors = (*tensors, residual)
            key = (key, _address(residual) & 15)
        if out is not None and out is c:
            key = (key, "in place")
        elif out is not None:
            tensors = (*tensors, out)
            key = (key, _address(out) & 15)
    except RuntimeError:  # an operand without an address
        _left_to_torch("an operand has no address")
        return None
    if a.dtype is torch.float32:
        key = (key, dispatch.tf32_requested())
    for matches, known in _decided.get(key, ()):
        if matches(*tensors):
            plan = known
            break
    else:
        rules = enabled._rules
        call = Call(a, b, c, out, None, alpha, beta, rules.kernel, "", "", invariant, extra)
        plan = _decide(enabled, partial(_choose, rules, operator, call), key, tensors)
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


def _attempt_scaled(given: Scaled) -> Tensor | None:
    """Computes a product of fp8 operands by a kernel of outblas. Returns None, before anything is
    written, where torch is to compute it. Raises as `_attempt`.
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
    for matches, known in _decided.get(key, ()):
        if matches(*tensors):
            plan = known
            break
    else:
        plan = _decide(enabled, partial(_choose_scaled, enabled._rules, given), key, tensors)
    if isinstance(plan, str):
        return None
    try:
        return given.run(plan)
    except OperandError:  # operands that overlap
        return None


def _decide(
    enabled: Enabled,
    choose: Callable[[], tuple[dispatch.Plan | str, str]],
    key: tuple[Any, ...],
    tensors: tuple[Tensor, ...],
) -> dispatch.Plan | str:
    """Returns the plan for calls like this one, or why torch computes them, and remembers it.
    `choose` finds it, and says how `decisions` calls the product.
    """
    _thread.inside = True
    try:
        found, product = choose()
    finally:
        _thread.inside = False
    if found == _IN_CAPTURE:
        return found
    with _lock:
        if enabled is _active:
            alike = _decided.get(key, ())[1 - _MOST_ALIKE :]
            dispatch.remember(_decided, key, (*alike, (_guard(tensors), found)))
        by = found if isinstance(found, str) else OURS
        dispatch.remember(enabled.decisions, product, by)
    return found


def _guard(tensors: tuple[Tensor, ...]) -> Callable[..., bool]:
    """Returns a function that compares tensors with these in all that a plan depends on."""
    guard = tensor_guard(tensors)
    if guard is not None:
        return guard
    layouts = [_layout(t) for t in tensors]
    return lambda *given: [_layout(t) for t in given] == layouts


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device


_IN_CAPTURE = "a CUDA graph is captured, and the kernel is not loaded yet"


def _choose(rules: Rules, operator: str, call: Call) -> tuple[dispatch.Plan | str, str]:
    """Returns the plan of a call, or why torch computes it, and how `decisions` calls the
    product.
    """
    try:
        _check_dimensions(operator, call)
        problem = dispatch.problem_of(call)
    except OperandError as error:  # torch says what is wrong, or accepts it
        shapes = " and ".join("x".join(map(str, t.shape)) for t in (call.a, call.b))
        return str(error), f"{operator} of {shapes}"
    batch = call.a.shape[0] if call.a.dim() == 3 else 1
    product = Product(operator, batch, call.a.shape[-2], call.b.shape[-1], problem.K, problem.dtype)
    reason = _reason(rules, product, problem)
    return reason or _planned(product, call), str(product)


def _choose_scaled(rules: Rules, given: Scaled) -> tuple[dispatch.Plan | str, str]:
    """Returns the plan of a product of fp8 operands, or why torch computes it, and how `decisions`
    calls it.
    """
    if reason := given.reason():
        shapes = " and ".join("x".join(map(str, t.shape)) for t in (given.a, given.b))
        return reason, f"{SCALED} of {shapes}"
    (M, K), N = given.a.shape, given.b.shape[1]
    product = Product(SCALED, 1, M, N, K, given.a.dtype)
    reason = unwanted_reason(rules, product)
    return reason or _planned(product, given.call()), str(product)


def _planned(product: Product, call: Call) -> dispatch.Plan | str:
    """Returns the plan of a call that a kernel is to compute, or why there is none."""
    known = dispatch.cached_plan(call)
    if known is None and capturing(call.a.device):
        return _IN_CAPTURE
    try:
        return known or dispatch.find_plan(call, by_torch=False)
    except Exception as error:  # torch computed this product before `enable`, and still can
        fallback.warn_once(f"{product} stays with torch: {error}")
        return str(error)


def _check_dimensions(operator: str, call: Call) -> None:
    """Raises OperandError for operands that `matmul` takes and the operator does not."""
    dimensions = 3 if operator in ("bmm", "baddbmm") else 2
    if not call.a.dim() == call.b.dim() == dimensions:
        raise OperandError(
            f"the operands have {call.a.dim()} and {call.b.dim()} dimensions, expected {dimensions}"
        )
    if call.a.shape[:-2] != call.b.shape[:-2]:
        raise OperandError(
            f"the batches are {call.a.shape[0]} and {call.b.shape[0]}, expected equal ones"
        )


def _reason(rules: Rules, product: Product, problem: Problem) -> str:
    """Returns why a product stays with torch; "" if it does not."""
    if reason := unwanted_reason(rules, product):
        return reason
    if rules.kernel:
        return launcher.unsupported_reason(registry.find(rules.kernel), problem) or ""
    if missing := launcher.no_kernel_reason(problem):
        return missing
    gain = hooks.tuner.get().measured_gain(problem)
    if gain is not None and gain < rules.min_gain:
        measured = f"it is {gain:.3f} times as fast as cuBLAS by a sweep"
        return f"{measured}, and min_gain is {rules.min_gain:g}"
    return ""

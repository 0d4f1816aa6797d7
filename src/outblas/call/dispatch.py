"""From a call to its plan, which is made once for all similar calls and cached."""

import contextlib
import itertools
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from outblas.base import compiling, forks, registry
from outblas.base.compat.torch_private import (
    any_autocast,
    autocast_off,
    fp32_precision,
)
from outblas.base.compat.torch_private import current_device as _current_device
from outblas.base.compat.torch_private import empty_strided as _empty_strided
from outblas.base.compat.torch_private import fills_memory as _fills_memory
from outblas.base.compiling import CompileForbidden, CompilePending
from outblas.base.cuda_graphs import capturing, not_ready
from outblas.call import (
    default_kernel,
    fallback,
    fp8,
    invariance,
    launcher,
    recorded_shapes,
    sm_carveout,
)
from outblas.call import problem as operands
from outblas.call.epilogue import EpilogueArgs
from outblas.call.errors import OperandError
from outblas.call.overlap import check_epilogue_separate, check_separate, may_overlap
from outblas.call.problem import Launch, Problem
from outblas.call.tensor_memory import (
    alignment_class,
    packed_strides,
    read_address,
    span_bytes,
)

Tensor = torch.Tensor


class Call(NamedTuple):
    """out = alpha A B + beta C by the named kernel ("": the best known one). C is None for matmul.

    `tune` is "off", "lookup", "on", or "" for the value of OUTBLAS_TUNE. `batch_invariant`: the
    bits of a row depend on no other row. `extra` is the epilogue besides alpha and C, None if there
    is none; with it C has the shape of x. `scales` belong to fp8 operands, the third one to an
    output in fp8, which is written (`power_of_two` as in `Epilogue`); their `formats` are those of
    `Problem`, and so is `weights_ready`.
    """

    a: Tensor
    b: Tensor
    c: Tensor | None
    out: Tensor | None
    out_dtype: torch.dtype | None
    alpha: Any
    beta: Any
    kernel: str
    config: str
    tune: str = ""
    batch_invariant: bool = False
    extra: EpilogueArgs | None = None
    scales: tuple[Tensor, ...] | None = None
    formats: str = ""
    weights_ready: bool = False
    power_of_two: bool = False

    @property
    def epilogue_tensors(self) -> tuple[Tensor | None, ...]:
        """Returns bias, residual, aux and the scales, in the order in which a launch takes them
        after the other tensors.
        """
        return () if self.extra is None else (*self.extra[1:], *(self.scales or ()))


# plan(a, b, c, out, alpha, beta) -> out; the epilogue's tensors follow beta if there is an
# epilogue.
Plan = Callable[..., Tensor]

_autocast_off = autocast_off("cpu", "cuda")
_NONE = torch.empty(0, 0)


class KernelParts(NamedTuple):
    """What the plan of a kernel does where there is no `out`: it allocates an output and launches.

    `several`: whether the process has several GPUs, so that another one may be the current one.
    `spans`: the bytes from the first to the last element of A, B, the addend, the output and each
    tensor of the epilogue.
    """

    launch: Launch
    size: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    several: bool
    spans: tuple[int, ...]


_torch_reasons: WeakKeyDictionary[Plan, str] = WeakKeyDictionary()


def parts_of(plan: Plan) -> KernelParts | None:
    """Returns what a plan does; None for one that does more than to launch a kernel."""
    if not isinstance(plan, partial) or plan.func is not _execute:
        return None
    parts: KernelParts = plan.args[0]
    return parts


def torch_reason(plan: Plan) -> str | None:
    """Returns why a plan calls torch's functions; None for one that launches a kernel."""
    settled = plan.plan if isinstance(plan, PendingPlan) else plan
    return None if settled is None else _torch_reasons.get(settled)


class PendingPlan:
    """The plan of calls whose kernel is being compiled: torch stands in, or a kernel that a pack
    has. When a compile has ended (`compiling.generation`), it plans the calls anew, and forwards
    them once a kernel is there. Caches hold the new plan then.
    """

    def __init__(
        self, stand_in: Plan, again: Callable[[], Plan], generation: int, place: object = None
    ) -> None:
        """`again` plans anew. `generation`: what it was before the kernel was not found. `place`:
        that of the kernel among the unfinished ones.
        """
        self._stand_in, self._again, self._generation = stand_in, again, generation
        self._place = place
        self.plan: Plan | None = None
        self.places: list[tuple[dict[Any, Any], Any]] = []  # the caches that hold it, and its keys

    def __call__(self, a: Tensor, *given: Any) -> Tensor:
        if self.plan is None and capturing(a.device):
            raise not_ready()  # a graph would launch torch's kernel for good
        if (plan := self.resolved()) is None:
            try:
                return self._stand_in(a, *given)
            except (RuntimeError, ValueError):  # torch does not take it, or says what is wrong
                with compiling.waiting():
                    plan = self.resolved()
                if plan is None:
                    raise
        return plan(a, *given)

    def resolved(self) -> Plan | None:
        """Returns the plan that takes its place; None while there is none."""
        if self.plan is not None or compiling.is_ahead():
            return self.plan
        has_ended = self._place not in compiling.unfinished
        if (has_ended and self._generation != compiling.generation) or compiling.must_wait():
            self._generation = compiling.generation
            plan = self._again()
            if isinstance(plan, PendingPlan):
                self._place = plan._place
            else:
                self.plan = plan
                for cache, key in self.places:
                    if cache.get(key) is self:
                        remember(cache, key, plan)
        return self.plan


def is_pending(plan: Plan) -> bool:
    """Returns whether torch computes the calls of a plan because their kernel is being compiled."""
    return isinstance(plan, PendingPlan) and plan.resolved() is None


def any_rows(plan: Plan) -> bool:
    """Returns whether a plan serves every number of rows from 1 on, so that no key and no guard of
    it needs any.

    Free are the sizes of A before the last one, and with them those of the tensors that have as
    many rows: of `c`, `residual`, `aux`, `out` and the scale of each row of A. Everything else is
    as in the call that the plan was made for: dtypes, devices, strides, alignment classes, the
    sizes of B, the last size of each tensor, and which tensors there are. A key has to tell a
    tensor whose first size is the number of rows from one that rows share, (1, N) or (N,); where
    there is one row, the first counts.

    A has two dimensions and any strides, or more and is contiguous, each stride the product of the
    sizes behind it, and so are `out`, `residual` and `aux` then. B is a matrix.
    """
    return getattr(plan, "any_rows", False)


def at_rows(plan: Plan, sizes: torch.Size, *, by_torch: bool = True) -> Plan:
    """Returns the plan for these sizes of A alone, made if there is none yet; the same plan if it
    is one. `parts_of` and `torch_reason` tell about plans for one size. Raises as `find_plan`.
    """
    at: Callable[..., Plan] | None = getattr(plan, "at", None)
    plan = plan if at is None else at(sizes, by_torch)
    return plan.resolved() or plan if isinstance(plan, PendingPlan) else plan


# ---- the plan cache
PLAN_LIMIT = 8192  # number of entries of a plan cache; beyond it, the oldest are forgotten
SIZES_LIMIT = 1024  # the same for the sizes of A that a plan for any number of rows has met
MOST_ROWS = 1 << 24  # with more a plan serves that number alone: kernels count tiles in 32 bits
_plans: dict[tuple[Any, ...], Plan] = {}
# Clear the caches that compare less per call, together with this one.
on_clear: list[Callable[[], None]] = []
_remembering = forks.Lock()


def run(call: Call) -> Tensor:
    """Runs a call with the plan for calls like it.

    Raises OperandError for operands that do not fit together, ValueError where the named kernel
    does not support them, and RuntimeError while a CUDA graph is captured and the kernel is not
    loaded yet, or where the named kernel may not be compiled.
    """
    plan = _plans.get(_cache_key(call)) or find_plan(call)
    # Calls with out= cast nothing under autocast; torch's own functions would cast.
    if call.out is not None and any_autocast():
        with _autocast_off():
            return plan(
                call.a, call.b, call.c, call.out, call.alpha, call.beta, *call.epilogue_tensors
            )
    return plan(call.a, call.b, call.c, call.out, call.alpha, call.beta, *call.epilogue_tensors)


def find_plan(call: Call, *, by_torch: bool = True) -> Plan:
    """Returns the plan for calls like this one. Raises as `run`.

    Where the kernel may not be compiled, torch computes the call. Without `by_torch`, raises
    CompileForbidden then. While the kernel is being compiled, the plan is pending (`is_pending`).
    """
    key = _cache_key(call)
    plan = _plans.get(key)
    if plan is None and capturing(call.a.device):
        plan = _similar_plan(call)
    if plan is None:
        plan = _prepare(call, by_torch)
        remember(_plans, key, plan)
    return plan


def remember(cache: dict[Any, Any], key: Any, value: Any, most: int = PLAN_LIMIT) -> None:
    """Adds an entry to a cache of plans, in the place of the oldest one if there are too many."""
    with _remembering:  # another thread may add an entry while the oldest one is looked for
        while key not in cache and len(cache) >= most:
            del cache[next(iter(cache))]
        cache[key] = value
    if isinstance(value, PendingPlan):
        value.places.append((cache, key))


def cached_plan(call: Call) -> Plan | None:
    """Returns the cached plan of a call, if there is one."""
    return _plans.get(_cache_key(call))


def clear_cache() -> None:
    """Discards all plans, so that every call is planned again."""
    with _remembering:
        _plans.clear()
    for clear in on_clear:
        clear()


def _similar_plan(call: Call) -> Plan | None:
    """Returns a cached plan that is correct for a call, although another plan may be faster.

    It is a plan for a call that differs in whether `out` is given, or in where its operands begin
    within a cache line.
    """
    shape, dtype = _output(call)
    fresh = call.a.new_empty(shape, dtype=dtype)
    calls = [call]
    if call.out is None or (
        _layout(call.out) == _layout(fresh) and not read_address(call.out) & 15
    ):
        calls.append(call._replace(out=fresh if call.out is None else None))
    alignments = [
        (0, 16) if alignment in (0, 16) else (alignment,)
        for alignment in map(alignment_class, (call.a, call.b))
    ]
    keys = (_cache_key(each, pair) for each in calls for pair in itertools.product(*alignments))
    plans = (_plans[key] for key in keys if key in _plans)
    return next((plan for plan in plans if _is_ready(plan, call.a.shape)), None)


def _is_ready(plan: Plan, sizes: torch.Size) -> bool:
    """Returns whether a plan has met these sizes of A, if it serves several."""
    if isinstance(plan, PendingPlan):
        return plan.plan is not None
    return not hasattr(plan, "at") or sizes in plan.sizes  # type: ignore[attr-defined]


def _cache_key(call: Call, alignments: tuple[int, ...] | None = None) -> tuple[Any, ...]:
    """Returns everything that a plan depends on. `alignments` replaces those of A and B."""
    a, c, out = call.a, call.c, call.out
    rows = a.shape[:-1] if _frees_rows(call) else None
    return (
        *(alignments or (alignment_class(a), alignment_class(call.b))),
        *_layout(a, rows),
        *_layout(call.b),
        _placed(c, rows),
        None if c is None else (call.alpha == 1, call.alpha == 0, call.beta == 0),
        _placed(out, rows),
        call.out_dtype,
        call.kernel,
        call.config,
        call.tune,
        call.batch_invariant,
        a.dtype is torch.float32 and tf32_requested(),
        None if call.extra is None else call.extra.activation,
        *(_placed(t, rows) for t in call.epilogue_tensors),
        call.formats,
        call.weights_ready,
        call.power_of_two,
        sm_carveout.reserved(),
    )


def _placed(t: Tensor | None, rows: torch.Size | None) -> tuple[Any, ...] | None:
    return None if t is None else (*_layout(t, rows), read_address(t) & 15)


def _layout(t: Tensor, rows: torch.Size | None = None) -> tuple[Any, ...]:
    """Returns what a plan depends on of a tensor, without the sizes `rows` of those it has them
    of.
    """
    if rows is not None and t.dim() > 1 and t.shape[:-1] == rows:
        return None, t.shape[-1], t.stride()[-2:], t.dtype, t.device
    return t.shape, t.stride(), t.dtype, t.device


def _frees_rows(call: Call) -> bool:
    """Returns whether the plan of a call serves any number of rows (`any_rows`).

    That of a batch does not, nor that of a call whose shape is tuned when it is met, nor with
    scales that vary along K or belong to the output.
    """
    a, rows = call.a, call.a.shape[:-1]
    if not rows or call.b.dim() != 2 or not 1 <= math.prod(rows) <= MOST_ROWS:
        return False
    if (call.tune or os.environ.get("OUTBLAS_TUNE")) == "on":
        return False
    if call.formats and (fp8.formats(call.formats).block_a or len(call.scales or ()) > 2):
        return False
    others = [t for t in (call.c, call.out, *call.epilogue_tensors) if t is not None]
    if len(rows) == 1:
        return all(t.dim() <= 2 for t in others)
    return _is_packed(a) and all(
        _is_packed(t) if t.shape[:-1] == rows else all(size == 1 for size in t.shape[:-1])
        for t in others
    )


def _is_packed(t: Tensor) -> bool:
    """Returns whether every stride is the product of the sizes behind it, one of size 1 too."""
    return t.stride() == packed_strides(t.shape)


def tf32_requested() -> bool:
    """Returns whether torch's settings request tf32 for fp32 products on CUDA."""
    return fp32_precision("cuda", "matmul") == "tf32"


# ---- planning
def _output(call: Call) -> tuple[Any, torch.dtype]:
    """Returns the shape and dtype of the output. Raises OperandError for operands that do not fit
    together.
    """
    a, c = call.a, call.c
    shape = operands.check_product(a, call.b, c)
    dtype = (
        call.out_dtype
        if call.formats and call.out_dtype
        else operands.check_out_dtype(call.out_dtype, a.dtype)
    )
    if c is not None and dtype != a.dtype:
        raise OperandError(
            f"out_dtype is {dtype}, expected {a.dtype}, the dtype of the operands, for a product "
            "with an addend"
        )
    if call.extra is not None:
        of_tensors = torch.float32 if len(call.scales or ()) > 2 else dtype
        shape = operands.check_epilogue_args(call.extra, shape, of_tensors, a.device)
    return shape, dtype


def problem_of(call: Call) -> Problem:
    """Returns the problem that a call poses. Raises OperandError as `run`."""
    return _problem_of(call, _checked_output(call), _addend(call))


def _addend(call: Call) -> Tensor | None:
    """Returns the addend, if it is read."""
    return None if call.beta == 0 else call.c


class Memory(NamedTuple):
    """The memory of a call: as in `KernelParts`."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    spans: tuple[int, ...]


def _prepare(call: Call, by_torch: bool = True) -> Plan:
    """Checks a call and returns the plan for calls like it."""
    sample, addend = _checked_output(call), _addend(call)
    problem = _problem_of(call, sample, addend)
    if _frees_rows(call):
        return _rows_plan(call, problem, sample, by_torch)
    if problem.epilogue.gated and call.b.dim() == 1:
        recorded_shapes.note(_problem_of(_swapped(call), sample, addend))
        return _without_kernel(call, problem) or _swapped_plan(call)
    tensors = call.a, call.b, addend, sample, *call.epilogue_tensors
    spans = tuple(0 if t is None else span_bytes(t) for t in tensors)
    memory = Memory(tuple(sample.shape), sample.stride(), sample.dtype, sample.device, spans)
    return _plan_of(call, problem, memory, by_torch)


def _plan_of(
    call: Call,
    problem: Problem,
    memory: Memory,
    by_torch: bool,
    make: Callable[[int], Launch] | None = None,
) -> Plan:
    """Returns the plan for one number of rows, whose launch `make` makes if a choice is known. The
    tensors of the call are not read.
    """
    recorded_shapes.note(problem)
    generation = compiling.generation  # before the kernel is looked for
    try:
        if make is not None:
            may_wait = bool(call.kernel) or call.batch_invariant
            with torch.cuda.device(problem.device), compiling.deferred(not may_wait):
                return _kernel_plan(memory, make(problem.M))
        if plan := _without_kernel(call, problem):
            return plan
        no_product = problem.K == 0 or call.alpha == 0
        if capturing(problem.device) and not (no_product or launcher.is_empty(problem)):
            raise not_ready()
        if call.kernel:
            launch = launcher.named_launcher(
                call.kernel, call.config, problem, no_product=no_product
            )
        else:
            with _deferred(call):
                launch = launcher.best_launcher(problem, call.tune, no_product=no_product)
    except CompilePending as error:
        if call.formats and fp8.formats(call.formats).block_a:
            raise
        again = partial(_plan_of, _without_tensors(call), problem, memory, by_torch=True)
        packed = launcher.packed_launcher(problem)
        if packed is not None:
            stand_in = _kernel_plan(memory, packed)
        else:
            stand_in = _fallback_plan(call, str(error), warns=False)
        if compiling.is_ahead():  # the first call is to say that it wants the kernel
            return PendingPlan(stand_in, again, -1)
        return PendingPlan(stand_in, again, generation, error.place)
    except CompileForbidden as error:
        if not by_torch or call.kernel or call.formats:
            raise
        if call.batch_invariant:
            raise invariance.unsupported(str(error)) from None
        return _fallback_plan(call, str(error))
    return _kernel_plan(memory, launch)


def _deferred(call: Call) -> contextlib.AbstractContextManager[None]:
    """Returns a context within which the kernel of a call is compiled by the worker, if torch may
    compute the call meanwhile.
    """
    named = call.kernel or (call.tune or os.environ.get("OUTBLAS_TUNE")) == "on"
    in_blocks = bool(call.formats) and fp8.formats(call.formats).block_a > 0
    return compiling.deferred(not (named or call.batch_invariant or in_blocks))


def _without_kernel(call: Call, problem: Problem) -> Plan | None:
    """Returns the plan of a call that torch computes, None for one that a kernel does. Raises
    ValueError where the named kernel does not support it.
    """
    if call.kernel:
        if reason := launcher.unsupported_reason(registry.find(call.kernel), problem):
            raise ValueError(f"kernel {call.kernel!r} {reason}")
    elif reason := launcher.no_kernel_reason(problem):
        if call.batch_invariant:
            raise invariance.unsupported(reason)
        return _fallback_plan(call, reason)
    elif reason := launcher.slower_reason(problem, call.tune):
        return _fallback_plan(call, reason, warns=False)
    return None


def _without_tensors(call: Call) -> Call:
    """Returns what a plan may keep of a call."""
    extra = None if call.extra is None else EpilogueArgs(call.extra.activation)
    return call._replace(a=_NONE, b=_NONE, c=None, out=None, extra=extra, scales=None)


def _rows_plan(call: Call, problem: Problem, sample: Tensor, by_torch: bool) -> Plan:
    """Returns a plan for any number of rows. It keeps a plan for each of the sizes that it met
    last.
    """
    tensors = call.a, None, _addend(call), sample, *call.epilogue_tensors
    spans = [_spans(t, call.a.shape[:-1]) for t in tensors]
    spans[1] = span_bytes(call.b), 0
    columns, strides = sample.shape[-1], sample.stride()[-2:]
    dtype, device, first = sample.dtype, sample.device, call.a.shape
    call = _without_tensors(call)
    plans: dict[torch.Size, Plan] = {}
    makes: dict[int, Callable[[int], Launch]] = {}  # by the number of rows at which all was chosen
    alone = frozenset() if call.kernel else launcher.tuned_rows(problem, call.tune)

    def at(sizes: torch.Size, by_torch: bool = True) -> Plan:
        if sizes in plans:
            return plans[sizes]
        size, rows = (*sizes[:-1], columns), math.prod(sizes[:-1])
        memory = Memory(
            size,
            strides if len(size) == 2 else packed_strides(size),
            dtype,
            device,
            tuple(row + (rows - 1) * step for row, step in spans),
        )
        posed = problem.resized(M=rows)
        chosen = rows if rows in alone else default_kernel.rows_of_choice(rows)
        try:
            plan = _plan_of(call, posed, memory, by_torch, makes.get(chosen))
        except ValueError:
            if chosen not in makes:
                raise
            plan = _plan_of(call, posed, memory, by_torch)  # another config supports these rows
        parts = parts_of(plan)
        if parts is not None and hasattr(parts.launch, "at_rows"):
            makes.setdefault(chosen, parts.launch.at_rows)
        remember(plans, sizes, plan, SIZES_LIMIT)
        return plan

    def execute(
        a: Tensor,
        b: Tensor,
        c: Tensor | None,
        out: Tensor | None,
        alpha: Any,
        beta: Any,
        *epilogue: Tensor | None,
    ) -> Tensor:
        plan = plans.get(a.shape) or at(a.shape)
        return plan(a, b, c, out, alpha, beta, *epilogue)

    vars(execute).update(any_rows=True, at=at, sizes=plans)
    plan = at(first, by_torch)
    if device.type == "cpu" and plan in _torch_reasons and not recorded_shapes.is_recording():
        vars(plan).update(any_rows=True)  # it knows no number of rows
        return plan
    return execute


def _spans(t: Tensor | None, rows: torch.Size) -> tuple[int, int]:
    """Returns the bytes of a tensor's first row, and from a row to the next; all bytes and 0 of one
    that rows share.
    """
    if t is None or t.dim() < 2 or t.shape[:-1] != rows or not t.numel():
        return (0 if t is None else span_bytes(t)), 0
    row = t[(0,) * len(rows)]
    return span_bytes(row), t.stride(-2) * t.element_size()


def _checked_output(call: Call) -> Tensor:
    """Returns the call's `out` after checking it, or new memory like the output."""
    shape, dtype = _output(call)
    if call.out is None:
        return call.a.new_empty(shape, dtype=dtype)
    operands.check_out(call.out, shape, dtype, call.a.device)
    return call.out


def _problem_of(call: Call, sample: Tensor, addend: Tensor | None) -> Problem:
    """Returns the problem of a call whose output has the layout of `sample`."""
    posed = operands.problem(
        call.a,
        call.b,
        sample,
        addend,
        tf32=call.a.dtype is torch.float32 and tf32_requested(),
        scaled=addend is not None or (call.c is not None and call.alpha != 1),
        batch_invariant=call.batch_invariant,
        extra=call.extra,
        scales=call.scales,
        formats=call.formats,
        weights_ready=call.weights_ready,
        power_of_two=call.power_of_two,
    )
    carveout = sm_carveout.reserved()
    return replace(posed, sm_carveout=carveout) if carveout else posed


def _kernel_plan(memory: Memory, launch: Launch) -> Plan:
    """Returns a plan that launches a kernel."""
    size, strides, dtype, device, spans = memory
    several = device.type == "cuda" and torch.cuda.device_count() > 1
    parts = KernelParts(launch, size, strides, dtype, device, several, spans)
    return partial(_execute, parts, _empty_strided[device.type])


def _execute(
    parts: KernelParts,
    empty_strided: Callable[..., Tensor],
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    out: Tensor | None,
    alpha: Any,
    beta: Any,
    *epilogue: Tensor | None,
) -> Tensor:
    """Runs a plan that launches a kernel. Allocates the output, or checks that the given one
    overlaps nothing that is read.
    """
    launch, size, strides, dtype, device, several, spans = parts
    elsewhere, is_fresh = several and _current_device() != device.index, out is None
    if out is None:
        out = (
            a.new_empty(size, dtype=dtype)
            if elsewhere or _fills_memory()
            else empty_strided(size, strides, dtype)
        )
    else:
        bytes_a, bytes_b, bytes_c, bytes_out = spans[:4]
        # Where something is written, a lazy clone gets its own memory, which starts at whole cache
        # lines as before.
        start = out.data_ptr() if bytes_out else read_address(out)
        end = start + bytes_out
        if (
            (start < read_address(a) + bytes_a and read_address(a) < end)
            or (start < read_address(b) + bytes_b and read_address(b) < end)
            or (
                bytes_c
                and c is not None
                and start < read_address(c) + bytes_c
                and read_address(c) < end
            )
        ):
            check_separate(a, b, c, out, beta)
    if epilogue and not (is_fresh and epilogue[2] is None):
        read = [*zip((a, b, c, *epilogue), (*spans[:3], *spans[4:]), strict=True)]
        output, aux = (out, spans[3]), read.pop(5)
        overlaps = may_overlap(output, aux) or any(
            may_overlap(w, x) for x in read for w in (output, aux)
        )
        if overlaps:
            check_epilogue_separate(a, b, c, out, beta, *epilogue)
    if elsewhere:
        with torch.cuda.device(device):
            launch(a, b, c, out, alpha, beta, *epilogue)
    elif epilogue:
        launch(a, b, c, out, alpha, beta, *epilogue)
    else:
        launch(a, b, c, out, alpha, beta)
    return out


def _swapped_plan(call: Call) -> Plan:
    """Returns the plan of a gated product with a vector B, computed as B times the transposed A.

    The activation of such a product pairs rows of A, but kernels pair columns of B.
    """
    if call.batch_invariant:
        raise ValueError(
            f"batch_invariant is True, but activation {call.extra and call.extra.activation!r} of "
            "a product with a vector pairs rows"
        )
    plan = _prepare(_swapped(call))

    def execute(
        a: Tensor,
        b: Tensor,
        c: Tensor | None,
        out: Tensor | None,
        alpha: Any,
        beta: Any,
        *epilogue: Tensor | None,
    ) -> Tensor:
        if out is not None:
            check_separate(a, b, c, out, beta)
        return plan(b, a.mT, c, out, alpha, beta, *epilogue)

    return execute


def _swapped(call: Call) -> Call:
    """Returns the call with B times the transposed A, for a vector B."""
    return call._replace(a=call.b, b=call.a.mT)


def _fallback_plan(call: Call, reason: str, *, warns: bool = True) -> Plan:
    """Returns a plan that calls torch functions, and warns that it does where no kernel could."""
    out_dtype, formats = call.out_dtype, call.formats
    activation = None if call.extra is None else call.extra.activation

    def execute(
        a: Tensor,
        b: Tensor,
        c: Tensor | None,
        out: Tensor | None,
        alpha: Any,
        beta: Any,
        *tensors: Tensor | None,
    ) -> Tensor:
        if warns:
            fallback.warn_fallback(reason)
        if out is not None:
            check_separate(a, b, c, out, beta)
        if activation is not None:
            extra = EpilogueArgs(activation, *tensors[:3])
            if out is not None or extra.aux is not None:
                check_epilogue_separate(a, b, c, out, beta, *tensors)
            if formats:
                scales = [t for t in tensors[3:] if t is not None]
                return fallback.scaled(a, b, out, out_dtype, formats, extra, *scales)
            return fallback.fused(a, b, c, out, alpha, beta, out_dtype, extra)
        if c is None:
            return fallback.matmul(a, b, out, out_dtype)
        return fallback.addmm(c, a, b, alpha, beta, out)

    _torch_reasons[execute] = reason
    return execute

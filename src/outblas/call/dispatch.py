"""From a call to its plan, which is made once for all similar calls and cached."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from outblas.base import forks, registry
from outblas.base.compat.torch_private import (
    any_autocast,
    autocast_off,
    fp32_precision,
)
from outblas.base.compat.torch_private import current_device as _current_device
from outblas.base.compat.torch_private import empty_strided as _empty_strided
from outblas.base.compat.torch_private import fills_memory as _fills_memory
from outblas.base.compiling import CompileForbidden
from outblas.base.cuda_graphs import capturing, not_ready
from outblas.call import fallback, invariance, launcher, recorded_shapes, sm_carveout
from outblas.call import problem as operands
from outblas.call.epilogue import EpilogueArgs
from outblas.call.errors import OperandError
from outblas.call.overlap import check_epilogue_separate, check_separate, may_overlap
from outblas.call.problem import Launch, Problem
from outblas.call.tensor_memory import alignment_class, read_address, span_bytes

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


class KernelParts(NamedTuple):
    """What the plan of a kernel does where there is no `out`: it allocates an output and launches.

    `several`: whether the process has several GPUs, so that another one may be the current one.
    """

    launch: Launch
    size: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    several: bool


_parts: WeakKeyDictionary[Plan, KernelParts] = WeakKeyDictionary()
_torch_reasons: WeakKeyDictionary[Plan, str] = WeakKeyDictionary()


def parts_of(plan: Plan) -> KernelParts | None:
    """Returns what a plan does; None for one that does more than to launch a kernel."""
    return _parts.get(plan)


def torch_reason(plan: Plan) -> str | None:
    """Returns why a plan calls torch's functions; None for one that launches a kernel."""
    return _torch_reasons.get(plan)


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


def at_rows(plan: Plan, call: Call) -> Plan:
    """Returns the plan for the sizes of a call alone, made if there is none yet; the same plan if
    that is one. `parts_of` and `torch_reason` tell about plans for one size. Raises as `run`.
    """
    at: Callable[[Call], Plan] | None = getattr(plan, "at", None)
    return plan if at is None else at(call)


# ---- the plan cache
PLAN_LIMIT = 8192  # number of entries of a plan cache; beyond it, the oldest are forgotten
_plans: dict[tuple[Any, ...], Plan] = {}
# The plan caches of torch_ops.eager and of torch_ops.aten, which compare less per call. They are
# cleared together with this one.
eager_plans: dict[tuple[Any, ...], Any] = {}
aten_plans: dict[tuple[Any, ...], Any] = {}
# Called when they are.
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
    CompileForbidden then.
    """
    key = _cache_key(call)
    plan = _plans.get(key)
    if plan is None and capturing(call.a.device):
        plan = _similar_plan(call)
    if plan is None:
        try:
            plan = _prepare(call)
        except CompileForbidden as error:
            if not by_torch or call.kernel or call.formats:
                raise
            if call.batch_invariant:
                raise invariance.unsupported(str(error)) from None
            plan = _fallback_plan(str(error), call.out_dtype, call.extra)
        remember(_plans, key, plan)
    return plan


def remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    """Adds an entry to a cache of plans, in the place of the oldest one if there are too many."""
    with _remembering:  # another thread may add an entry while the oldest one is looked for
        while key not in cache and len(cache) >= PLAN_LIMIT:
            del cache[next(iter(cache))]
        cache[key] = value


def cached_plan(call: Call) -> Plan | None:
    """Returns the cached plan of a call, if there is one."""
    return _plans.get(_cache_key(call))


def clear_cache() -> None:
    """Discards all plans, so that every call is planned again."""
    with _remembering:
        _plans.clear()
        eager_plans.clear()
        aten_plans.clear()
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
    return next((_plans[key] for key in keys if key in _plans), None)


def _cache_key(call: Call, alignments: tuple[int, ...] | None = None) -> tuple[Any, ...]:
    """Returns everything that a plan depends on. `alignments` replaces those of A and B."""
    a, c, out = call.a, call.c, call.out
    return (
        *(alignments or (alignment_class(a), alignment_class(call.b))),
        *_layout(a),
        *_layout(call.b),
        None
        if c is None
        else (*_layout(c), read_address(c) & 15, call.alpha == 1, call.alpha == 0, call.beta == 0),
        None if out is None else (*_layout(out), read_address(out) & 15),
        call.out_dtype,
        call.kernel,
        call.config,
        call.tune,
        call.batch_invariant,
        a.dtype is torch.float32 and tf32_requested(),
        None if call.extra is None else _epilogue_key(call.extra[0], call.epilogue_tensors),
        call.formats,
        call.weights_ready,
        call.power_of_two,
        sm_carveout.reserved(),
    )


def _epilogue_key(activation: str, tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    return activation, *(
        None if t is None else (*_layout(t), read_address(t) & 15) for t in tensors
    )


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device


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


def _prepare(call: Call) -> Plan:
    """Checks a call and returns the plan for calls like it."""
    sample, addend = _checked_output(call), _addend(call)
    problem = _problem_of(call, sample, addend)
    pairs_rows = problem.epilogue.gated and call.b.dim() == 1
    recorded_shapes.note(_problem_of(_swapped(call), sample, addend) if pairs_rows else problem)
    if call.kernel:
        if reason := launcher.unsupported_reason(registry.find(call.kernel), problem):
            raise ValueError(f"kernel {call.kernel!r} {reason}")
    elif reason := launcher.no_kernel_reason(problem):
        if call.batch_invariant:
            raise invariance.unsupported(reason)
        return _fallback_plan(reason, call.out_dtype, call.extra)
    elif reason := launcher.slower_reason(problem, call.tune):
        return _fallback_plan(reason, call.out_dtype, call.extra, warns=False)
    if pairs_rows:
        return _swapped_plan(call)
    no_product = problem.K == 0 or call.alpha == 0
    if capturing(problem.device) and not (no_product or launcher.is_empty(problem)):
        raise not_ready()
    if call.kernel:
        launch = launcher.named_launcher(call.kernel, call.config, problem, no_product=no_product)
    else:
        launch = launcher.best_launcher(problem, call.tune, no_product=no_product)
    return _kernel_plan(call, sample, addend, launch)


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


def _kernel_plan(call: Call, sample: Tensor, addend: Tensor | None, launch: Launch) -> Plan:
    """Returns a plan that launches a kernel. The plan allocates the output, or checks that the
    given one overlaps nothing that is read.
    """
    device, dtype = sample.device, sample.dtype
    several = device.type == "cuda" and torch.cuda.device_count() > 1
    index, empty_strided = device.index, _empty_strided[device.type]
    size, strides = tuple(sample.shape), tuple(sample.stride())
    bytes_a, bytes_b, bytes_c, bytes_out, *bytes_epilogue = (
        0 if t is None else span_bytes(t)
        for t in (call.a, call.b, addend, sample, *call.epilogue_tensors)
    )
    # Where something is written, a lazy clone gets its own memory, which starts at whole cache
    # lines as before.
    address = Tensor.data_ptr if bytes_out else read_address

    def execute(
        a: Tensor,
        b: Tensor,
        c: Tensor | None,
        out: Tensor | None,
        alpha: Any,
        beta: Any,
        *epilogue: Tensor | None,
    ) -> Tensor:
        elsewhere, is_fresh = several and _current_device() != index, out is None
        if out is None:
            out = (
                a.new_empty(size, dtype=dtype)
                if elsewhere or _fills_memory()
                else empty_strided(size, strides, dtype)
            )
        else:
            start = address(out)
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
            written = (out, bytes_out), (epilogue[2], bytes_epilogue[2])
            sizes = bytes_a, bytes_b, bytes_c, *bytes_epilogue
            read = zip((a, b, c, *epilogue), sizes, strict=True)
            if any(may_overlap(w, x) for x in read for w in written if w[0] is not x[0]):
                check_epilogue_separate(a, b, c, out, beta, *epilogue)
        if elsewhere:
            with torch.cuda.device(device):
                launch(a, b, c, out, alpha, beta, *epilogue)
        elif epilogue:
            launch(a, b, c, out, alpha, beta, *epilogue)
        else:
            launch(a, b, c, out, alpha, beta)
        return out

    _parts[execute] = KernelParts(launch, size, strides, dtype, device, several)
    return execute


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


def _fallback_plan(
    reason: str, out_dtype: torch.dtype | None, extra: EpilogueArgs | None, *, warns: bool = True
) -> Plan:
    """Returns a plan that calls torch functions, and warns that it does where no kernel could."""

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
        if extra is not None:
            given = EpilogueArgs(extra.activation, *tensors)
            if out is not None or given.aux is not None:
                check_epilogue_separate(a, b, c, out, beta, *tensors)
            return fallback.fused(a, b, c, out, alpha, beta, out_dtype, given)
        if c is None:
            return fallback.matmul(a, b, out, out_dtype)
        return fallback.addmm(c, a, b, alpha, beta, out)

    _torch_reasons[execute] = reason
    return execute

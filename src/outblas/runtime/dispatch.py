"""From a call to a launch: chooses the kernel, plans once per kind of call, and remembers
the plan.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..core import configs, invariance, registry, tensor_memory
from ..core import problem as operands
from ..core.epilogue import NONE, Epilogue, EpilogueArgs, apply
from ..core.errors import OperandError
from ..core.problem import Problem
from ..core.tensor_memory import read_address
from . import default_kernel, fallback
from .cuda_graphs import capturing, not_ready

Tensor = torch.Tensor

# What Inductor's graphs allocate with: less than half of what new_empty costs, and like it in all
# but deterministic fills. Sizes and strides must be tuples, and the GPU is the current one.
_EMPTY = {
    "cpu": torch._C._dynamo.guards._empty_strided_cpu,  # type: ignore[attr-defined]
    "cuda": torch._C._dynamo.guards._empty_strided_cuda,  # type: ignore[attr-defined]
}
_filled = torch._C._get_deterministic_algorithms  # whether memory may have to be filled
fp32_precision = (
    torch._C._get_fp32_precision_getter
)  # torch.backends takes six times as long to ask it
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class Call(NamedTuple):
    """out = alpha A B + beta C by the named kernel ("": the best known), C absent for matmul.
    `tune`: one of "off", "lookup", "on", or "" for what OUTBLAS_TUNE says. `batch_invariant`: a
    row's bits depend on no other row. `extra`: the epilogue, if there is more to it than alpha and
    C, in which case C has the shape of x.
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
    scales: tuple[Tensor, Tensor] | None = (
        None  # of fp8 operands, whose `formats` are as in `Problem`
    )
    formats: str = ""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Of the epilogue, as a launch takes them behind the others."""
        return () if self.extra is None else (*self.extra[1:], *(self.scales or ()))


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)

# plan(a, b, c, out, alpha, beta) → out; of a call with an epilogue bias, residual and aux follow
Plan = Callable[..., Tensor]

_plans: dict[tuple[Any, ...], Plan] = {}
ways: dict[tuple[Any, ...], Any] = {}  # of eager.py to these plans
_PLAN_LIMIT = 8192  # kinds of call remembered; beyond it, start over


def run(call: Call) -> Tensor:
    """Runs a call as planned for its kind. Raises ValueError for operands that do not fit together,
    RuntimeError in a capture of a CUDA graph where its kernel is not planned yet.
    """
    key = _kind(call)
    plan = _plans.get(key)
    if plan is None and capturing(call.a.device):
        plan = _alike(call)
    if plan is None:
        if len(_plans) >= _PLAN_LIMIT:
            forget()
        plan = _plans[key] = _prepare(call)
    if (
        call.out is not None and torch._C._is_any_autocast_enabled()
    ):  # such calls cast nothing, and torch's would
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return plan(call.a, call.b, call.c, call.out, call.alpha, call.beta, *call.tensors)
    return plan(call.a, call.b, call.c, call.out, call.alpha, call.beta, *call.tensors)


def planned(call: Call) -> Plan | None:
    """The plan of a call, if it has one."""
    return _plans.get(_kind(call))


def _alike(call: Call) -> Plan | None:
    """The plan of a call that differs in whether it is given new memory for its output, or in where
    operands lie in lines: right for this one, maybe not the fastest.
    """
    shape, dtype = _output(call)
    fresh = call.a.new_empty(shape, dtype=dtype)
    calls = [call]
    if call.out is None or (
        _traits(call.out) == _traits(fresh) and not read_address(call.out) & 15
    ):
        calls.append(call._replace(out=fresh if call.out is None else None))
    places = [
        (0, 16) if place in (0, 16) else (place,)
        for place in map(tensor_memory.alignment_class, (call.a, call.b))
    ]
    found = (_plans.get(_kind(each, pair)) for each in calls for pair in itertools.product(*places))
    return next((plan for plan in found if plan is not None), None)


def _kind(call: Call, places: tuple[int, ...] | None = None) -> tuple[Any, ...]:
    """All that a plan depends on. `places`: of A and B, if not their own."""
    a, c, out = call.a, call.c, call.out
    return (
        *(places or (tensor_memory.alignment_class(a), tensor_memory.alignment_class(call.b))),
        *_traits(a),
        *_traits(call.b),
        None
        if c is None
        else (*_traits(c), read_address(c) & 15, call.alpha == 1, call.alpha == 0, call.beta == 0),
        None if out is None else (*_traits(out), read_address(out) & 15),
        call.out_dtype,
        call.kernel,
        call.config,
        call.tune,
        call.batch_invariant,
        a.dtype is torch.float32 and tf32_requested(),
        None if call.extra is None else _extra_kind(call.extra[0], call.tensors),
        call.formats,
    )


def _extra_kind(activation: str, tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    return activation, *(
        None if t is None else (*_traits(t), read_address(t) & 15) for t in tensors
    )


def forget() -> None:
    """Plans every kind of call anew from now on."""
    _plans.clear()
    ways.clear()


def _traits(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device


def tf32_requested() -> bool:
    """Whether torch's own settings ask for tf32 in CUDA fp32 products."""
    return fp32_precision("cuda", "matmul") == "tf32"


def _output(call: Call) -> tuple[Any, torch.dtype]:
    """Shape and dtype. Raises ValueError for operands that do not fit together."""
    a, c = call.a, call.c
    shape = operands.check_product(a, call.b, c)
    dtype = (
        call.out_dtype
        if call.formats and call.out_dtype
        else operands.check_out_dtype(call.out_dtype, a.dtype)
    )
    if c is not None and dtype != a.dtype:
        raise OperandError(
            f"out_dtype is {dtype}, expected {a.dtype}, the dtype of the operands, with an addend"
        )
    if call.extra is not None:
        shape = operands.check_epilogue_args(call.extra, shape, dtype, a.device)
    return shape, dtype


def _prepare(call: Call) -> Plan:
    """Checks the call and decides how calls like it run."""
    a, b, c, out = call.a, call.b, call.c, call.out
    shape, dtype = _output(call)
    if out is not None:
        operands.check_out(out, shape, dtype, a.device)
    addend = None if c is None or call.beta == 0 else c
    sample = a.new_empty(shape, dtype=dtype) if out is None else out
    scaled = addend is not None or (c is not None and call.alpha != 1)
    tf32 = a.dtype is torch.float32 and tf32_requested()
    problem = operands.problem(
        a,
        b,
        sample,
        addend,
        tf32=tf32,
        scaled=scaled,
        batch_invariant=call.batch_invariant,
        extra=call.extra,
        scales=call.scales,
        formats=call.formats,
    )

    if call.kernel:
        record = registry.find(call.kernel)
        if reason := lacks(record, problem):
            raise ValueError(f"kernel {call.kernel!r} {reason}")
    elif reason := _no_default(problem):
        if call.batch_invariant:
            raise invariance.refusal(reason)
        return _by_torch(reason, call.out_dtype, call.extra)
    if problem.epilogue.gated and b.dim() == 1:
        return _turned(call)
    nothing = problem.K == 0 or call.alpha == 0
    if capturing(problem.device) and not (nothing or 0 in (problem.M, problem.N, *problem.batch)):
        raise not_ready()
    if call.kernel:
        launch = _launcher(call.kernel, call.config, problem, nothing=nothing)
    else:
        launch = _best_launcher(problem, call.tune, nothing=nothing)
    fused = problem.epilogue != NONE  # an operator's call may bring an epilogue of nothing
    device, index = problem.device, problem.device.index
    several = device.type == "cuda" and torch.cuda.device_count() > 1
    empty, size, steps = _EMPTY[device.type], tuple(sample.shape), tuple(sample.stride())
    bytes_a, bytes_b, bytes_c, bytes_out, *bytes_extra = (
        0 if t is None else tensor_memory.span_bytes(t)
        for t in (a, b, addend, sample, *call.tensors)
    )
    # Where something is to be written, a lazy clone gets memory of its own, which begins as it did
    # at whole lines.
    address = Tensor.data_ptr if bytes_out else read_address

    def execute(
        a: Tensor,
        b: Tensor,
        c: Tensor | None,
        out: Tensor | None,
        alpha: Any,
        beta: Any,
        *extra: Tensor | None,
    ) -> Tensor:
        elsewhere, own = several and _current_device() != index, out is None
        if out is None:
            out = (
                a.new_empty(size, dtype=dtype)
                if elsewhere or _filled()
                else empty(size, steps, dtype)
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
        if extra and not (own and extra[2] is None):
            written = (out, bytes_out), (extra[2], bytes_extra[2])
            read = zip((a, b, c, *extra), (bytes_a, bytes_b, bytes_c, *bytes_extra), strict=True)
            if any(_near(w, x) for x in read for w in written if w[0] is not x[0]):
                check_extra_separate(a, b, c, out, beta, *extra)
        if elsewhere:
            with torch.cuda.device(device):
                launch(a, b, c, out, alpha, beta, *(extra if fused else ()))
        elif fused:
            launch(a, b, c, out, alpha, beta, *extra)
        else:
            launch(a, b, c, out, alpha, beta)
        return out

    return execute


def _turned(call: Call) -> Plan:
    """The plan of a gated product with a vector B: it pairs what are rows of A, and kernels pair
    columns of B, so it is that of B and the transposed A.
    """
    if call.batch_invariant:
        raise ValueError(
            f"batch_invariant is True, and activation {call.extra and call.extra.activation!r} of "
            "a product with a "
            "vector pairs rows"
        )
    plan = _prepare(call._replace(a=call.b, b=call.a.mT))

    def execute(
        a: Tensor,
        b: Tensor,
        c: Tensor | None,
        out: Tensor | None,
        alpha: Any,
        beta: Any,
        *extra: Tensor | None,
    ) -> Tensor:
        if out is not None:
            check_separate(a, b, c, out, beta)
        return plan(b, a.mT, c, out, alpha, beta, *extra)

    return execute


def _near(written: tuple[Tensor | None, int], read: tuple[Tensor | None, int]) -> bool:
    """Whether the bytes between first and last element of two tensors meet."""
    if written[0] is None or read[0] is None or not written[1]:
        return False
    first, second = written[0].data_ptr(), read_address(read[0])
    return first < second + read[1] and second < first + written[1]


def check_separate(a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, beta: Any) -> None:
    """`out` may be `c` itself, and otherwise shares memory with no operand that is read."""
    operands.check_overlap(out, a=a, b=b)
    if c is not None and beta != 0 and out.numel():
        same = (
            out.data_ptr() == read_address(c)
            and c.shape == out.shape
            and c.stride() == out.stride()
        )
        if not same:
            operands.check_overlap(out, c=c)


def check_extra_separate(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    out: Tensor | None,
    beta: Any,
    bias: Tensor | None,
    residual: Tensor | None,
    aux: Tensor | None,
) -> None:
    """`out` and `aux` share memory with nothing that is read, nor with each other."""
    if out is not None:
        operands.check_overlap(out, bias=bias, residual=residual, aux=aux)
    if aux is not None:
        read = c if beta != 0 else None
        operands.check_overlap(aux, "aux", a=a, b=b, c=read, bias=bias, residual=residual)


def _by_torch(reason: str, out_dtype: torch.dtype | None, extra: EpilogueArgs | None) -> Plan:
    def execute(
        a: Tensor,
        b: Tensor,
        c: Tensor | None,
        out: Tensor | None,
        alpha: Any,
        beta: Any,
        *tensors: Tensor | None,
    ) -> Tensor:
        fallback.notice(reason)
        if out is not None:
            check_separate(a, b, c, out, beta)
        if extra is not None:
            given = EpilogueArgs(extra.activation, *tensors)
            if out is not None:
                check_extra_separate(a, b, c, out, beta, *tensors)
            return fallback.fused(a, b, c, out, alpha, beta, out_dtype, given)
        if c is None:
            return fallback.matmul(a, b, out, out_dtype)
        return fallback.addmm(c, a, b, alpha, beta, out)

    return execute


def lacks(record: registry.Kernel, problem: Problem) -> str | None:
    """What a kernel needs, by its record, that this call does not have: device, architecture,
    dtype.
    """
    if reason := lacks_device(record, problem.device):
        return reason
    name = operands.dtype_name(problem.dtype)
    if name not in record.dtypes:
        return f"needs operands of dtype {' or '.join(record.dtypes)}, and was given {name}"
    return None


def lacks_device(record: registry.Kernel, device: torch.device) -> str | None:
    """What a kernel needs that this device is not, or None."""
    if device.type == "cpu":
        return None if record.dsl == "triton" else "needs an NVIDIA GPU, and was given CPU tensors"
    if torch.version.cuda is None:
        return "needs an NVIDIA GPU, and torch was built for another"
    major, minor = torch.cuda.get_device_capability(device)
    arch = 10 * major + minor
    if arch >= record.min_arch and (record.max_arch is None or arch <= record.max_arch):
        return None
    if record.max_arch == record.min_arch:
        wanted = f"sm_{record.min_arch}"
    else:
        wanted = f"sm_{record.min_arch} " + (
            "or newer" if record.max_arch is None else f"to sm_{record.max_arch}"
        )
    return f"needs {wanted}, and {torch.cuda.get_device_name(device)} is sm_{arch}"


def _no_default(problem: Problem) -> str | None:
    """Why a call that names no kernel goes to torch."""
    if problem.device.type == "cpu":
        return "CPU tensors"
    if reason := lacks(registry.find("portable"), problem):
        return f"the portable kernel {reason}"
    try:
        module = registry.load("portable")
    except ImportError as error:
        return str(error)
    return _unsupported(module, problem, None)


def _unsupported(module: ModuleType, problem: Problem, config: Any) -> str | None:
    reason: str | None = module.unsupported(problem, config)
    return reason


def _best_launcher(problem: Problem, tune: str, *, nothing: bool) -> Callable[..., None]:
    """The launch of the best kernel known: tuned, else by a rule that covers every call. What was
    tuned depends on M: a batch-invariant product takes the rule's.
    """
    if nothing or 0 in (problem.M, problem.N, *problem.batch):
        return _launcher("portable", "", problem, nothing=nothing)
    if problem.device.type == "cuda" and not (problem.batch or problem.batch_invariant):
        from ..autotune import automatic

        # Of fp8 operands, what was tuned for words of as many bytes.
        known = replace(problem, out_dtype=problem.dtype) if problem.formats else problem
        for kernel, config in automatic.choices(known, tune):
            try:
                if lacks(registry.find(kernel), problem) is None:
                    return _launcher(kernel, config, problem, nothing=False)
            except (
                ValueError,
                ImportError,
            ):  # the call is none for this kernel, or for this config
                continue
            except Exception as error:
                fallback.complain(
                    f"{kernel}[{config}], which was tuned for this call, fails: {error}"
                )
    default = default_kernel.kernel_for(problem)
    if default != "portable" and not problem.batch_invariant:
        try:
            return _launcher(default, "", problem, nothing=False)
        except ImportError as error:
            fallback.complain(str(error))
        except ValueError:  # the call is none for this kernel
            pass
        default = "portable"
    return _launcher(default, "", problem, nothing=False)


def _launcher(kernel: str, config: str, problem: Problem, *, nothing: bool) -> Callable[..., None]:
    """The launch of a named kernel, or what stands for it when there is nothing to write or to
    multiply.
    """
    module = registry.load(kernel)
    chosen = configs.from_text(module.Config, config) if config else None
    if problem.batch_invariant and not getattr(module, "BATCH_INVARIANT", False):
        raise ValueError(
            f"kernel {kernel!r} does not promise batch_invariant=True: the bits of a row may "
            "depend on M with it"
        )
    if problem.formats and not getattr(module, "FP8", False):
        raise ValueError(
            f"kernel {kernel!r} takes no fp8 operands, and was given {problem.formats}"
        )
    if problem.epilogue != NONE and not getattr(module, "EPILOGUES", False):
        raise ValueError(
            f"kernel {kernel!r} has no epilogue beside alpha and C, and was given "
            f"{problem.epilogue}"
        )
    if 0 in (problem.M, problem.N, *problem.batch):
        return lambda *_: None
    if nothing:
        return (
            _scale if problem.epilogue == NONE else functools.partial(_only_added, problem.epilogue)
        )
    if reason := _unsupported(module, problem, chosen):
        raise ValueError(f"kernel {kernel!r}: {reason}")
    with (
        contextlib.nullcontext()
        if problem.device.type == "cpu"
        else torch.cuda.device(problem.device)
    ):
        launch: Callable[..., None] = module.plan(problem, chosen)
    return launch


def _scale(a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: Any, beta: Any) -> None:
    """K = 0 or alpha = 0: the product is zero, whatever A and B hold."""
    if c is None or beta == 0:
        out.zero_()
    else:
        torch.mul(c.expand_as(out), beta, out=out)


def _only_added(
    epilogue: Epilogue,
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    out: Tensor,
    alpha: Any,
    beta: Any,
    bias: Tensor | None,
    residual: Tensor | None,
    aux: Tensor | None,
) -> None:
    """As `_scale`, with what follows the product."""
    shape = (*out.shape[:-1], out.shape[-1] * (2 if epilogue.gated else 1))
    x = torch.zeros(shape, dtype=torch.float32, device=out.device)
    if c is not None and beta != 0:
        x += beta * c.float()
    if bias is not None:
        x += bias.float()
    if aux is not None:
        aux.copy_(x)
    out.copy_(apply(x, epilogue.activation, None if residual is None else residual.float()))

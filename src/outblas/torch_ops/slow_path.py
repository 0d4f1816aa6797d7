"""The slow path: calls without a cached plan, which go to an operator, to torch, or to the tensor
types that override the call.
"""

import operator
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, handle_torch_function

from outblas.base.compat.torch_private import (
    as_plain,
    forward_levels,
    has_override,
    overrides_enabled,
    transform_level,
    without_overrides,
)
from outblas.call import epilogue, fallback, invariance, problem
from outblas.call.context_flag import check_bool
from outblas.call.errors import OperandError
from outblas.call.overlap import check_epilogue_separate, check_separate
from outblas.torch_ops import ops
from outblas.torch_ops.call import (
    NO_CHOICE,
    OPERANDS,
    PLAIN,
    Arguments,
    OperatorChoice,
    check_linear,
    check_result,
    check_written,
    checked_choice,
    checked_kernel,
    checked_tune,
    has_address,
    has_plain_values,
    is_autocast,
    is_lazy_view,
    is_plain_scalar,
    is_plain_type,
    is_traced,
    product_shape,
    scalar,
)
from outblas.torch_ops.eager import overriding_mode

Tensor = torch.Tensor

# The public functions by name, registered by `api`; tensor types are asked to override them.
public_functions: dict[str, Callable[..., Tensor]] = {}


def run(call: Arguments) -> Tensor:
    """Runs a call that has no cached plan."""
    if call.function == "addmm" and call.c is None:
        problem.check_tensor(OPERANDS["addmm"]["c"], None)
    if is_traced():
        return _run_checked(call)
    if has_override(*call.all_tensors()):
        types = {type(t) for t in call.all_tensors() if t is not None}
        if overriding_mode() or (overrides_enabled() and not types.issubset(PLAIN)):
            return _run_overridden(call)
        if without_overrides is not None:
            with without_overrides():  # a default device does not change the call
                return run(call)
    try:
        return _run_checked(call)
    except OperandError as error:
        error.rename(OPERANDS[call.function])
        raise


# ---- types that override the call
class _Offer(threading.local):
    """The call that the types of its operands are being asked to override."""

    call: Arguments | None = None


_offer = _Offer()


class _Unanswered(BaseException):
    """Raised where the type of an operand does not know the public function that it was offered
    and calls it with overrides switched off. The type may know torch's function.
    """


def _run_overridden(call: Arguments) -> Tensor:
    """Runs the call through torch's override protocol: function modes, then the types of its
    operands.
    """
    public, tensors = public_functions[call.function], call.tensors()
    keywords: dict[str, Any] = dict(tensors)
    operands = [keywords.pop(name) for name in OPERANDS[call.function].values()]
    options = {
        "out_dtype": call.out_dtype,
        "activation": call.given.activation,
        **call.choice._asdict(),
    }
    keywords |= {name: value for name, value in options.items() if value is not None}
    if call.function == "addmm":
        scalars = {"alpha": call.alpha, "beta": call.beta}
        keywords |= {
            name: value
            for name, value in scalars.items()
            if not (is_plain_scalar(value) and value == 1)
        }
    # Types that were asked, or must not be, are not offered the call by a mode either.
    before, _offer.call = _offer.call, call if overrides_enabled() else None
    try:
        result: Tensor = handle_torch_function(public, tensors.values(), *operands, **keywords)
        return result
    except _Unanswered:
        pass
    except TypeError as error:
        if not str(error).startswith(
            f"no implementation found for '{public.__module__}.{public.__name__}'"
        ):
            raise
    finally:
        _offer.call = before
    try:
        cause = _foreign_reason(tensors.values()) or "operands that override functions of torch"
        return _run_as_given(call, cause)
    except OperandError as error:
        error.rename(OPERANDS[call.function])
        raise


def _foreign_reason(tensors: Iterable[Tensor], were_asked: bool = False) -> str | None:
    """Returns why an operand must reach torch unchanged, or None. The attributes of such an operand
    may not describe it correctly.

    were_asked: whether types that override functions of torch have been asked, or must not be.
    """
    is_plain = has_plain_values if were_asked else is_plain_type
    for t in tensors:
        if not is_plain(type(t)):
            kind = "tensor subclass" if isinstance(t, Tensor) else "operands of type"
            return f"{kind} {type(t).__name__}"
        if t.is_nested:
            return "tensors of layout nested"
    return None


def _run_as_given(call: Arguments, cause: str) -> Tensor:
    """Computes the product by a torch function on the operands as given, then the epilogue by other
    torch functions.
    """
    problem.check_activation(call.given.activation)
    checked_tune(call.choice.tune)
    # reads properties of the operands without asking their types
    autocast = as_plain(_check_as_given, call)
    is_torchs = as_plain(_foreign_reason, call.tensors().values(), True)
    if is_torchs or call.out is not None or call.given.aux is not None or call.out_dtype:
        as_plain(_hand_to_torch, call, cause)
        return _torch_on_whole(call, autocast)
    default = _Default(call)
    with default:
        result = _torch_on_whole(call, autocast)
    if not default.has_run:
        as_plain(_hand_to_torch, call, cause)
    return result


class _Default(TorchFunctionMode):
    """Computes by our function what types that are offered torch's leave to
    `super().__torch_function__`.

    has_run: whether they left it.
    """

    def __init__(self, call: Arguments) -> None:
        super().__init__()
        module: Any = torch.nn.functional if call.function == "linear" else torch
        self.has_run = False
        self._operands = [call.a, call.b] if call.c is None else [call.c, call.a, call.b]
        self._of_torch = getattr(module, call.function)
        self._ours = public_functions[call.function]
        self._choice = {k: v for k, v in call.choice._asdict().items() if v is not None}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_call = func is self._of_torch and all(map(operator.is_, args, self._operands))
        if not is_call:
            return func(*args, **kwargs)
        if types and overrides_enabled():
            return NotImplemented  # so that torch asks the types
        self.has_run = True
        return self._ours(*args, **kwargs, **self._choice)


def _check_as_given(call: Arguments) -> str:
    """Checks what torch functions will not check, as for plain tensors. Returns the result of
    `_autocast_off`.

    The epilogue and `out` are checked only where the operands' reported shapes fit together. Where
    they do not, torch raises, or the operands' types know better.
    """
    tensors = call.tensors().values()
    if not all(isinstance(t, Tensor) for t in tensors):
        return ""
    if call.c is not None:
        scalar("alpha", call.alpha, call.a.dtype)
        scalar("beta", call.beta, call.a.dtype)
    check_written(call)
    a, device = call.a, call.a.device.type
    casts = is_autocast(a) and call.out is None and call.given.aux is None
    narrows = casts and fallback.autocasts(a, device)
    dtype = problem.check_out_dtype(
        call.out_dtype, torch.get_autocast_dtype(device) if narrows else a.dtype
    )
    if not (casts or any(t.is_nested for t in tensors)):
        try:
            shape = product_shape(call)
        except OperandError:
            shape = None
        if shape is not None:
            check_result(call, shape, dtype)
    return _autocast_off(call)


def _autocast_off(call: Arguments) -> str:
    """Returns the device type whose autocast must be off while torch computes the call, or "".

    Calls that write to tensors cast nothing, and calls with an out_dtype return that dtype.
    """
    asks = call.out is not None or call.given.aux is not None or call.out_dtype is not None
    return call.a.device.type if asks and is_autocast(call.a) else ""


# ---- operators
def _run_checked(call: Arguments) -> Tensor:
    """Checks the arguments, then runs the call by an operator or by torch."""
    a, b, c, out = call.a, call.b, call.c, call.out
    if call.choice.batch_invariant is not None:
        check_bool(call.choice.batch_invariant, "batch_invariant")
    tensors = call.tensors()
    for name, t in tensors.items():
        problem.check_tensor(name, t)
    cause = _foreign_reason(tensors.values())
    if cause and not overrides_enabled():
        offered = None if is_traced() else _offer.call
        if offered and offered.function == call.function and offered.a is a and offered.b is b:
            raise _Unanswered
        cause = _foreign_reason(tensors.values(), were_asked=True)
    if cause:
        return _run_as_given(call, cause)
    activation = problem.check_activation(call.given.activation)
    if c is not None:
        alpha, beta = scalar("alpha", call.alpha, a.dtype), scalar("beta", call.beta, a.dtype)
        call = call._replace(alpha=alpha, beta=beta)
    check_written(call)
    if is_lazy_view(out) and not call.has_epilogue():
        return _run_to_lazy_view(call, out)
    if not is_autocast(a):
        problem.check_out_dtype(call.out_dtype, a.dtype)
    choice = checked_choice(call.choice)
    if call.function == "linear":
        check_linear(a, b)
    if cause := _outside_operators_reason(call, tensors.values()):
        return _run_by_torch(call, cause)
    if call.function == "linear":
        b = b.t()
    if call.has_epilogue():
        return _run_gemm(call, b, activation, choice)
    return _run_bare(call, b, choice)


def _run_to_lazy_view(call: Arguments, out: Tensor) -> Tensor:
    """Computes a call whose `out` is a lazily negated or conjugated view into new memory, then
    copies it.
    """
    if all(map(has_address, call.tensors().values())):
        c = None if out is call.c else call.c
        problem.check_overlap(out, a=call.a, b=call.b, c=c)
    fresh = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    return out.copy_(_run_checked(call._replace(out=fresh)))


def _run_bare(call: Arguments, b: Tensor, choice: OperatorChoice) -> Tensor:
    """Runs a product without an epilogue besides alpha and C."""
    a, c, out = call.a, call.c, call.out
    result: Tensor
    if c is not None:
        if out is None:
            result = ops.addmm(c, a, b, call.alpha, call.beta, *choice)
            return result
        ops.addmm_out(c, a, b, out, call.alpha, call.beta, *choice)
        return out
    plain = call.out_dtype is None and choice == NO_CHOICE
    options = () if plain else (call.out_dtype, *choice)
    if out is None:
        result = ops.matmul(a, b, *options)
        return result
    ops.matmul_out(a, b, out, *options)
    return out


def _run_gemm(call: Arguments, b: Tensor, activation: str, choice: OperatorChoice) -> Tensor:
    """Runs a product with an epilogue."""
    a, c, out = call.a, call.c, call.out
    _, bias, residual, aux = call.given
    options = c, bias, residual, call.alpha, call.beta, activation, call.out_dtype, *choice
    if out is None and aux is None:
        result: Tensor = ops.gemm(a, b, *options)
        return result
    if out is None:
        shape = epilogue.check_columns(activation, problem.check_product(a, b, c))
        out = a.new_empty(shape, dtype=call.out_dtype)
    ops.gemm_out(out, aux, a, b, *options)
    return out


def _outside_operators_reason(call: Arguments, tensors: Iterable[Tensor]) -> str | None:
    """Returns why a call must not reach the operators, or None. They need strided tensors, and do
    not support forward-mode gradients.
    """
    for t in tensors:
        if not (t.is_cuda or t.is_cpu):
            return f"{t.device.type} tensors"
        if t.layout is not torch.strided:
            return f"tensors of layout {t.layout}"
    if forward_levels._current_level >= 0:
        return "forward-mode gradients"
    if (
        (call.out is None and call.given.aux is None)
        or torch.compiler.is_compiling()
        or transform_level() is None
    ):
        return None
    return "torch.func transforms of a call that writes to its arguments"


# ---- torch
def _run_by_torch(call: Arguments, cause: str) -> Tensor:
    """Runs a call by torch functions: its tensors are plain and checked, but the operators do not
    support them.
    """
    a, b, c, out = call.a, call.b, call.c, call.out
    check_result(call, product_shape(call), problem.check_out_dtype(call.out_dtype, a.dtype))
    _hand_to_torch(call, cause)
    autocast = _autocast_off(call)
    if call.function == "linear" or autocast:
        return _torch_on_whole(call, autocast)
    if call.has_epilogue():
        return fallback.fused(a, b, c, out, call.alpha, call.beta, call.out_dtype, call.extra())
    if c is None:
        return fallback.matmul(a, b, out, call.out_dtype)
    return fallback.addmm(c, a, b, call.alpha, call.beta, out)


def _torch_on_whole(call: Arguments, autocast: str) -> Tensor:
    """Calls `fallback.whole` for a call."""
    return fallback.whole(
        call.function,
        call.a,
        call.b,
        call.c,
        call.out,
        call.alpha,
        call.beta,
        call.out_dtype,
        call.extra(),
        autocast,
    )


def _hand_to_torch(call: Arguments, cause: str) -> None:
    """Warns that torch computes a call, after checking that it may.

    Raises ValueError where a kernel is named or batch invariance requested, OperandError where
    tensors overlap.
    """
    kernel, _ = checked_kernel(call.choice.kernel, call.choice.config)
    if kernel:
        raise ValueError(f"kernel {kernel!r} needs plain tensors, but was given {cause}")
    if invariance.wanted(call.choice.batch_invariant):
        raise invariance.unsupported(cause)
    _, bias, residual, aux = call.given
    writes = call.out is not None or aux is not None
    if (
        writes
        and not torch.compiler.is_compiling()
        and all(map(has_address, call.tensors().values()))
    ):
        read = call.a, call.b, call.c
        if call.out is not None:
            check_separate(*read, call.out, call.beta)
        check_epilogue_separate(*read, call.out, call.beta, bias, residual, aux)
    fallback.warn_fallback(cause)

"""The public calls: they take the short way, or check what they are given and reach the operators,
or hand it to torch.

Gradients, autocast and vmap are the operators' own, and so are torch.compile and torch.export. What
overrides functions of torch (`torch.overrides`) overrides these.
"""

import math
import numbers
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function_variadic

from .core import configs, epilogue, invariance, problem, registry, tensor_memory
from .core.arguments import renamed, show_signature
from .core.epilogue import ACTIVATIONS, EpilogueArgs
from .core.errors import A, B, OperandError
from .core.invariance import wanted
from .runtime import fallback
from .runtime.default_kernel import MODES
from .runtime.dispatch import check_extra_separate, check_separate
from .torch_ops import autocast_vmap, autograd, ops
from .torch_ops.eager import function_modes, overriding_mode, run

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
_traced = torch.compiler.is_dynamo_compiling
_functions_on = torch._C._is_torch_function_enabled

# Whatever stands for a plain tensor while a program is traced, and is one to operators.
_PLAIN = Tensor, Parameter, FakeTensor, FunctionalTensor
_REGISTERED = autograd, autocast_vmap  # with the operators, when imported

# The parameters that are operands A, B and C of the operators, and the keywords that stand for
# them.
_OPERANDS = {
    "matmul": {"a": "input", "b": "other"},
    "addmm": {"c": "input", "a": "mat1", "b": "mat2"},
    "linear": {"a": "input", "b": "weight"},
}
_ALIASES = _OPERANDS | {"linear": {"x": "input", "w": "weight"}}
_DEFAULT_CHOICE = (
    "",
    "",
    "",
    None,
)  # kernel, config, tune and batch_invariant as operators take them
_REQUIRED: Any = None  # the default of a parameter that may come under its other name


class _Call(NamedTuple):
    """The arguments of `function`. `b` is the weight of linear, as it came."""

    function: str
    a: Tensor
    b: Tensor
    c: Tensor | None
    out: Tensor | None
    alpha: Any
    beta: Any
    out_dtype: torch.dtype | None
    activation: str | None
    bias: Tensor | None
    residual: Tensor | None
    aux: Tensor | None
    kernel: str | None
    config: Any
    tune: str | None
    batch_invariant: bool | None

    def tensors(self) -> dict[str, Tensor]:
        """Those that there are, and A and B, by the names of their parameters."""
        names = _OPERANDS[self.function]
        rest = {"bias": self.bias, "residual": self.residual, "out": self.out, "aux": self.aux}
        given = {} if self.c is None else {names["c"]: self.c}
        given |= {names["a"]: self.a, names["b"]: self.b}
        return given | {name: t for name, t in rest.items() if t is not None}

    def extra(self) -> EpilogueArgs:
        return EpilogueArgs(self.activation or "", self.bias, self.residual, self.aux)

    def bare(self) -> bool:
        """Whether there is no epilogue beside alpha and C."""
        return (
            self.activation is None
            and self.bias is None
            and self.residual is None
            and self.aux is None
        )


def matmul(
    input: Tensor = _REQUIRED,
    other: Tensor = _REQUIRED,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    aux: Tensor | None = None,
    kernel: str | None = None,
    config: Any = None,
    tune: str | None = None,
    batch_invariant: bool | None = None,
    **aliases: Tensor,
) -> Tensor:
    """The matrix product of two tensors, with the shapes, broadcasting and dtype rules of
    `torch.matmul`.

    Args:
        input: (K), (M, K) or (..., M, K); float16, bfloat16 or float32 on an NVIDIA GPU, any
            strides.
        other: (K), (K, N) or (..., K, N), of the dtype and device of input, any strides.
        out: where the product goes: of its exact shape and dtype, with any strides that keep
            elements apart, sharing no memory with input or other.
        out_dtype: dtype of the product: that of input (the default), or float32 for 16-bit
            operands.
        bias: added to the product; of its dtype, and a shape that broadcasts to it: (N) for a value
            of each column, (M, 1) for one of each row.
        activation: of the product and its bias: "relu", "gelu" (by erf), "gelu_tanh", "silu"; or of
            a gated pair "reglu", "geglu", "geglu_tanh", "swiglu": the activation of the first half
            of the columns times the second half, so that N/2 columns come out.
        residual: added after the activation; of the product's dtype, broadcasts to the output.
        aux: where the product and its bias go as they are before the activation, for a backward
            pass; as `out`.
        kernel: a name from `outblas list`; by default the best kernel known. A named kernel runs or
            raises, it never falls back. "portable" takes CPU tensors too, through Triton's
            interpreter.
        config: the named kernel's configuration, e.g.
            `outblas.hopper.config.HopperConfig(tile_m=128)`.
        tune: how the kernel is chosen where none is named: "off", by a fixed rule; "lookup", by
            what was tuned here and by the tables that come along; "on", as "lookup", after tuning
            shapes when they are first met (seconds to a minute each). By default what OUTBLAS_TUNE
            says, or "lookup".
        batch_invariant: whether the bits of a row of the product are to depend on no other row of
            input, on how many there are, and on no batch. By default what the context manager
            `outblas.batch_invariant` says, or no.

    Sums are accumulated, and what follows them is computed, in fp32, and rounded once. fp32
    products are IEEE unless torch's fp32 precision setting asks for tf32. What no kernel covers
    goes to `torch.matmul` with one `FallbackWarning` per cause (RuntimeError if OUTBLAS_STRICT=1).
    Gradients are products of ours too, by the best kernel known. Under autocast all tensors are
    cast, a fp32 residual too.

    Raises:
        TypeError: an argument is of the wrong type.
        OperandError: operands do not fit together: a ValueError and, as torch's own error for them,
            a RuntimeError too. Nothing is written.
        ValueError: the named kernel cannot take the operands, an argument is none of its choices,
            or what would take the call promises no batch-invariance. Nothing is written.
        RuntimeError: a CUDA graph is being captured, and the call's kernel is not on the GPU yet:
            `outblas.warmup`, or the same call before the capture, puts it there. Nothing is
            written.
    """
    if aliases:
        input, other = renamed("matmul", _ALIASES["matmul"], aliases, input=input, other=other)
    extra = None
    if bias is not None or activation is not None or residual is not None or aux is not None:
        extra = EpilogueArgs(activation or "", bias, residual, aux)
    plain = kernel is None and config is None and out_dtype is None and tune is None
    if plain and (activation is None or _activates(activation)) and not _traced():
        try:
            done = run(input, other, None, out, 1, 0, batch_invariant, extra)
        except OperandError as error:
            error.rename(_OPERANDS["matmul"])
            raise
        if done is not None:
            return done
    return _unplanned(
        _Call(
            "matmul",
            input,
            other,
            None,
            out,
            1,
            0,
            out_dtype,
            activation,
            bias,
            residual,
            aux,
            kernel,
            config,
            tune,
            batch_invariant,
        )
    )


def addmm(
    input: Tensor = _REQUIRED,
    mat1: Tensor = _REQUIRED,
    mat2: Tensor = _REQUIRED,
    *,
    alpha: float | complex | Tensor = 1,
    beta: float | complex | Tensor = 1,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    aux: Tensor | None = None,
    kernel: str | None = None,
    config: Any = None,
    tune: str | None = None,
    batch_invariant: bool | None = None,
    **aliases: Tensor,
) -> Tensor:
    """beta * input + alpha * (mat1 @ mat2), as `torch.addmm`, scaled and added in fp32 and rounded
    once.

    Args:
        input: broadcasts to (M, N); of the dtype and device of mat1. Not read when beta is 0, NaN
            and all.
        mat1: (M, K); float16, bfloat16 or float32 on an NVIDIA GPU, any strides.
        mat2: (K, N), of the dtype and device of mat1, any strides.
        alpha, beta: numbers of Python or NumPy, or tensors of no dimensions that need no gradient,
            whose value is fetched (from a GPU, with a synchronization); complex ones with complex
            operands only.
        out: as in `matmul`; may be `input` itself, where no bias, activation, residual or aux is
            given.
        bias, activation, residual, aux: as in `matmul`, the activation of
            beta * input + alpha * (mat1 @ mat2) + bias.
        kernel, config, tune, batch_invariant: as in `matmul`.

    The keywords `c`, `a` and `b` stand for `input`, `mat1` and `mat2`.

    Raises TypeError, OperandError, ValueError and RuntimeError as `matmul`; nothing is written
    then.
    """
    if aliases:
        input, mat1, mat2 = renamed(
            "addmm", _ALIASES["addmm"], aliases, input=input, mat1=mat1, mat2=mat2
        )
    extra = None
    if bias is not None or activation is not None or residual is not None or aux is not None:
        extra = EpilogueArgs(activation or "", bias, residual, aux)
    plain = kernel is None and config is None and tune is None and _small(alpha) and _small(beta)
    if (
        plain
        and input is not None
        and (activation is None or _activates(activation))
        and not _traced()
    ):
        try:
            done = run(mat1, mat2, input, out, alpha, beta, batch_invariant, extra)
        except OperandError as error:
            error.rename(_OPERANDS["addmm"])
            raise
        if done is not None:
            return done
    return _unplanned(
        _Call(
            "addmm",
            mat1,
            mat2,
            input,
            out,
            alpha,
            beta,
            None,
            activation,
            bias,
            residual,
            aux,
            kernel,
            config,
            tune,
            batch_invariant,
        )
    )


def linear(
    input: Tensor = _REQUIRED,
    weight: Tensor = _REQUIRED,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    kernel: str | None = None,
    config: Any = None,
    tune: str | None = None,
    batch_invariant: bool | None = None,
    **aliases: Tensor,
) -> Tensor:
    """activation(input @ weight.T + bias) + residual, as `torch.nn.functional.linear` and what
    often follows it.

    Args:
        input: (..., K); float16, bfloat16 or float32 on an NVIDIA GPU, any strides.
        weight: (N, K), or (K) for an output without columns; of the dtype and device of input. Of a
            gated pair the rows of the gate come first, then those of what it multiplies.
        bias: (N), of the dtype of input; any shape that broadcasts to (..., N) will do.
        activation, residual, out, kernel, config, tune, batch_invariant: as in `matmul`.

    A weight of another type (quantized, distributed, traced) reaches `torch.nn.functional.linear`
    as it is, unless that type overrides this function. The keywords `x` and `w` stand for `input`
    and `weight`.

    Raises TypeError, OperandError, ValueError and RuntimeError as `matmul`; nothing is written
    then.
    """
    if aliases:
        input, weight = renamed("linear", _ALIASES["linear"], aliases, input=input, weight=weight)
    plain = (
        kernel is None
        and config is None
        and tune is None
        and (type(weight) is Parameter or type(weight) is Tensor)
    )
    if plain and (activation is None or _activates(activation)) and not _traced():
        extra = None
        if bias is not None or activation is not None or residual is not None:
            extra = EpilogueArgs(activation or "", bias, residual, None)
        try:
            done = _linear(input, weight, out, batch_invariant, extra)
        except OperandError as error:
            error.rename(_OPERANDS["linear"])
            raise
        if done is not None:
            return done
    return _unplanned(
        _Call(
            "linear",
            input,
            weight,
            None,
            out,
            1,
            0,
            None,
            activation,
            bias,
            residual,
            None,
            kernel,
            config,
            tune,
            batch_invariant,
        )
    )


def _linear(
    input: Tensor,
    weight: Tensor,
    out: Tensor | None,
    batch_invariant: bool | None,
    extra: EpilogueArgs | None,
) -> Tensor | None:
    """As `eager.run`."""
    if function_modes() and _functions_on():
        if overriding_mode():
            return None
        with torch._C.DisableTorchFunction():
            return _linear(input, weight, out, batch_invariant, extra)
    try:
        turned = weight.t()
    except RuntimeError:  # of more dimensions, or nested
        return None
    return run(input, turned, None, out, 1, 0, batch_invariant, extra)


# ---- names of parameters
_PUBLIC: dict[str, Callable[..., Tensor]] = {"matmul": matmul, "addmm": addmm, "linear": linear}
for _function in _PUBLIC.values():
    show_signature(_function, _OPERANDS[_function.__name__].values())


# ---- calls that have no plan, or that go elsewhere
def _unplanned(call: _Call) -> Tensor:
    if call.function == "addmm" and call.c is None:
        problem.check_tensor(_OPERANDS["addmm"]["c"], None)
    if _traced():
        return _checked(call)
    tensors = call.a, call.b, call.c, call.bias, call.residual, call.out, call.aux
    if has_torch_function_variadic(*tensors):
        if overriding_mode() or not all(t is None or type(t) in _PLAIN for t in tensors):
            return _offered(call)
        with torch._C.DisableTorchFunction():  # to a default device there is nothing to say
            return _unplanned(call)
    try:
        return _checked(call)
    except OperandError as error:
        error.rename(_OPERANDS[call.function])
        raise


class _Offer(threading.local):
    """The function that the types of some operands are being asked to override."""

    function = ""


_offer = _Offer()


def _offered(call: _Call) -> Tensor:
    """The call as function modes and the types of its operands have it, by torch's protocol."""
    public, given = _PUBLIC[call.function], call.tensors()
    args = [given.pop(name) for name in _OPERANDS[call.function].values()]
    how = call._asdict()
    kwargs: dict[str, Any] = given | {
        name: how[name]
        for name in ("out_dtype", "activation", "kernel", "config", "tune", "batch_invariant")
        if how[name] is not None
    }
    if call.function == "addmm":
        kwargs |= {
            name: how[name]
            for name in ("alpha", "beta")
            if not (_small(how[name]) and how[name] == 1)
        }
    before, _offer.function = _offer.function, call.function
    try:
        result: Tensor = handle_torch_function(public, call.tensors().values(), *args, **kwargs)
        return result
    except TypeError as error:
        if not str(error).startswith(
            f"no implementation found for '{public.__module__}.{public.__name__}'"
        ):
            raise
    finally:
        _offer.function = before
    try:
        return _whole(call, _foreign(call) or "operands that override functions of torch")
    except OperandError as error:
        error.rename(_OPERANDS[call.function])
        raise


def _foreign(call: _Call) -> str | None:
    """What an operand is that must reach torch as it came, if one is: its attributes may not be
    what they seem.
    """
    for t in call.tensors().values():
        kind = type(t)
        if kind not in _PLAIN:
            return (
                f"tensor subclass {kind.__name__}"
                if isinstance(t, Tensor)
                else f"operands of type {kind.__name__}"
            )
        if t.is_nested:
            return "tensors of layout nested"
    return None


def _whole(call: _Call, cause: str) -> Tensor:
    """By a function of torch on operands as they came, and then what follows the product
    by others.
    """
    problem.check_activation(call.activation)
    _mode(call.tune)
    with (
        torch._C.DisableTorchFunctionSubclass()
    ):  # no type is asked about the traits of its tensors
        autocast = _check_whole(call)
        _leave(call, cause)
    given = (
        call.function,
        call.a,
        call.b,
        call.c,
        call.out,
        call.alpha,
        call.beta,
        call.out_dtype,
        call.extra(),
    )
    if not _traced() and _offer.function == call.function and not _functions_on():
        # A type was asked about a function that it does not know, and had it called with functions
        # of torch no longer overridden: but torch's it may know.
        _offer.function = ""
        with torch._C._EnableTorchFunction():
            return fallback.whole(*given, autocast)
    return fallback.whole(*given, autocast)


def _check_whole(call: _Call) -> str:
    """Checks what no function of torch will, as for plain tensors, where operands fit together by
    what they say of themselves; where they do not, torch says so, or their types know better.
    Returns `_apart`.
    """
    tensors = call.tensors().values()
    if not all(isinstance(t, Tensor) for t in tensors):
        return ""
    if call.c is not None:
        _scalar("alpha", call.alpha, call.a.dtype)
        _scalar("beta", call.beta, call.a.dtype)
    _check_written(call)
    a, device = call.a, call.a.device.type
    casts = _autocast(a) and call.out is None and call.aux is None
    narrows = casts and fallback.autocasts(a, device)
    dtype = problem.check_out_dtype(
        call.out_dtype, torch.get_autocast_dtype(device) if narrows else a.dtype
    )
    if not (casts or any(t.is_nested for t in tensors)):
        try:
            shape = _shape(call)
        except OperandError:
            shape = None
        if shape is not None:
            _check_result(call, shape, dtype)
    return _apart(call)


def _apart(call: _Call) -> str:
    """The device whose autocast is no matter of torch's functions in this call, "" if there is
    none: operators that write cast nothing, and others cast to what is asked for.
    """
    asked = call.out is not None or call.aux is not None or call.out_dtype is not None
    return call.a.device.type if asked and _autocast(call.a) else ""


def _checked(call: _Call) -> Tensor:
    """By an operator, or by torch."""
    function, a, b, c, out, alpha, beta, out_dtype, *_ = call
    if call.batch_invariant is not None:
        invariance.check(call.batch_invariant)
    for name, t in call.tensors().items():
        problem.check_tensor(name, t)
    if cause := _foreign(call):
        return _whole(call, cause)
    activation = problem.check_activation(call.activation)
    if c is not None:
        alpha, beta = _scalar("alpha", alpha, a.dtype), _scalar("beta", beta, a.dtype)
        call = call._replace(alpha=alpha, beta=beta)
    _check_written(call)
    if _lazy(out) and call.bare():
        if all(map(_addressed, call.tensors().values())):
            problem.check_overlap(out, a=a, b=b, c=None if out is c else c)
        fresh = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        return out.copy_(_checked(call._replace(out=fresh)))
    if not _autocast(a):
        problem.check_out_dtype(out_dtype, a.dtype)
    choice = *_choice(call.kernel, call.config), _mode(call.tune), call.batch_invariant
    if function == "linear":
        _check_linear(a, b)
    if cause := _outside_operators(out if call.aux is None else call.aux, *call.tensors().values()):
        return _by_torch(call, cause)
    if function == "linear":
        b = b.t()
    if not call.bare():
        return _with_epilogue(call, b, activation, choice)
    result: Tensor
    if c is not None:
        if out is None:
            result = ops.addmm(c, a, b, alpha, beta, *choice)
            return result
        ops.addmm_out(c, a, b, out, alpha, beta, *choice)
        return out
    how = () if out_dtype is None and choice == _DEFAULT_CHOICE else (out_dtype, *choice)
    if out is None:
        result = ops.matmul(a, b, *how)
        return result
    ops.matmul_out(a, b, out, *how)
    return out


def _with_epilogue(call: _Call, b: Tensor, activation: str, choice: tuple[Any, ...]) -> Tensor:
    a, c, out, aux = call.a, call.c, call.out, call.aux
    how = c, call.bias, call.residual, call.alpha, call.beta, activation, call.out_dtype, *choice
    if out is None and aux is None:
        result: Tensor = ops.gemm(a, b, *how)
        return result
    if out is None:
        shape = epilogue.check_columns(activation, problem.check_product(a, b, c))
        out = a.new_empty(shape, dtype=call.out_dtype)
    ops.gemm_out(out, aux, a, b, *how)
    return out


def _by_torch(call: _Call, cause: str) -> Tensor:
    """By functions of torch: checked plain tensors that operators do not take."""
    function, a, b, c, out, alpha, beta, out_dtype, *_ = call
    _check_result(call, _shape(call), problem.check_out_dtype(out_dtype, a.dtype))
    _leave(call, cause)
    autocast = _apart(call)
    if function == "linear" or autocast:
        return fallback.whole(
            function, a, b, c, out, alpha, beta, out_dtype, call.extra(), autocast
        )
    if not call.bare():
        return fallback.fused(a, b, c, out, alpha, beta, out_dtype, call.extra())
    return (
        fallback.matmul(a, b, out, out_dtype)
        if c is None
        else fallback.addmm(c, a, b, alpha, beta, out)
    )


def _outside_operators(written: Tensor | None, *tensors: Tensor) -> str | None:
    """Why a call must not reach our operators, or None: they take strided tensors, and know no
    forward mode.
    """
    for t in tensors:
        if not (t.is_cuda or t.is_cpu):
            return f"{t.device.type} tensors"
        if t.layout is not torch.strided:
            return f"tensors of layout {t.layout}"
    if forward_ad._current_level >= 0:
        return "forward-mode gradients"
    if (
        written is None
        or torch.compiler.is_compiling()
        or torch._C._functorch.maybe_current_level() is None
    ):
        return None
    return "torch.func transforms of a call that writes to its arguments"


# ---- checks
def _shape(call: _Call) -> tuple[int, ...]:
    """Of the product. Raises OperandError."""
    if call.function != "linear":
        return problem.check_product(call.a, call.b, call.c)
    _check_linear(call.a, call.b)
    return (*call.a.shape[:-1], *call.b.shape[:-1])


def _check_result(call: _Call, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Checks what a product of this shape and dtype meets."""
    shape = problem.check_epilogue_args(call.extra(), shape, dtype, call.a.device)
    if call.out is not None:
        problem.check_out(call.out, shape, dtype, call.a.device)


def _check_linear(x: Tensor, w: Tensor) -> None:
    if w.dim() not in (1, 2):
        raise OperandError(f"{B} has {w.dim()} dimensions, expected 2 (N, K) or 1 (K)")
    if x.dim() == 0 or x.shape[-1] != w.shape[-1]:
        raise OperandError(
            f"{A}.shape is {tuple(x.shape)}, expected (..., {w.shape[-1]}) for {B}.shape "
            f"{tuple(w.shape)}"
        )
    if not _autocast(x):
        problem.check_alike(x, w)


def _check_written(call: _Call) -> None:
    """Autograd cannot go through what a call writes to, nor can operators write through a lazy
    view.
    """
    for name, t in (("out", call.out), ("aux", call.aux)):
        if t is None:
            continue
        if not _traced():
            problem.check_writable(t, name)
        if torch.is_grad_enabled():
            if t.requires_grad:
                raise OperandError(
                    f"{name} requires grad, expected a tensor that does not (or torch.no_grad())"
                )
            read = call.a, call.b, call.c, call.bias, call.residual
            if any(x is not None and x.requires_grad for x in read):
                raise OperandError(
                    f"{name} is given with inputs that need gradients, expected no {name} (or "
                    "torch.no_grad())"
                )
        if _lazy(t) and not call.bare():
            raise OperandError(
                f"{name} is a view that negates or conjugates, expected memory as it is"
            )


def _choice(kernel: str | None, config: Any) -> tuple[str, str]:
    """The kernel's name and its config's text, as operator arguments."""
    if kernel is None:
        if config is not None:
            raise ValueError(
                "config is given without kernel, expected the kernel that it configures"
            )
        return "", ""
    name = registry.find(kernel).name
    if config is None:
        return name, ""
    family = registry.load(name).Config.__mro__[
        -2
    ]  # a rung's Config has the defaults of the rung, and this type
    if not isinstance(config, family):
        raise TypeError(
            f"config is {type(config).__name__}, expected {family.__name__} for kernel {name!r}"
        )
    return name, configs.to_text(config)


def _mode(tune: object) -> str:
    """`tune` as an operator argument."""
    return problem.check_name("tune", tune, MODES, f": {', '.join(MODES)}")


def _lazy(out: Tensor | None) -> TypeGuard[Tensor]:
    """Whether `out` is a view that negates or conjugates when read: the dispatcher cannot hand it
    to an operator.
    """
    if out is None or _traced():
        return False
    return out.is_neg() or out.is_conj()


def _autocast(t: Tensor) -> bool:
    """Whether autocast is about to give tensors like it another dtype."""
    return (t.is_cuda and torch.is_autocast_enabled("cuda")) or (
        t.is_cpu and torch.is_autocast_enabled("cpu")
    )


def _scalar(name: str, value: object, dtype: torch.dtype) -> Any:
    """alpha or beta as a Python number that products of a dtype can take. Raises TypeError or
    OperandError.
    """
    if _traced() and isinstance(value, int | float):  # which may be symbolic
        return value
    if isinstance(value, Tensor):
        if value.dim():
            raise TypeError(
                f"{name} is a tensor of shape {tuple(value.shape)}, expected a number or one of "
                "shape ()"
            )
        if value.requires_grad:
            raise TypeError(
                f"{name} is a tensor that requires grad, expected a number or one that does not"
            )
        value = value.item()
    elif (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.generic):
        value = value.item()
    if not isinstance(value, numbers.Complex):
        raise TypeError(f"{name} is {type(value).__name__}, expected a number")
    if not isinstance(value, numbers.Real):
        value = complex(value)
        if value.imag and not dtype.is_complex:
            raise OperandError(f"{name} is {value}, expected a real number for operands of {dtype}")
        if dtype.is_complex:
            return value
        value = value.real
    if dtype is torch.bool and isinstance(value, bool):
        return value
    try:
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
        fits = not math.isfinite(number) or abs(float(number)) <= torch.finfo(torch.float32).max
    except OverflowError:
        raise OperandError(f"{name} is {value}, expected a number that float32 can hold") from None
    if not fits and dtype.itemsize <= 4:
        raise OperandError(f"{name} is {value}, expected a number that float32 can hold")
    return number if -(2**63) <= number < 2**63 else float(number)


def _small(value: object) -> bool:
    """Whether `_scalar` would leave alpha or beta as it is."""
    if type(value) is int:  # compared with what is an int, too: that takes half the time
        return -1_000_000_000_000_000_000 <= value <= 1_000_000_000_000_000_000
    return type(value) is float and -1e18 <= value <= 1e18


def _activates(name: object) -> bool:
    return type(name) is str and name in ACTIVATIONS


def _leave(call: _Call, cause: str) -> None:
    """Warns that torch takes a call, or refuses; checks overlap where tensors have addresses: what
    is fake, sparse or transformed has none.
    """
    kernel, _ = _choice(call.kernel, call.config)
    if kernel:
        raise ValueError(f"kernel {kernel!r} needs plain tensors, and was given {cause}")
    if wanted(call.batch_invariant):
        raise invariance.refusal(cause)
    writes = call.out is not None or call.aux is not None
    if (
        writes
        and not torch.compiler.is_compiling()
        and all(map(_addressed, call.tensors().values()))
    ):
        read = call.a, call.b, call.c
        if call.out is not None:
            check_separate(*read, call.out, call.beta)
        check_extra_separate(*read, call.out, call.beta, call.bias, call.residual, call.aux)
    fallback.notice(cause)


def _addressed(t: object) -> bool:
    if (
        not isinstance(t, Tensor)
        or t.layout is not torch.strided
        or t.is_nested
        or not (t.is_cuda or t.is_cpu)
    ):
        return False
    try:
        return bool(tensor_memory.read_address(t)) or not t.numel()
    except RuntimeError:
        return False

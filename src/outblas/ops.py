"""The operators `torch.ops.outblas.*`, their fakes, and the public calls that check and reach them.

`torch.library.Library` costs less than half of what the `custom_op` decorator costs per call, so definitions and
implementations are registered by hand. Gradients are torch's: inputs that need them never reach the operators.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, TypeGuard

import torch
from packaging.version import Version
from torch.autograd import forward_ad

from . import configs, eager, fallback, invariance, operands, registry
from .choice import MODES
from .dispatch import Call, check_separate, run
from .invariance import wanted

Tensor = torch.Tensor

_library = torch.library.Library("outblas", "DEF")
# Defaults cost nothing per call: the dispatcher passes them on unseen.
_CHOICE = "str kernel='', str config='', str tune='', bool? batch_invariant=None"
_library.define(f"matmul(Tensor a, Tensor b, ScalarType? out_dtype=None, {_CHOICE}) -> Tensor")
_library.define(f"matmul_out(Tensor a, Tensor b, Tensor(a!) out, ScalarType? out_dtype=None, {_CHOICE}) -> ()")
_library.define(f"addmm(Tensor c, Tensor a, Tensor b, Scalar alpha=1, Scalar beta=1, {_CHOICE}) -> Tensor")
_library.define(
    f"addmm_out(Tensor c, Tensor a, Tensor b, Tensor(a!) out, Scalar alpha=1, Scalar beta=1, {_CHOICE}) -> ()"
)


# Parameters one by one: collecting them takes 0.2 µs of a call.
def _matmul(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype | None = None,
    kernel: str = "",
    config: str = "",
    tune: str = "",
    batch_invariant: bool | None = None,
) -> Tensor:
    return run(Call(a, b, None, None, out_dtype, 1, 0, kernel, config, tune, wanted(batch_invariant)))


def _matmul_out(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    out_dtype: torch.dtype | None = None,
    kernel: str = "",
    config: str = "",
    tune: str = "",
    batch_invariant: bool | None = None,
) -> None:
    run(Call(a, b, None, out, out_dtype, 1, 0, kernel, config, tune, wanted(batch_invariant)))
    _written(out)


def _addmm(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    alpha: Any = 1,
    beta: Any = 1,
    kernel: str = "",
    config: str = "",
    tune: str = "",
    batch_invariant: bool | None = None,
) -> Tensor:
    return run(Call(a, b, c, None, None, alpha, beta, kernel, config, tune, wanted(batch_invariant)))


def _addmm_out(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    alpha: Any = 1,
    beta: Any = 1,
    kernel: str = "",
    config: str = "",
    tune: str = "",
    batch_invariant: bool | None = None,
) -> None:
    run(Call(a, b, c, out, None, alpha, beta, kernel, config, tune, wanted(batch_invariant)))
    _written(out)


def _written(out: Tensor) -> None:
    """Lets autograd see that saved values of `out` are gone."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


for _key in ("CPU", "CUDA"):
    _library.impl("matmul", _matmul, _key)
    _library.impl("matmul_out", _matmul_out, _key)
    _library.impl("addmm", _addmm, _key)
    _library.impl("addmm_out", _addmm_out, _key)


# `how` is what a call says of _CHOICE; the dispatcher leaves out trailing defaults.
@torch.library.register_fake("outblas::matmul", lib=_library)
def _(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, *how: Any) -> Tensor:
    return a.new_empty(operands.check_pair(a, b), dtype=operands.check_out_dtype(out_dtype, a.dtype))


@torch.library.register_fake("outblas::matmul_out", lib=_library)
def _(a: Tensor, b: Tensor, out: Tensor, out_dtype: torch.dtype | None = None, *how: Any) -> None:
    operands.check_out(out, operands.check_pair(a, b), operands.check_out_dtype(out_dtype, a.dtype), a.device)


@torch.library.register_fake("outblas::addmm", lib=_library)
def _(c: Tensor, a: Tensor, b: Tensor, alpha: Any = 1, beta: Any = 1, *how: Any) -> Tensor:
    return a.new_empty(operands.check_addend(c, a, b))


@torch.library.register_fake("outblas::addmm_out", lib=_library)
def _(c: Tensor, a: Tensor, b: Tensor, out: Tensor, alpha: Any = 1, beta: Any = 1, *how: Any) -> None:
    operands.check_out(out, operands.check_addend(c, a, b), a.dtype, a.device)


# Under torch 2.11, Dynamo breaks its graph on the check for torch.func transforms and fails inside torch.
COMPILES = Version(torch.__version__) >= Version("2.13")

_matmul_op = torch.ops.outblas.matmul.default
_matmul_out_op = torch.ops.outblas.matmul_out.default
_addmm_op = torch.ops.outblas.addmm.default
_addmm_out_op = torch.ops.outblas.addmm_out.default


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kernel: str | None = None,
    config: Any = None,
    tune: str | None = None,
    batch_invariant: bool | None = None,
) -> Tensor:
    """The matrix product of two tensors, with the shapes, broadcasting and dtype rules of `torch.matmul`.

    Args:
        a: (K), (M, K) or (..., M, K); float16, bfloat16 or float32 on an NVIDIA GPU, any strides.
        b: (K), (K, N) or (..., K, N), of a's dtype and device, any strides.
        out: where the product goes: of its exact shape and dtype, with any strides that keep elements apart, sharing no
            memory with a or b.
        out_dtype: dtype of the product: a's (the default), or float32 for 16-bit operands.
        kernel: a name from `outblas list`; by default the best kernel known. A named kernel runs or raises, it never
            falls back. "portable" takes CPU tensors too, through Triton's interpreter.
        config: the named kernel's configuration, e.g. `outblas.hopper.config.HopperConfig(tile_m=128)`.
        tune: how the kernel is chosen where none is named: "off", by a fixed rule; "lookup", by what was tuned here and
            by the tables that come along; "on", as "lookup", after tuning shapes when they are first met (seconds to a
            minute each). By default what OUTBLAS_TUNE says, or "lookup".
        batch_invariant: whether the bits of a row of the product are to depend on no other row of a, on how many there
            are, and on no batch. By default what the context manager `outblas.batch_invariant` says, or no.

    Sums are accumulated in fp32. fp32 products are IEEE unless torch's fp32 precision setting asks for tf32. What no
    kernel covers goes to `torch.matmul` with one `FallbackWarning` per cause (RuntimeError if OUTBLAS_STRICT=1).

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: operands do not fit together, the named kernel cannot take them, or what would take them promises no
            batch-invariance. Nothing is written.
        RuntimeError: a CUDA graph is being captured, and the call, batch-invariant or of a named kernel, needs an order
            of tiles on the GPU that the same call before the capture leaves there: others take "portable" then, whose
            bits may differ. Nothing is written.
    """
    plain = kernel is None and config is None and out_dtype is None and tune is None
    if plain and not torch.compiler.is_dynamo_compiling():
        done = eager.run(a, b, None, out, 1, 0, batch_invariant)
        if done is not None:
            return done
    if batch_invariant is not None:
        invariance.check(batch_invariant)
    if _lazy(out):
        _check_tensors(a=a, b=b)
        into = _fresh(out, a=a, b=b)
        how = {"kernel": kernel, "config": config, "tune": tune, "batch_invariant": batch_invariant}
        return out.copy_(matmul(a, b, out=into, out_dtype=out_dtype, **how))
    cause = _outside_operators(a, b) if out is None else _outside_operators(a, b, out)
    if cause is None and plain and batch_invariant is None:
        if out is None:
            result: Tensor = _matmul_op(a, b)
            return result
        _matmul_out_op(a, b, out)
        return out
    _check_tensors(a=a, b=b, out=out)
    operands.check_out_dtype(out_dtype, a.dtype)
    name, text = _choice(kernel, config)
    mode = _mode(tune)
    if cause is not None:
        if not _nested(a, b):
            shape = operands.check_pair(a, b)
            if out is not None:
                operands.check_out(out, shape, operands.check_out_dtype(out_dtype, a.dtype), a.device)
        _refuse(name, cause, out, batch_invariant)
        _check_apart(a, b, None, out, 0)
        fallback.notice(cause)
        return fallback.matmul(a, b, out, out_dtype)
    if out is None:
        result = _matmul_op(a, b, out_dtype, name, text, mode, batch_invariant)
        return result
    _matmul_out_op(a, b, out, out_dtype, name, text, mode, batch_invariant)
    return out


def addmm(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    out: Tensor | None = None,
    kernel: str | None = None,
    config: Any = None,
    tune: str | None = None,
    batch_invariant: bool | None = None,
) -> Tensor:
    """beta * c + alpha * (a @ b), as `torch.addmm`, scaled and added in fp32 and rounded once.

    Args:
        c: broadcasts to (M, N); of a's dtype and device. Not read when beta is 0, NaN and all.
        a: (M, K); float16, bfloat16 or float32 on an NVIDIA GPU, any strides.
        b: (K, N), of a's dtype and device, any strides.
        alpha, beta: numbers.
        out: as in `matmul`; may be `c` itself.
        kernel, config, tune, batch_invariant: as in `matmul`.

    Raises TypeError, ValueError and RuntimeError as `matmul`; nothing is written then.
    """
    plain = kernel is None and config is None and tune is None and _small(alpha) and _small(beta)
    if plain and not torch.compiler.is_dynamo_compiling():
        done = eager.run(a, b, c, out, alpha, beta, batch_invariant)
        if done is not None:
            return done
    if batch_invariant is not None:
        invariance.check(batch_invariant)
    _check_tensors(c=c, a=a, b=b, out=out)
    alpha, beta = _scalar("alpha", alpha, a.dtype), _scalar("beta", beta, a.dtype)
    if _lazy(out):
        fresh = _fresh(out, a=a, b=b) if out is c else _fresh(out, a=a, b=b, c=c)
        how = {"kernel": kernel, "config": config, "tune": tune, "batch_invariant": batch_invariant}
        return out.copy_(addmm(c, a, b, alpha=alpha, beta=beta, out=fresh, **how))
    cause = _outside_operators(c, a, b) if out is None else _outside_operators(c, a, b, out)
    name, text = _choice(kernel, config)
    mode = _mode(tune)
    if cause is not None:
        if not _nested(c, a, b):
            shape = operands.check_addend(c, a, b)
            if out is not None:
                operands.check_out(out, shape, a.dtype, a.device)
        _refuse(name, cause, out, batch_invariant)
        _check_apart(a, b, c, out, beta)
        fallback.notice(cause)
        return fallback.addmm(c, a, b, alpha, beta, out)
    if out is None:
        result: Tensor = _addmm_op(c, a, b, alpha, beta, name, text, mode, batch_invariant)
        return result
    _addmm_out_op(c, a, b, out, alpha, beta, name, text, mode, batch_invariant)
    return out


_GRADIENTS = "inputs that need gradients"


def _outside_operators(*tensors: Tensor) -> str | None:
    """Why a call must not reach our operators, or None: they take plain strided tensors and know no transforms."""
    if not COMPILES and torch.compiler.is_compiling():
        return "torch.compile before torch 2.13"
    for t in tensors:
        kind = type(t)
        if kind is not Tensor and kind is not torch.nn.Parameter:
            return f"tensor subclass {kind.__name__}"
        if t.requires_grad and torch.is_grad_enabled():
            return _GRADIENTS
        if not (t.is_cuda or t.is_cpu):
            return f"{t.device.type} tensors"
        if t.layout is not torch.strided or t.is_nested:
            return f"tensors of layout {'nested' if t.is_nested else t.layout}"
    if torch.is_autocast_enabled("cuda" if tensors[0].is_cuda else "cpu"):
        return "autocast"
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        return "torch.func transforms and forward-mode gradients"
    return None


def _check_tensors(**arguments: object) -> None:
    for name, value in arguments.items():
        if not (name == "out" and value is None):
            operands.check_tensor(name, value)


def _choice(kernel: str | None, config: Any) -> tuple[str, str]:
    """The kernel's name and its config's text, as operator arguments."""
    if kernel is None:
        if config is not None:
            raise ValueError("config is given without kernel, expected the kernel that it configures")
        return "", ""
    name = registry.find(kernel).name
    if config is None:
        return name, ""
    family = registry.load(name).Config.__mro__[-2]  # a rung's Config has the defaults of the rung, and this type
    if not isinstance(config, family):
        raise TypeError(f"config is {type(config).__name__}, expected {family.__name__} for kernel {name!r}")
    return name, configs.to_text(config)


def _mode(tune: object) -> str:
    """`tune` as an operator argument. Raises TypeError or ValueError."""
    if tune is None:
        return ""
    if not isinstance(tune, str):
        raise TypeError(f"tune is {type(tune).__name__}, expected a str: {', '.join(MODES)}")
    if tune not in MODES:
        raise ValueError(f"tune is {tune!r}, expected one of {', '.join(MODES)}")
    return tune


def _lazy(out: object) -> TypeGuard[Tensor]:
    """Whether `out` is a view that negates or conjugates when read: the dispatcher cannot hand it to an operator."""
    return out is not None and isinstance(out, Tensor) and (out.is_neg() or out.is_conj())


def _fresh(out: Tensor, **inputs: Tensor) -> Tensor:
    """Memory for a product that goes to a lazy `out` afterwards."""
    operands.check_overlap(out, **inputs)
    return torch.empty(out.shape, dtype=out.dtype, device=out.device)


def _scalar(name: str, value: object, dtype: torch.dtype) -> int | float:
    """alpha or beta as a Python number that fp32 can hold. Raises TypeError or ValueError."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {type(value).__name__}, expected a real number")
    try:
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
        fits = not math.isfinite(number) or abs(float(number)) <= torch.finfo(torch.float32).max
    except OverflowError:
        raise ValueError(f"{name} is {value}, expected a number that float32 can hold") from None
    if not fits and dtype.itemsize <= 4:
        raise ValueError(f"{name} is {value}, expected a number that float32 can hold")
    return number if -(2**63) <= number < 2**63 else float(number)


def _small(value: object) -> bool:
    """Whether `_scalar` would leave alpha or beta as it is."""
    return (type(value) is float or type(value) is int) and -1e18 <= value <= 1e18


def _nested(*tensors: Tensor) -> bool:
    return any(t.is_nested for t in tensors)


def _refuse(kernel: str, cause: str, out: Tensor | None, batch_invariant: bool | None) -> None:
    if kernel:
        raise ValueError(f"kernel {kernel!r} needs plain tensors outside autograd, and was given {cause}")
    if out is not None and cause == _GRADIENTS:
        raise ValueError("out is given with inputs that need gradients, expected no out (or torch.no_grad())")
    if wanted(batch_invariant):
        raise invariance.refusal(cause)


def _check_apart(a: Tensor, b: Tensor, c: Tensor | None, out: Tensor | None, beta: Any) -> None:
    """Checks overlap where tensors have addresses; what is fake, sparse or transformed has none."""
    tensors = [t for t in (a, b, c, out) if t is not None]
    plain = all(t.layout is torch.strided and not t.is_nested and (t.is_cuda or t.is_cpu) for t in tensors)
    if out is not None and plain and not torch.compiler.is_compiling():
        try:
            addressed = all(t.data_ptr() or not t.numel() for t in tensors)
        except RuntimeError:
            return
        if addressed:
            check_separate(a, b, c, out, beta)

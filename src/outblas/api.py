"""The public calls: they check what they are given and reach the operators, or hand the call to torch.

Gradients, autocast and vmap are the operators' own, and so are torch.compile and torch.export.
"""

import math
import numbers
from typing import Any, TypeGuard

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from . import configs, epilogue, fallback, gradients, invariance, operands, ops, registry, transforms
from .choice import MODES
from .dispatch import check_separate
from .eager import run
from .epilogue import Extra
from .invariance import wanted

Tensor = torch.Tensor
_traced = torch.compiler.is_dynamo_compiling

# Whatever stands for a plain tensor while a program is traced, and is one to operators.
_PLAIN = Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor
_REGISTERED = gradients, transforms  # with the operators, when imported


def matmul(
    a: Tensor,
    b: Tensor,
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
) -> Tensor:
    """The matrix product of two tensors, with the shapes, broadcasting and dtype rules of `torch.matmul`.

    Args:
        a: (K), (M, K) or (..., M, K); float16, bfloat16 or float32 on an NVIDIA GPU, any strides.
        b: (K), (K, N) or (..., K, N), of a's dtype and device, any strides.
        out: where the product goes: of its exact shape and dtype, with any strides that keep elements apart, sharing no
            memory with a or b.
        out_dtype: dtype of the product: a's (the default), or float32 for 16-bit operands.
        bias: added to the product; of its dtype, and a shape that broadcasts to it: (N) for a value of each column,
            (M, 1) for one of each row.
        activation: of the product and its bias: "relu", "gelu" (by erf), "gelu_tanh", "silu"; or of a gated pair
            "reglu", "geglu", "geglu_tanh", "swiglu": the activation of the first half of the columns times the second
            half, so that N/2 columns come out.
        residual: added after the activation; of the product's dtype, broadcasts to the output.
        aux: where the product and its bias go as they are before the activation, for a backward pass; as `out`.
        kernel: a name from `outblas list`; by default the best kernel known. A named kernel runs or raises, it never
            falls back. "portable" takes CPU tensors too, through Triton's interpreter.
        config: the named kernel's configuration, e.g. `outblas.hopper.config.HopperConfig(tile_m=128)`.
        tune: how the kernel is chosen where none is named: "off", by a fixed rule; "lookup", by what was tuned here and
            by the tables that come along; "on", as "lookup", after tuning shapes when they are first met (seconds to a
            minute each). By default what OUTBLAS_TUNE says, or "lookup".
        batch_invariant: whether the bits of a row of the product are to depend on no other row of a, on how many there
            are, and on no batch. By default what the context manager `outblas.batch_invariant` says, or no.

    Sums are accumulated, and what follows them is computed, in fp32, and rounded once. fp32 products are IEEE unless
    torch's fp32 precision setting asks for tf32. What no kernel covers goes to `torch.matmul` with one
    `FallbackWarning` per cause (RuntimeError if OUTBLAS_STRICT=1). Gradients are products of ours too, by the best
    kernel known. Under autocast all tensors are cast, a fp32 residual too.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: operands do not fit together, the named kernel cannot take them, or what would take them promises no
            batch-invariance. Nothing is written.
        RuntimeError: a CUDA graph is being captured, and the call's kernel is not on the GPU yet: `outblas.warmup`, or
            the same call before the capture, puts it there. Nothing is written.
    """
    if bias is not None or activation is not None or residual is not None or aux is not None:
        return _gemm(
            a, b, None, 1, 0, out, out_dtype, activation, bias, residual, aux, kernel, config, tune, batch_invariant
        )
    plain = kernel is None and config is None and out_dtype is None and tune is None
    if plain and not _traced():
        done = run(a, b, None, out, 1, 0, batch_invariant)
        if done is not None:
            return done
    if batch_invariant is not None:
        invariance.check(batch_invariant)
    if out is not None:
        _check_written((a, b), out=out)
    if _lazy(out):
        _check_tensors(a=a, b=b)
        into = _fresh(out, a=a, b=b)
        how = {"kernel": kernel, "config": config, "tune": tune, "batch_invariant": batch_invariant}
        return out.copy_(matmul(a, b, out=into, out_dtype=out_dtype, **how))
    cause = _outside_operators(out, a, b)
    if cause is None and plain and batch_invariant is None:
        if out is None:
            result: Tensor = ops.matmul(a, b)
            return result
        ops.matmul_out(a, b, out)
        return out
    _check_tensors(a=a, b=b, out=out)
    if not _autocast(a):
        operands.check_out_dtype(out_dtype, a.dtype)
    name, text = _choice(kernel, config)
    mode = _mode(tune)
    if cause is not None:
        if not _nested(a, b):
            shape = operands.check_pair(a, b)
            if out is not None:
                operands.check_out(out, shape, operands.check_out_dtype(out_dtype, a.dtype), a.device)
        _leave(name, cause, batch_invariant, a, b, None, out, 0)
        return fallback.matmul(a, b, out, out_dtype)
    if out is None:
        result = ops.matmul(a, b, out_dtype, name, text, mode, batch_invariant)
        return result
    ops.matmul_out(a, b, out, out_dtype, name, text, mode, batch_invariant)
    return out


def addmm(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    aux: Tensor | None = None,
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
        out: as in `matmul`; may be `c` itself, where no bias, activation, residual or aux is given.
        bias, activation, residual, aux: as in `matmul`, the activation of beta * c + alpha * (a @ b) + bias.
        kernel, config, tune, batch_invariant: as in `matmul`.

    Raises TypeError, ValueError and RuntimeError as `matmul`; nothing is written then.
    """
    if bias is not None or activation is not None or residual is not None or aux is not None:
        return _gemm(
            a, b, c, alpha, beta, out, None, activation, bias, residual, aux, kernel, config, tune, batch_invariant
        )
    plain = kernel is None and config is None and tune is None and _small(alpha) and _small(beta)
    if plain and not _traced():
        done = run(a, b, c, out, alpha, beta, batch_invariant)
        if done is not None:
            return done
    if batch_invariant is not None:
        invariance.check(batch_invariant)
    _check_tensors(c=c, a=a, b=b, out=out)
    if out is not None:
        _check_written((c, a, b), out=out)
    alpha, beta = _scalar("alpha", alpha, a.dtype), _scalar("beta", beta, a.dtype)
    if _lazy(out):
        fresh = _fresh(out, a=a, b=b) if out is c else _fresh(out, a=a, b=b, c=c)
        how = {"kernel": kernel, "config": config, "tune": tune, "batch_invariant": batch_invariant}
        return out.copy_(addmm(c, a, b, alpha=alpha, beta=beta, out=fresh, **how))
    cause = _outside_operators(out, c, a, b)
    name, text = _choice(kernel, config)
    mode = _mode(tune)
    if cause is not None:
        if not _nested(c, a, b):
            shape = operands.check_addend(c, a, b)
            if out is not None:
                operands.check_out(out, shape, a.dtype, a.device)
        _leave(name, cause, batch_invariant, a, b, c, out, beta)
        return fallback.addmm(c, a, b, alpha, beta, out)
    if out is None:
        result: Tensor = ops.addmm(c, a, b, alpha, beta, name, text, mode, batch_invariant)
        return result
    ops.addmm_out(c, a, b, out, alpha, beta, name, text, mode, batch_invariant)
    return out


def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    kernel: str | None = None,
    config: Any = None,
    tune: str | None = None,
    batch_invariant: bool | None = None,
) -> Tensor:
    """activation(x @ w.T + bias) + residual, as `torch.nn.functional.linear` and what often follows it.

    Args:
        x: (..., K); float16, bfloat16 or float32 on an NVIDIA GPU, any strides.
        w: (N, K), or (K) for an output without columns; of x's dtype and device. Of a gated pair the rows of the gate
            come first, then those of what it multiplies.
        bias: (N), of x's dtype; any shape that broadcasts to (..., N) will do.
        activation, residual, out, kernel, config, tune, batch_invariant: as in `matmul`.

    Raises TypeError, ValueError and RuntimeError as `matmul`; nothing is written then.
    """
    if not isinstance(x, Tensor) or not isinstance(w, Tensor):
        _check_tensors(x=x, w=w)
    if w.dim() not in (1, 2):
        raise ValueError(f"w has {w.dim()} dimensions, expected 2 (N, K) or 1 (K)")
    if x.dim() == 0 or x.shape[-1] != w.shape[-1]:
        raise ValueError(f"x.shape is {tuple(x.shape)}, expected (..., {w.shape[-1]}) for w of shape {tuple(w.shape)}")
    if (w.dtype != x.dtype or w.device != x.device) and not _autocast(x):
        raise ValueError(f"w is {w.dtype} on {w.device}, expected {x.dtype} on {x.device}, as x")
    turned = w.t()
    if bias is None and activation is None and residual is None:
        return matmul(x, turned, out=out, kernel=kernel, config=config, tune=tune, batch_invariant=batch_invariant)
    return _gemm(
        x, turned, None, 1, 0, out, None, activation, bias, residual, None, kernel, config, tune, batch_invariant
    )


def _gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    alpha: Any,
    beta: Any,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    activation: str | None,
    bias: Tensor | None,
    residual: Tensor | None,
    aux: Tensor | None,
    kernel: str | None,
    config: Any,
    tune: str | None,
    batch_invariant: bool | None,
) -> Tensor:
    """`matmul`, or with `c` `addmm`, and an epilogue."""
    plain = kernel is None and config is None and out_dtype is None and tune is None
    plain = plain and (activation is None or (type(activation) is str and activation in epilogue.ACTIVATIONS))
    if plain and (c is None or (_small(alpha) and _small(beta))) and not _traced():
        done = run(a, b, c, out, alpha, beta, batch_invariant, Extra(activation or "", bias, residual, aux))
        if done is not None:
            return done
    if batch_invariant is not None:
        invariance.check(batch_invariant)
    read = {"c": c, "bias": bias, "residual": residual}
    given = {"a": a, "b": b} | {name: t for name, t in (read | {"out": out, "aux": aux}).items() if t is not None}
    _check_tensors(**given)
    activation = operands.check_activation(activation)
    if c is not None:
        alpha, beta = _scalar("alpha", alpha, a.dtype), _scalar("beta", beta, a.dtype)
    for name, written in (("out", out), ("aux", aux)):
        if written is not None:
            _check_written((a, b, c, bias, residual), **{name: written})
        if _lazy(written):
            raise ValueError(f"{name} is a view that negates or conjugates, expected memory as it is")
    name, text = _choice(kernel, config)
    mode = _mode(tune)
    if cause := _outside_operators(out if aux is None else aux, *given.values()):
        extra = Extra(activation, bias, residual, aux)
        if not _nested(*given.values()):
            dtype = operands.check_out_dtype(out_dtype, a.dtype)
            shape = operands.check_product(a, b, c)
            shape = operands.check_extra(extra, shape, dtype, a.device)
            if out is not None:
                operands.check_out(out, shape, dtype, a.device)
        _leave(name, cause, batch_invariant, a, b, c, out, beta)
        return fallback.fused(a, b, c, out, alpha, beta, out_dtype, extra)
    how = c, bias, residual, alpha, beta, activation, out_dtype, name, text, mode, batch_invariant
    if out is None and aux is None:
        result: Tensor = ops.gemm(a, b, *how)
        return result
    if out is None:
        shape = operands.check_pair(a, b)
        halves = epilogue.halves(activation)
        out = a.new_empty((*shape[:-1], shape[-1] // halves) if halves > 1 else shape, dtype=out_dtype)
    ops.gemm_out(out, aux, a, b, *how)
    return out


def _outside_operators(written: Tensor | None, *tensors: Tensor) -> str | None:
    """Why a call must not reach our operators, or None: they take strided tensors, and know no forward mode."""
    for t in tensors if written is None else (*tensors, written):
        kind = type(t)
        if kind not in _PLAIN:
            return f"tensor subclass {kind.__name__}"
        if not (t.is_cuda or t.is_cpu):
            return f"{t.device.type} tensors"
        if t.layout is not torch.strided or t.is_nested:
            return f"tensors of layout {'nested' if t.is_nested else t.layout}"
    if forward_ad._current_level >= 0:
        return "forward-mode gradients"
    if written is None or torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is None:
        return None
    return "torch.func transforms of a call that writes to its arguments"


def _check_written(read: tuple[object, ...], **written: object) -> None:
    """Autograd cannot go through what a call writes to."""
    if not torch.is_grad_enabled():
        return
    for name, t in written.items():
        if isinstance(t, Tensor) and t.requires_grad:
            raise ValueError(f"{name} requires grad, expected a tensor that does not (or torch.no_grad())")
        if any(isinstance(t, Tensor) and t.requires_grad for t in read):
            raise ValueError(
                f"{name} is given with inputs that need gradients, expected no {name} (or torch.no_grad())"
            )


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
    """`tune` as an operator argument."""
    return operands.check_name("tune", tune, MODES, f": {', '.join(MODES)}")


def _lazy(out: object) -> TypeGuard[Tensor]:
    """Whether `out` is a view that negates or conjugates when read: the dispatcher cannot hand it to an operator."""
    if out is None or _traced():
        return False
    return isinstance(out, Tensor) and (out.is_neg() or out.is_conj())


def _autocast(t: Tensor) -> bool:
    """Whether autocast is about to give tensors like it another dtype."""
    return (t.is_cuda and torch.is_autocast_enabled("cuda")) or (t.is_cpu and torch.is_autocast_enabled("cpu"))


def _fresh(out: Tensor, **inputs: Tensor) -> Tensor:
    """Memory for a product that goes to a lazy `out` afterwards."""
    operands.check_overlap(out, **inputs)
    return torch.empty(out.shape, dtype=out.dtype, device=out.device)


def _scalar(name: str, value: object, dtype: torch.dtype) -> Any:
    """alpha or beta as a Python number that fp32 can hold, or complex for torch, which takes complex tensors. Raises
    TypeError or ValueError."""
    if dtype.is_complex and isinstance(value, complex):
        return value
    if _traced() and isinstance(value, int | float):  # which may be symbolic
        return value
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


def _leave(kernel: str, cause: str, batch_invariant: bool | None, *given: Any) -> None:
    """Warns that torch takes a call, or refuses. `given`: A, B, C, out and beta; checks overlap where tensors have
    addresses: what is fake, sparse or transformed has none."""
    if kernel:
        raise ValueError(f"kernel {kernel!r} needs plain tensors, and was given {cause}")
    if wanted(batch_invariant):
        raise invariance.refusal(cause)
    tensors = [t for t in given[:4] if t is not None]
    plain = all(t.layout is torch.strided and not t.is_nested and (t.is_cuda or t.is_cpu) for t in tensors)
    if given[3] is not None and plain and not torch.compiler.is_compiling():
        try:
            addressed = all(t.data_ptr() or not t.numel() for t in tensors)
        except RuntimeError:
            addressed = False
        if addressed:
            check_separate(*given)
    fallback.notice(cause)

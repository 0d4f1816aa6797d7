"""The fallback for calls that no kernel of outblas supports: torch computes them, with one warning
per cause.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from outblas.base.compat.torch_private import as_plain, constant_to_dynamo, scaled_mm
from outblas.base.compiling import CompilePending
from outblas.call import epilogue, fp8, problem
from outblas.call.epilogue import EpilogueArgs, apply
from outblas.call.sm_carveout import kept_by_torch

# Frames of files below these folders do not belong to the caller.
_OURS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_seen: set[str] = set()  # causes and messages that have been shown


class FallbackWarning(UserWarning):
    """A warning that torch computes a call because no kernel of outblas covers it.

    It is shown once per cause. With OUTBLAS_STRICT=1 a RuntimeError is raised instead.

    Example:
        >>> import warnings, torch, outblas
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", outblas.FallbackWarning)
        ...     y = outblas.matmul(torch.ones(2, 2, dtype=torch.int64), torch.eye(2).long())
    """


def warn_fallback(cause: str | Exception) -> None:
    """Warns, once per cause, that torch computes calls of this kind. Says nothing of those whose
    kernel is being compiled.

    Raises RuntimeError when OUTBLAS_STRICT=1.
    """
    if isinstance(cause, CompilePending):
        return
    cause = str(cause)
    if os.environ.get("OUTBLAS_STRICT") == "1":
        raise RuntimeError(f"OUTBLAS_STRICT=1 forbids the fallback to torch: {cause}")
    _warn_fallback(cause)


@constant_to_dynamo
def _warn_fallback(cause: str) -> None:
    """Shows a cause once, in a program that is compiled while it is traced."""
    if cause not in _seen:
        _seen.add(cause)
        message = f"torch takes this call: {cause} (shown once; OUTBLAS_STRICT=1 makes it an error)"
        warnings.warn(message, FallbackWarning, stacklevel=_caller_level())


def warn_once(message: str) -> None:
    """Warns once about a condition that costs only speed."""
    if message not in _seen:
        _seen.add(message)
        warnings.warn(f"outblas: {message}", RuntimeWarning, stacklevel=_caller_level())


def _caller_level() -> int:
    """Returns the number of frames from the warning function to the first frame outside this
    package and torch's dispatcher.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    return level


@kept_by_torch
def matmul(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    """Computes torch.matmul; for a wider output dtype, converts the operands first."""
    if out_dtype is not None and out_dtype != a.dtype:
        a, b = a.to(out_dtype), b.to(out_dtype)
    if out is None:
        return torch.matmul(a, b)
    if out.is_contiguous() and out.dim() == max(a.dim(), b.dim()):
        return torch.matmul(a, b, out=out)
    # in some of these cases torch would resize `out`, or cannot fold the batch
    return out.copy_(torch.matmul(a, b))


@kept_by_torch
def addmm(
    c: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    alpha: float,
    beta: float,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Computes torch.addmm, without a product where alpha is 0."""
    is_strided = a.layout is b.layout is torch.strided
    if alpha == 0 and is_strided and (a.is_floating_point() or a.is_complex()):
        # As in BLAS. torch's kernels for 16-bit operands on a CPU would compute 0 * NaN. Integers
        # have none. A term of zeros is left: without terms torch multiplies c by a beta that it
        # rounds to c's dtype, and a complex infinity by 1 + 0i, which is NaN.
        a, b = (t.resolve_conj().resolve_neg() for t in (a, b))
        a, b = pad(a[:, :0], (0, 1)), pad(b[:0], (0, 0, 0, 1))
    if out is None:
        return torch.addmm(c, a, b, alpha=alpha, beta=beta)
    return torch.addmm(c, a, b, alpha=alpha, beta=beta, out=out)


@kept_by_torch
def scaled(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    formats: str,
    extra: EpilogueArgs,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
) -> torch.Tensor:
    """Computes a product of pairs of fp8 operands (`Problem.formats`), whose scales do not vary
    along K, by torch's own, and then its epilogue. Raises RuntimeError or ValueError where torch
    takes no such operands or scales.
    """
    kinds, dtype = fp8.formats(formats), out_dtype or torch.bfloat16
    values = a.view(_FP8[kinds.a]), b.mT.view(_FP8[kinds.b]).mT
    fast = not kinds.promoted
    x = scaled_mm(*values, scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast)
    activation, bias, residual, _ = extra
    if activation or bias is not None or residual is not None:
        x = x.float() if bias is None else x.float() + bias
        x = apply(x, activation, residual).to(dtype)
    return x if out is None else out.copy_(x)


@kept_by_torch
def fused(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None,
    out: torch.Tensor | None,
    alpha: float,
    beta: float,
    out_dtype: torch.dtype | None,
    extra: EpilogueArgs,
) -> torch.Tensor:
    """Computes a product and its epilogue by one torch operator after the other, each of which
    rounds its result. Nothing is written before all operations that may fail.
    """
    bias = extra.bias
    once = bias is not None and bias.dim() == 1 and b.dim() == 2 and out_dtype in (None, a.dtype)
    if c is not None:
        x = addmm(c, a, b, alpha, beta, None)
    elif bias is not None and once and {t.layout for t in (a, b, bias)} == {torch.strided}:
        # torch.nn.functional.linear rounds once, like torch's layers. Lazily negated or conjugated
        # views are resolved first, because they would not accept a tangent with another layout.
        w, bias = (t.resolve_conj().resolve_neg() for t in (b, bias))
        x, bias = torch.nn.functional.linear(a, w.t(), bias.expand(b.shape[1])), None
    else:
        x = matmul(a, b, None, out_dtype)
    if bias is not None:
        x = x + bias
    y = apply(x, extra.activation, extra.residual)
    if extra.aux is not None:
        extra.aux.copy_(x)
    return y if out is None else out.copy_(y)


def autocasts(t: torch.Tensor, device: str) -> bool:
    """Returns whether autocast of a device converts a tensor."""

    return bool(as_plain(_autocasts, t, device))


def _autocasts(t: torch.Tensor, device: str) -> bool:
    return t.is_floating_point() and t.dtype != torch.float64 and t.device.type == device


def _check_x(x: Any, activation: str) -> None:
    """Checks the number of columns of torch's product where it can be counted."""
    paired = epilogue.glu_split(activation) > 1  # else nothing is read of a type's own result
    if paired and isinstance(x, torch.Tensor) and not (x.is_nested and x.layout is torch.strided):
        epilogue.check_columns(activation, x.shape)


def _check_written(written: torch.Tensor, value: torch.Tensor, name: str) -> None:
    """Checks that `out` or `aux` can store a value."""
    problem.check_out(written, value.shape, value.dtype, value.device, name)


@kept_by_torch
def whole(
    function: str,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None,
    out: torch.Tensor | None,
    alpha: Any,
    beta: Any,
    out_dtype: torch.dtype | None,
    extra: EpilogueArgs,
    autocast: str = "",
) -> torch.Tensor:
    """Calls the torch function `function` ("linear", "matmul" or "addmm") on the operands as given,
    of any tensor type, and applies the epilogue to its result with torch functions.

    `b` is the weight of linear. `autocast` names the device type for which autocast is switched off
    meanwhile; operands of calls without `out` and `aux` are then cast as outblas's operators cast
    them. Raises the errors of `problem.check_epilogue_args` and `check_out` where x has the wrong
    shape or dtype.
    """
    if autocast:
        if out is None and extra.aux is None:
            narrow = torch.get_autocast_dtype(autocast)
            a, b = (t.to(narrow) if autocasts(t, autocast) else t for t in (a, b))
            added = (
                t.to(out_dtype) if t is not None and autocasts(t, autocast) else t
                for t in (extra.bias, extra.residual)
            )
            extra = EpilogueArgs(extra.activation, *added)
        with torch.autocast(autocast, enabled=False):
            return whole(function, a, b, c, out, alpha, beta, out_dtype, extra)
    if out_dtype is not None:
        as_plain(problem.check_alike, a, b)
    bias = extra.bias
    if function == "linear":
        broadcast = as_plain(lambda: isinstance(bias, torch.Tensor) and bias.dim() != 1)
        x = torch.nn.functional.linear(a, b, None if broadcast else bias)
        bias = bias if broadcast else None
    elif c is not None:
        x = torch.addmm(c, a, b, alpha=alpha, beta=beta)
    else:
        x = matmul(a, b, None, out_dtype)
    if bias is not None:
        x = x + bias
    as_plain(_check_x, x, extra.activation)
    y = apply(x, extra.activation, extra.residual)
    for name, written, value in (("aux", extra.aux, x), ("out", out, y)):
        if written is not None:
            as_plain(_check_written, written, value, name)
    if extra.aux is not None:
        extra.aux.copy_(x)
    return y if out is None else out.copy_(y)

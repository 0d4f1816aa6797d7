"""What happens when no kernel of ours covers a call: torch takes it, and says so once per cause."""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from ..core import epilogue, problem
from ..core.compat.torch_private import as_plain
from ..core.epilogue import EpilogueArgs, apply

# Frames of files below these folders are not the caller's.
_OURS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
_seen: set[str] = set()  # causes and messages that were shown


class FallbackWarning(UserWarning):
    """A warning that torch computes a call because no kernel of outblas covers it.

    It is shown once per cause. With OUTBLAS_STRICT=1 a RuntimeError is raised instead.

    Example:
        >>> import warnings, torch, outblas
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", outblas.FallbackWarning)
        ...     y = outblas.matmul(torch.ones(2, 2, dtype=torch.int64), torch.eye(2).long())
    """


def warn_fallback(cause: str) -> None:
    """Warns once per cause that torch takes calls of this kind.

    Raises RuntimeError when OUTBLAS_STRICT=1.
    """
    if os.environ.get("OUTBLAS_STRICT") == "1":
        raise RuntimeError(f"OUTBLAS_STRICT=1 forbids the fallback to torch: {cause}")
    if torch.compiler.is_compiling():
        return
    if cause not in _seen:
        _seen.add(cause)
        message = f"torch takes this call: {cause} (shown once; OUTBLAS_STRICT=1 makes it an error)"
        warnings.warn(message, FallbackWarning, stacklevel=_caller_level())


def warn_once(message: str) -> None:
    """Warns once of something that costs speed only."""
    if message not in _seen:
        _seen.add(message)
        warnings.warn(f"outblas: {message}", RuntimeWarning, stacklevel=_caller_level())


def _caller_level() -> int:
    """Frames from the warning function to the first outside this package and torch's dispatcher."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    return level


def matmul(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    """torch.matmul; operands are widened first when a wider product is asked for."""
    if out_dtype is not None and out_dtype != a.dtype:
        a, b = a.to(out_dtype), b.to(out_dtype)
    if out is None:
        return torch.matmul(a, b)
    if out.is_contiguous() and out.dim() == max(a.dim(), b.dim()):
        return torch.matmul(a, b, out=out)
    return out.copy_(torch.matmul(a, b))  # torch resizes, or cannot fold, some of these


def addmm(
    c: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    alpha: float,
    beta: float,
    out: torch.Tensor | None,
) -> torch.Tensor:
    if out is None:
        return torch.addmm(c, a, b, alpha=alpha, beta=beta)
    return torch.addmm(c, a, b, alpha=alpha, beta=beta, out=out)


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
    """A product and its epilogue, one operator of torch after the other, each rounded as torch
    rounds it. Nothing is written before all that may fail.
    """
    bias = extra.bias
    once = bias is not None and bias.dim() == 1 and b.dim() == 2 and out_dtype in (None, a.dtype)
    if c is not None:
        x = addmm(c, a, b, alpha, beta, None)
    elif bias is not None and once and {t.layout for t in (a, b, bias)} == {torch.strided}:
        # Rounded once, as torch's layers. Views of what negates or conjugates when read would take
        # no tangent that lies otherwise.
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
    """Whether autocast of a device gives a tensor its dtype."""

    return bool(as_plain(_autocasts, t, device))


def _autocasts(t: torch.Tensor, device: str) -> bool:
    return t.is_floating_point() and t.dtype != torch.float64 and t.device.type == device


def _check_x(x: Any, activation: str) -> None:
    """Checks the columns of what torch gave for a product, where they can be counted."""
    if isinstance(x, torch.Tensor) and not (x.is_nested and x.layout is torch.strided):
        epilogue.check_columns(activation, x.shape)


def _check_written(written: torch.Tensor, value: torch.Tensor, name: str) -> None:
    """Checks that `out` or `aux` can take a value."""
    problem.check_out(written, value.shape, value.dtype, value.device, name)


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
    """The torch function of a name ("linear", "matmul", "addmm") on operands as they came, of
    whatever type, and other functions on what it gives. `b` is the weight of linear. Raises as
    `problem.check_epilogue_args` and `check_out` where x is not what the call needs. `autocast`: of
    which device it is to be off for them, and what is no call with `out` or `aux` is cast as the
    operators of outblas are.
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

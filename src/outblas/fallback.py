"""What happens when no kernel of ours covers a call: torch takes it, and says so once per cause."""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from .epilogue import Extra, apply
from .operands import OperandError

_OURS = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
_seen: set[str] = set()


class FallbackWarning(UserWarning):
    """outblas handed a call to torch. Shown once per cause; with OUTBLAS_STRICT=1 it is a RuntimeError instead."""


def notice(cause: str) -> None:
    """Warns once that torch takes calls of this kind; raises RuntimeError when OUTBLAS_STRICT=1."""
    if os.environ.get("OUTBLAS_STRICT") == "1":
        raise RuntimeError(f"OUTBLAS_STRICT=1 forbids the fallback to torch: {cause}")
    if torch.compiler.is_compiling():
        return
    if cause not in _seen:
        _seen.add(cause)
        message = f"torch takes this call: {cause} (shown once; OUTBLAS_STRICT=1 makes it an error)"
        warnings.warn(message, FallbackWarning, stacklevel=_caller_level())


def complain(message: str) -> None:
    """Warns once of what costs speed only."""
    if message not in _seen:
        _seen.add(message)
        warnings.warn(f"outblas: {message}", RuntimeWarning, stacklevel=_caller_level())


def _caller_level() -> int:
    """Frames from `notice` to the first one outside this package and torch's dispatcher."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    return level


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, out_dtype: torch.dtype | None) -> torch.Tensor:
    """torch.matmul; operands are widened first when a wider product is asked for."""
    if out_dtype is not None and out_dtype != a.dtype:
        a, b = a.to(out_dtype), b.to(out_dtype)
    if out is None:
        return torch.matmul(a, b)
    if out.is_contiguous() and out.dim() == max(a.dim(), b.dim()):
        return torch.matmul(a, b, out=out)
    return out.copy_(torch.matmul(a, b))  # torch resizes, or cannot fold, some of these


def addmm(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float, beta: float, out: torch.Tensor | None
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
    extra: Extra,
) -> torch.Tensor:
    """A product and its epilogue, one operator of torch after the other, each rounded as torch rounds it."""
    bias = extra.bias
    if c is not None:
        x = addmm(c, a, b, alpha, beta, None)
    elif bias is not None and bias.dim() == 1 and b.dim() == 2 and out_dtype in (None, a.dtype):
        b = b.resolve_neg()  # or torch cannot transpose it, where it carries a forward-mode gradient
        x, bias = torch.nn.functional.linear(a, b.t(), bias.expand(b.shape[1])), None  # rounded once, as torch's layers
    else:
        x = matmul(a, b, None, out_dtype)
    if bias is not None:
        x = x + bias
    if extra.aux is not None:
        extra.aux.copy_(x)
    y = apply(x, extra.activation, extra.residual)
    return y if out is None else out.copy_(y)


def whole(
    function: str,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None,
    out: torch.Tensor | None,
    alpha: Any,
    beta: Any,
    out_dtype: torch.dtype | None,
    extra: Extra,
) -> torch.Tensor:
    """The torch function of a name ("linear", "matmul", "addmm") on operands as they came, of whatever type, and other
    functions on what it gives. `b` is the weight of linear."""
    bias = extra.bias
    if function == "linear":
        broadcast = isinstance(bias, torch.Tensor) and bias.dim() != 1
        x = torch.nn.functional.linear(a, b, None if broadcast else bias)
        bias = bias if broadcast else None
    elif c is not None:
        x = torch.addmm(c, a, b, alpha=alpha, beta=beta)
    else:
        x = matmul(a, b, None, out_dtype)
    if bias is not None:
        x = x + bias
    y = apply(x, extra.activation, extra.residual)
    for name, written, value in (("aux", extra.aux, x), ("out", out, y)):
        if written is not None and written.shape != value.shape:
            raise OperandError(f"{name}.shape is {tuple(written.shape)}, expected {tuple(value.shape)}")
        if written is not None and written.dtype != value.dtype:
            raise OperandError(f"{name}.dtype is {written.dtype}, expected {value.dtype}")
    if extra.aux is not None:
        extra.aux.copy_(x)
    return y if out is None else out.copy_(y)

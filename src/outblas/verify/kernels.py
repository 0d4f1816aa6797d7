"""Applies the oracles to kernels by name, through the public API."""

from typing import Any

import torch

from outblas import api
from outblas.base import registry
from outblas.verify.call import Run
from outblas.verify.cases import Case
from outblas.verify.oracle import ORACLES, Result

_IN_ORDER = ("simt",)  # ladders whose kernels sum along K in one chain


def oracles(kernel: str) -> tuple[str, ...]:
    """Returns the names of the oracles that every call of a kernel must pass."""
    return (
        "exact",
        ("chained" if registry.find(kernel).ladder in _IN_ORDER else "bounded"),
        "nonfinite",
    )


class Refused(Exception):
    """A named kernel does not support a case; the message gives the reason."""


def caller(kernel: str, config: Any = None) -> Run:
    """Wraps a kernel in the form that oracles run. The callable raises `Refused` when the kernel
    does not support the call.
    """

    def run(
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor | None,
        out: torch.Tensor,
        alpha: float,
        beta: float,
    ) -> None:
        try:
            if c is None:
                api.matmul(a, b, out=out, out_dtype=out.dtype, kernel=kernel, config=config)
            else:
                api.addmm(c, a, b, alpha=alpha, beta=beta, out=out, kernel=kernel, config=config)
        except ValueError as error:
            if str(error).startswith(f"kernel {kernel!r}"):
                raise Refused(str(error)) from None
            raise

    return run


def check(
    kernel: str,
    case: Case,
    oracle: str = "exact",
    device: torch.device | str = "cuda",
    config: Any = None,
) -> Result:
    """Runs one oracle on one call. Raises `Refused` when the kernel does not support the call."""
    return ORACLES[oracle](caller(kernel, config), case, device)

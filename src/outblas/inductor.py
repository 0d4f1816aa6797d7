"""Adds outblas's product to those that Inductor measures when it compiles with max-autotune."""

import torch

from outblas import api
from outblas.base.compat.torch_private import inductor_choices

__all__ = ["inductor_choice"]

Tensor = torch.Tensor


def outblas_mm(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """The function that Inductor calls by this name, while it measures and in the code that it
    generates.
    """
    with torch.no_grad():
        return api.matmul(a, b, out=out)


def inductor_choice() -> None:
    """Offer the products of outblas to Inductor's autotuner.

    From then on, programs that are compiled with `mode="max-autotune"` measure outblas beside ATen
    and Triton for each `torch.mm`, and use the fastest.

    Inductor asks external kernels (`torch._inductor.config.external_matmul`) for `mm` only, which
    includes linear layers without a bias, and not for `addmm` or `bmm`; it fuses nothing into
    them. A process that loads compiled code from Inductor's cache must call this function too.
    Calls of `outblas.matmul` do not need it: torch.compile keeps them as they are.

    Raises:
        RuntimeError: The installed torch has no list of external products.

    Example:
        >>> import torch, outblas
        >>> outblas.inductor_choice()
        >>> model = torch.compile(torch.nn.Linear(16, 16, bias=False), mode="max-autotune")
    """
    offered, register = inductor_choices()
    register(outblas_mm)
    if outblas_mm not in offered:
        offered.append(outblas_mm)

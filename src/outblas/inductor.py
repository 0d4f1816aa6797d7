"""Our product among those that Inductor measures when it compiles with max-autotune."""

import torch

from . import api
from .core.compat.torch_private import inductor_choices

Tensor = torch.Tensor


def outblas_mm(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """As Inductor calls it, by this name, while it measures and in the code that it writes."""
    with torch.no_grad():
        return api.matmul(a, b, out=out)


def inductor_choice() -> None:
    """Offers our product to Inductor: from now on, programs compiled with `mode="max-autotune"`
    measure it beside those of ATen and Triton wherever a `torch.mm` of theirs becomes a kernel, and
    take the fastest.

    By `torch._inductor.config.external_matmul`, which reaches `mm` alone, linear layers without a
    bias among it, but no `addmm` or `bmm`; Inductor fuses nothing into it. A process that takes
    compiled code from Inductor's cache must have called it too. `outblas.matmul` needs none of it:
    it is compiled as itself. Raises RuntimeError where this torch has no such list.
    """
    offered, register = inductor_choices()
    register(outblas_mm)
    if outblas_mm not in offered:
        offered.append(outblas_mm)

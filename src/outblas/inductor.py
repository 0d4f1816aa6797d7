"""Our product among those that Inductor measures when it compiles with max-autotune."""

from typing import Any

import torch

from . import api

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
    it is compiled as itself.
    """
    from torch._inductor import config
    from torch._inductor.kernel.mm import lazy_register_extern_choice

    lazy_register_extern_choice(outblas_mm)
    offered: list[Any] = config.external_matmul
    if outblas_mm not in offered:
        offered.append(outblas_mm)

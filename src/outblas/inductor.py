"""Our product among those that Inductor measures when it compiles with max-autotune."""

from __future__ import annotations

from typing import Any

import torch

from . import api

Tensor = torch.Tensor


def outblas_mm(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """As Inductor calls it, by this name, while it measures and in the code that it writes."""
    with torch.no_grad():
        return api.matmul(a, b, out=out)


def inductor_choice() -> None:
    """Offers our product to Inductor: from now on, programs compiled with `mode="max-autotune"` measure it beside those
    of ATen and Triton wherever a `torch.mm` of theirs becomes a kernel, and take the fastest.

    It is `torch._inductor.config.external_matmul`, which reaches `mm` alone: linear layers without a bias, and products
    of matrices, but not `addmm`, `bmm` and int8 products; nor what Inductor fuses into its own templates. Calling it
    twice is calling it once. A process that takes compiled code from Inductor's cache must have called it too. Programs
    that call `outblas.matmul` need none of it: that is compiled as itself.
    """
    from torch._inductor import config
    from torch._inductor.kernel.mm import lazy_register_extern_choice

    lazy_register_extern_choice(outblas_mm)
    offered: list[Any] = config.external_matmul
    if outblas_mm not in offered:
        offered.append(outblas_mm)

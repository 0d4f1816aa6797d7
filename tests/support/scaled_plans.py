"""What stands for the kernel of fp8 products on a CPU."""

from collections.abc import Callable
from typing import Any

import torch

from outblas.call.dispatch import Call, Plan

from . import fp8

Tensor = torch.Tensor

_DTYPES = {"e4m3": fp8.E4M3, "e5m2": fp8.E5M2}


def product_of_pairs(
    formats: str, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor
) -> Tensor:
    """The product in float32 of operands whose fp8 values reach a kernel as pairs."""
    of_a, of_b, *words = formats.split()
    wide_a = a.contiguous().view(_DTYPES[of_a]).float()
    wide_b = b.t().contiguous().view(_DTYPES[of_b]).float()
    if len(words) < 3:
        return scale_a * wide_a @ wide_b.t() * scale_b
    _, recipe_a, recipe_b = words
    x = fp8.scaled(wide_a, scale_a, recipe_a).float()
    return x @ fp8.scaled(wide_b, scale_b.t(), recipe_b).float().t()


class Planned:
    """Stands for planning: `calls` were planned, and their plans ran `runs` times."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.runs = 0

    def __call__(self, call: Call, *, by_torch: bool) -> Plan:
        assert not by_torch, "torch would be asked through the operator that is overridden"
        self.calls.append(call)

        def plan(a: Tensor, b: Tensor, c: None, out: Tensor | None, *rest: Any) -> Tensor:
            alpha, beta, bias, residual, aux, scale_a, scale_b = rest
            assert (c, residual, aux, alpha, beta) == (None, None, None, 1, 0)
            self.runs += 1
            x = product_of_pairs(call.formats, a, b, scale_a, scale_b)
            result = (x if bias is None else x + bias.float()).to(call.out_dtype)
            return result if out is None else out.copy_(result)

        return plan


def outcome(call: Callable[[], Tensor]) -> Any:
    """The result of a call, or the class of its error."""
    try:
        return call().float().tolist()
    except Exception as error:
        return type(error)

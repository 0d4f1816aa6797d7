"""What stands for the kernel of fp8 products under `outblas.enable` on a CPU."""

from collections.abc import Callable
from typing import Any

import torch

from outblas.runtime.dispatch import Call, Plan

from . import fp8

Tensor = torch.Tensor


def small(rows: int, columns: int, dtype: torch.dtype = fp8.E4M3) -> Tensor:
    """Small integers, whose products have one right result."""
    return torch.randint(-4, 5, (rows, columns)).to(dtype)


class Planned:
    """Stands for planning: `calls` were planned, and their plans ran `runs` times."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.runs = 0

    def __call__(self, call: Call, *, by_torch: bool) -> Plan:
        assert not by_torch, "torch would be asked through the operator that is overridden"
        self.calls.append(call)
        a_format, b_format, *_ = (torch.__dict__[_NAMES[name]] for name in call.formats.split()[:2])
        dtype = call.out_dtype

        def plan(
            a: Tensor,
            b: Tensor,
            c: None,
            out: Tensor | None,
            alpha: float,
            beta: float,
            bias: Tensor | None,
            residual: None,
            aux: None,
            scale_a: Tensor,
            scale_b: Tensor,
        ) -> Tensor:
            self.runs += 1
            assert (c, residual, aux, alpha, beta) == (None, None, None, 1, 0)
            wide_a, wide_b = a.view(a_format).float(), b.t().view(b_format).t().float()
            if call.formats.endswith("128"):
                *_, recipe_a, recipe_b = call.formats.split()
                x = fp8.scaled(wide_a, scale_a, recipe_a).float()
                x = x @ fp8.scaled(wide_b.t(), scale_b.t(), recipe_b).t().float()
            else:
                x = wide_a @ wide_b * scale_a * scale_b
            result = (x if bias is None else x + bias.float()).to(dtype)
            return result if out is None else out.copy_(result)

        return plan


_NAMES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


def outcome(call: Callable[[], Tensor]) -> Any:
    """The result of a call, or the class of its error."""
    try:
        return call().float().tolist()
    except Exception as error:
        return type(error)

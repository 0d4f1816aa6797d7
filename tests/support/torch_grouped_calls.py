"""Calls of `torch.nn.functional.grouped_mm` in all its forms, and the rules by which `enable` lets
them run on a CPU.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from outblas.torch_ops.aten import Enabled, Rules

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)


def rules(**changes: Any) -> Rules:
    """Products on the CPU run on `portable`, with these changes."""
    plain = Rules(DTYPES, min_flops=0, min_gain=0, filter=None)
    return plain._replace(**{"key": "CPU", "kernel": "portable"} | changes)


def small(*shape: int) -> Tensor:
    """Small integers, whose products have one right result in each dtype."""
    return torch.randint(-3, 4, shape).to(BF16)


class Operands(NamedTuple):
    """Tokens, experts and their groups. The last rows belong to no group, and one group is
    empty.
    """

    tokens: Tensor  # (tokens, K)
    experts: Tensor  # (groups, K, N)
    others: Tensor  # (tokens, N)
    offs: Tensor

    def to(self, device: str, dtype: torch.dtype) -> "Operands":
        tokens, experts, others = (t.to(device, dtype) for t in self[:3])
        return Operands(tokens, experts, others, self.offs.to(device))


ENDS = torch.tensor([5, 5, 14], dtype=torch.int32)
ON_CPU = Operands(small(16, 8), small(3, 8, 24), small(16, 24), ENDS)


def columns(t: Tensor) -> Tensor:
    """The same matrices by columns."""
    return t.mT.contiguous().mT


PRODUCTS: dict[str, Callable[[Operands], Tensor]] = {
    "rows": lambda t: F.grouped_mm(t.tokens, t.experts, offs=t.offs),
    "rows, experts by columns": lambda t: F.grouped_mm(t.tokens, columns(t.experts), offs=t.offs),
    "rows, tokens by columns": lambda t: F.grouped_mm(columns(t.tokens), t.experts, offs=t.offs),
    "rows, a dtype of the result": lambda t: F.grouped_mm(
        t.tokens, t.experts, offs=t.offs, out_dtype=t.tokens.dtype
    ),
    "columns": lambda t: F.grouped_mm(t.experts.mT, t.tokens.mT, offs=t.offs),
    "terms": lambda t: F.grouped_mm(t.tokens.mT, t.others, offs=t.offs),
    "batches": lambda t: F.grouped_mm(t.experts.mT, t.experts),
    "the private name": lambda t: torch._grouped_mm(t.tokens, t.experts, t.offs),
    "ends with a stride": lambda t: F.grouped_mm(
        t.tokens, t.experts, offs=t.offs.repeat_interleave(2)[::2]
    ),
    # Of 20 columns, so that rows of the result are padded.
    "rows that are padded": lambda t: F.grouped_mm(
        t.tokens, columns(t.experts)[:, :, :20], offs=t.offs
    ),
    "batches that are padded": lambda t: F.grouped_mm(t.experts.mT, columns(t.experts)[:, :, :20]),
    "terms that are padded": lambda t: F.grouped_mm(t.tokens.mT, t.others[:, :20], offs=t.offs),
}


def found(enabled: Enabled) -> list[str]:
    """What became of the grouped products; torch computes one by products of its groups, which are
    not among them.
    """
    return [by for name, by in enabled.decisions.items() if name.startswith("_grouped_mm")]


def same(got: Tensor, expected: Tensor) -> bool:
    """Whether two results are the same, what was not written included."""
    return (
        got.dtype == expected.dtype
        and got.stride() == expected.stride()
        and torch.allclose(got, expected, rtol=0, atol=0, equal_nan=True)
    )

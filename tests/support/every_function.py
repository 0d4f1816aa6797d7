"""A call of each public function that multiplies or quantizes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import outblas

Tensor = torch.Tensor
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class FunctionCall:
    """A call: its operands by place, its other tensors and options by name, the operator that it
    comes to, and its FLOP.
    """

    function: Callable[..., Any]
    operands: tuple[Tensor, ...]
    operator: str
    flops: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, **more: Any) -> Any:
        return self.function(*self.operands, **{**self.tensors, **self.options, **more})

    def of(self, *tensors: Tensor) -> Any:
        """Calls with other tensors in the places of all tensors of the call."""
        remaining = iter(tensors)
        operands = tuple(next(remaining) for _ in self.operands)
        named = {name: next(remaining) for name in self.tensors}
        return self.function(*operands, **named, **self.options)

    @property
    def all_tensors(self) -> tuple[Tensor, ...]:
        return (*self.operands, *self.tensors.values())

    def with_options(self, **options: Any) -> "FunctionCall":
        return replace(self, options=self.options | options)


def integers(*shape: int) -> Tensor:
    return torch.randint(-8, 9, shape).float()


A, B, W, BIAS = integers(6, 5), integers(5, 4), integers(4, 5), integers(4)
A8, B8 = integers(6, 16).to(E4M3), integers(8, 16).to(E4M3).t()
ONE = torch.ones(())
EXPERTS, OFFS = integers(2, 8, 16), torch.tensor([2, 6], dtype=torch.int32)
COUNTS = torch.tensor([6, 6], dtype=torch.int32)
ROWS, BATCH = integers(6, 8), integers(2, 6, 8)
ROUTES, WEIGHTS = torch.tensor([[0, 1]] * 6), torch.rand(6, 2)
TO_FP8 = {"out_dtype": E4M3, "out_recipe": "1x128"}
GROUP_SCALES = torch.ones(6, 1), torch.ones(2, 1, 1)

CALLS: dict[str, FunctionCall] = {
    "matmul": FunctionCall(outblas.matmul, (A, B), "matmul", 240),
    "matmul of a batch": FunctionCall(outblas.matmul, (integers(3, 6, 5), B), "matmul", 720),
    "addmm": FunctionCall(outblas.addmm, (BIAS, A, B), "addmm", 240),
    "linear": FunctionCall(outblas.linear, (A, W), "matmul", 240),
    "linear with an epilogue": FunctionCall(
        outblas.linear, (A, W, BIAS), "gemm", 240, {}, {"activation": "relu"}
    ),
    "scaled_mm": FunctionCall(outblas.scaled_mm, (A8, B8, ONE, ONE), "scaled_mm", 1536),
    "scaled_mm with an epilogue": FunctionCall(
        outblas.scaled_mm,
        (A8, B8, ONE, ONE),
        "scaled_mm",
        1536,
        {"bias": integers(8).bfloat16(), "residual": integers(6, 8).bfloat16()},
        {"activation": "gelu"},
    ),
    "scaled_mm to fp8": FunctionCall(
        outblas.scaled_mm, (A8, B8, ONE, ONE), "scaled_mm_quantized", 1536, {}, TO_FP8
    ),
    "quantize": FunctionCall(
        outblas.quantize, (torch.randn(6, 200),), "quantize", 0, {}, {"recipe": "1x128"}
    ),
    "grouped_mm": FunctionCall(
        outblas.grouped_mm, (ROWS, EXPERTS), "grouped_mm", 1536, {"offs": OFFS}
    ),
    "grouped_mm of columns": FunctionCall(
        outblas.grouped_mm, (EXPERTS.mT, integers(8, 6)), "grouped_mm", 1536, {"offs": OFFS}
    ),
    "grouped_mm of terms": FunctionCall(
        outblas.grouped_mm, (ROWS.t(), integers(6, 16)), "grouped_mm", 1536, {"offs": OFFS}
    ),
    "grouped_mm of a batch": FunctionCall(outblas.grouped_mm, (BATCH, EXPERTS), "grouped_mm", 3072),
    "grouped_mm with an epilogue": FunctionCall(
        outblas.grouped_mm,
        (ROWS, EXPERTS),
        "grouped_gemm",
        1536,
        {
            "offs": OFFS,
            "bias": integers(2, 16),
            "a_index": torch.arange(6),
            "scatter_index": torch.randperm(6),
            "scatter_weights": torch.rand(6),
            "residual": integers(6, 8),
        },
        {"activation": "swiglu"},
    ),
    "grouped_mm with counts": FunctionCall(
        outblas.grouped_mm, (BATCH, EXPERTS), "grouped_gemm", 3072, {"counts": COUNTS}
    ),
    "scaled_grouped_mm": FunctionCall(
        outblas.scaled_grouped_mm,
        (ROWS.to(E4M3), EXPERTS.to(E4M3), *GROUP_SCALES),
        "scaled_grouped_mm",
        1536,
        {"offs": OFFS, "bias": integers(2, 16).bfloat16()},
    ),
    "moe_mlp": FunctionCall(
        outblas.moe_mlp,
        (ROWS, EXPERTS, integers(2, 8, 8), ROUTES, WEIGHTS),
        "moe_mlp",
        2 * 6 * 2 * (8 * 16 + 8 * 8),
    ),
}
# Kernels of ours run where they are named, and their calls have plans.
CALLS |= {
    f"{name} by a kernel": CALLS[name].with_options(kernel="portable")
    for name in ("matmul", "grouped_mm", "grouped_mm with counts", "scaled_grouped_mm")
}

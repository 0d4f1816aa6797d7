"""A call of each public function that multiplies or quantizes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import outblas

from .fp8 import ALL, BY_ROW, RECIPES, SQUARE

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

    @property
    def has_gradients(self) -> bool:
        return "counts" not in self.tensors and not self.operator.startswith(("scaled", "quantize"))

    def with_options(self, **options: Any) -> "FunctionCall":
        return replace(self, options=self.options | options)

    def results(self, training: bool = False) -> list[Tensor]:
        """The results; with `training` the gradients of all floating-point tensors too, where ones
        reach the result.
        """
        if not training:
            values = self()
            return list(values) if isinstance(values, tuple) else [values]
        tensors = [
            t.detach().requires_grad_() if t.is_floating_point() else t for t in self.all_tensors
        ]
        y = self.of(*tensors)
        leaves = [t for t in tensors if t.requires_grad]
        return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    def change(self) -> None:
        """Gives the tensors other values, in place: matrices and indices are rotated, each by a
        distance of its own, the first group becomes half as large, and a third of the tokens have
        another expert.
        """
        for distance, t in enumerate(self.all_tensors, 1):
            if t is self.tensors.get("offs"):
                t[0] //= 2
            elif self.operator == "moe_mlp" and not t.is_floating_point():
                t[::3, 0] = 1 - t[::3, 0]
            elif t.dim() and t is not self.tensors.get("counts"):
                t.copy_(t.float().roll(distance, -1))


def same_bits(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether all results have the same bytes, on whichever devices they are."""
    pairs = zip(ours, theirs, strict=True)
    return all(
        torch.equal(*(t.contiguous()[None].view(torch.uint8).cpu() for t in pair)) for pair in pairs
    )


def calls(
    size: int = 1, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, FunctionCall]:
    """Calls whose extents are a multiple of the least ones, of the same numbers each time."""
    generator = torch.Generator().manual_seed(0)

    def integers(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randint(-8, 9, shape, generator=generator).to(dtype).to(device)

    def fractions(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator).to(device)

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, device=device)

    def places(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    M, N, K = 6 * size, 4 * size, 5 * size
    a, b, w, bias = integers(M, K), integers(K, N), integers(N, K), integers(N)
    flops = 2 * M * N * K
    N8, K8 = 8 * size, 16 * size
    operands8 = integers(M, K8, dtype=E4M3), integers(N8, K8, dtype=E4M3).t()
    scales8 = {"scale_a": ones(), "scale_b": ones()}
    whole = dict.fromkeys(("scale_recipe_a", "scale_recipe_b"), RECIPES[ALL])
    numbers = fractions(M, 200 * size)
    to_fp8 = {"output_dtype": E4M3, "out_recipe": "1x128"}
    flops8 = 2 * M * N8 * K8
    H, F = 8 * size, 16 * size
    rows, batch, experts = integers(M, H), integers(2, M, H), integers(2, H, F)
    offs, of_counts = places(2 * size, M), {"counts": places(M, M)}
    blocks_of_terms, blocks_of_columns = (-(-n // 128) for n in (H, F))
    group_scales = {
        "scale_a": ones(M, blocks_of_terms),
        "scale_b": ones(2, blocks_of_terms, blocks_of_columns),
    }
    in_blocks = {"scale_recipe_a": RECIPES[BY_ROW], "scale_recipe_b": RECIPES[SQUARE]}
    flops_of_groups, ends = 2 * M * H * F, {"offs": offs}
    routes = torch.tensor([[0, 1]] * M, device=device)
    of_bf16 = {"dtype": torch.bfloat16}
    addends = {"bias": integers(N8, **of_bf16), "residual": integers(M, N8, **of_bf16)}

    table = {
        "matmul": FunctionCall(outblas.matmul, (a, b), "matmul", flops),
        "matmul of a batch": FunctionCall(
            outblas.matmul, (integers(3, M, K), b), "matmul", 3 * flops
        ),
        "addmm": FunctionCall(outblas.addmm, (bias, a, b), "addmm", flops),
        "linear": FunctionCall(outblas.linear, (a, w), "matmul", flops),
        "linear with an epilogue": FunctionCall(
            outblas.linear, (a, w, bias), "gemm", flops, {}, {"activation": "relu"}
        ),
        "scaled_mm": FunctionCall(
            outblas.scaled_mm, operands8, "scaled_mm", flops8, scales8, whole
        ),
        "scaled_mm with an epilogue": FunctionCall(
            outblas.scaled_mm,
            operands8,
            "scaled_mm",
            flops8,
            scales8 | addends,
            whole | {"activation": "gelu"},
        ),
        "scaled_mm to fp8": FunctionCall(
            outblas.scaled_mm, operands8, "scaled_mm_quantized", flops8, scales8, whole | to_fp8
        ),
        "quantize": FunctionCall(
            outblas.quantize, (numbers,), "quantize", 0, {}, {"recipe": "1x128"}
        ),
        "quantize by one scale": FunctionCall(
            outblas.quantize, (numbers,), "quantize", 0, {}, {"recipe": "tensorwise"}
        ),
        "grouped_mm": FunctionCall(
            outblas.grouped_mm, (rows, experts), "grouped_mm", flops_of_groups, ends
        ),
        "grouped_mm of columns": FunctionCall(
            outblas.grouped_mm, (experts.mT, integers(H, M)), "grouped_mm", flops_of_groups, ends
        ),
        "grouped_mm of terms": FunctionCall(
            outblas.grouped_mm, (rows.t(), integers(M, F)), "grouped_mm", flops_of_groups, ends
        ),
        "grouped_mm of a batch": FunctionCall(
            outblas.grouped_mm, (batch, experts), "grouped_mm", 2 * flops_of_groups
        ),
        "grouped_mm with an epilogue": FunctionCall(
            outblas.grouped_mm,
            (rows, experts),
            "grouped_gemm",
            flops_of_groups,
            {
                "offs": offs,
                "bias": integers(2, F),
                "a_index": torch.arange(M, device=device),
                "scatter_index": torch.randperm(M, generator=generator).to(device),
                "scatter_weights": fractions(M),
                "residual": integers(M, F // 2),
            },
            {"activation": "swiglu"},
        ),
        "grouped_mm with counts": FunctionCall(
            outblas.grouped_mm, (batch, experts), "grouped_gemm", 2 * flops_of_groups, of_counts
        ),
        "scaled_grouped_mm": FunctionCall(
            outblas.scaled_grouped_mm,
            (rows.to(E4M3), experts.mT.contiguous().to(E4M3).mT),
            "scaled_grouped_mm",
            flops_of_groups,
            group_scales | {"offs": offs, "bias": integers(2, F, **of_bf16)},
            in_blocks,
        ),
        "moe_mlp": FunctionCall(
            outblas.moe_mlp,
            (rows, experts, integers(2, H, H), routes, fractions(M, 2)),
            "moe_mlp",
            2 * M * 2 * (H * F + H * H),
        ),
    }
    # Kernels of ours run where they are named, and their calls have plans.
    named = "matmul", "grouped_mm", "grouped_mm with counts", "scaled_grouped_mm"
    return table | {
        f"{name} by a kernel": table[name].with_options(kernel="portable") for name in named
    }


CALLS = calls()
A8, B8 = CALLS["scaled_mm"].operands
ONE = CALLS["scaled_mm"].tensors["scale_a"]
BATCH, EXPERTS = CALLS["grouped_mm with counts"].operands
COUNTS = CALLS["grouped_mm with counts"].tensors["counts"]
ROWS, OFFS = CALLS["grouped_mm"].operands[0], CALLS["grouped_mm"].tensors["offs"]
GROUP_SCALES = tuple(CALLS["scaled_grouped_mm"].tensors.values())[:2]
ROUTES, WEIGHTS = CALLS["moe_mlp"].operands[3:]

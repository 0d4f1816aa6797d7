"""Problems of hopper.gemm without data, and what its launches hand to the compiled kernel."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from outblas.base import configs
from outblas.call import fp8, quantization
from outblas.call import problem as operands
from outblas.call.epilogue import EpilogueArgs, glu_split
from outblas.call.problem import Problem, problem
from outblas.call.tensor_memory import LINE
from outblas.hopper import gemm
from outblas.hopper.gemm.launcher import WITHOUT_GROUPS
from outblas.hopper.gemm.variant import EPILOGUE_TENSORS, Variant, example_variant
from outblas.hopper.parts import compile, tile_order
from outblas.hopper.parts.config import HopperConfig

BF16, FP32 = torch.bfloat16, torch.float32
OWN_CONFIG = gemm.Config()
# One consumer, one CTA, a tile of 64 rows: the config's fields but `tile_n`.
SMALL_TILE = (
    "tile_m=64,consumers=1,producer_registers=0,consumer_registers=0,epilogue_stages=1,stages=16,"
    "cluster_m=1"
)
RESIDENT_CLUSTERS = 132
MEMORY = torch.empty(1 << 20, dtype=BF16, device="meta")


def gemm_config(text: str) -> HopperConfig:
    """The kernel's own config with the fields that the text names."""
    return configs.from_text(gemm.Config, text)


def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor without data of any strides."""
    return MEMORY.as_strided(shape, strides)


def problem_of(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, **changed: Any
) -> Problem:
    """The product of two tensors, by default into a contiguous C, with some fields changed."""
    if out is None:
        out = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=BF16, device="meta")
    return replace(problem(a, b, out), **changed)


def product(M: int, N: int, K: int, out_dtype: torch.dtype = BF16, **changed: Any) -> Problem:
    """An aligned product of layout nt, with some fields changed."""
    a = torch.empty(M, K, dtype=BF16, device="meta")
    b = torch.empty(N, K, dtype=BF16, device="meta").t()
    out = torch.empty(M, N, dtype=out_dtype, device="meta")
    return replace(problem(a, b, out), **{"alignment": (LINE, LINE, 16), **changed})


def scale(rows: int, columns: int, line: int) -> torch.Tensor:
    """Scales of so many columns that lie `line` numbers apart, without data."""
    return torch.empty(columns * line, device="meta").as_strided((rows, columns), (1, line))


def fp8_product(
    M: int = 4096,
    N: int = 4096,
    K: int = 4096,
    pair: str = "1x128 128x128",
    *,
    formats: str = "",
    line: int | None = None,
    by_columns: bool = False,
    quantized: bool = False,
    **epilogue: Any,
) -> Problem:
    """A product of K fp8 terms, without data. `pair`: the blocks of A and B that share a scale,
    unless `formats` says which; then scales are those of rows and columns. The scales of A's rows
    are neighbours, and blocks of K `line` numbers apart, by default as many as there are rows;
    those of B's columns likewise in K. `by_columns`: of C are contiguous. `quantized`: into fp8
    with scales. `epilogue`: an activation, and tensors.
    """
    formats = formats or f"e4m3 e4m3 promoted {pair}"
    kind = fp8.formats(formats)
    columns, blocks = N * glu_split(epilogue.get("activation", "")), -(-K // fp8.BLOCK)
    scales: tuple[torch.Tensor, ...] = (
        torch.empty(M, 1, device="meta"),
        torch.empty(1, columns, device="meta"),
    )
    if kind.block_a:
        of_a, of_b = -(-M // kind.block_a), -(-columns // kind.block_b)
        scales = scale(of_a, blocks, line or of_a), scale(of_b, blocks, of_b).t()
    out = torch.empty(M, N, dtype=BF16, device="meta")
    if by_columns:
        out = torch.empty(N, M, dtype=BF16, device="meta").t()
    if quantized:
        out = torch.empty(M, N, dtype=torch.float8_e4m3fn, device="meta")
        scales += (quantization.empty_scales((M, N), "1x128", torch.device("meta")),)
    return operands.problem(
        torch.empty(M, K // 2, dtype=BF16, device="meta"),
        torch.empty(columns, K // 2, dtype=BF16, device="meta").t(),
        out,
        extra=EpilogueArgs(**{"activation": "", **epilogue}),
        scales=scales,
        formats=formats,
    )


def variant_of(given: Problem, config: HopperConfig = OWN_CONFIG) -> Variant:
    """What a GPU of 132 SMs would compile for a problem."""
    return example_variant(given, config)


def numbered(*shape: int) -> torch.Tensor:
    """A tensor whose elements all differ."""
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


class KernelArguments(NamedTuple):
    """What one launch hands to a compiled kernel."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    table: Any
    epilogue: dict[str, Any]
    sums: Any
    counters: Any
    partitions: int
    clusters: int
    alpha: float
    beta: float


def kernel_arguments(*given: Any) -> KernelArguments:
    """The positional arguments of a compiled kernel, by name."""
    a, b, out, table, *others = given
    epilogue = dict(zip(EPILOGUE_TENSORS, others, strict=False))
    sums, counters, partitions, clusters, alpha, beta = others[-6:]
    assert others[len(EPILOGUE_TENSORS) : -6] == [*WITHOUT_GROUPS]
    return KernelArguments(
        a, b, out, table, epilogue, sums, counters, partitions, clusters, alpha, beta
    )


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[KernelArguments]:
    """Replaces every compiled kernel by a recorder, on a GPU that holds 132 clusters. Returns the
    list of launches, which grows.
    """
    launches: list[KernelArguments] = []

    def compiled_kernel(*given: Any) -> None:
        launches.append(kernel_arguments(*given))

    monkeypatch.setattr(tile_order, "clusters", lambda *_: RESIDENT_CLUSTERS)
    monkeypatch.setattr(compile, "load", lambda *_: compiled_kernel)
    return launches

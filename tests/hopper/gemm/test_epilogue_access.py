"""Whether TMA may load the epilogue's source: where it lies, and whether the stages have room."""

from dataclasses import replace

import pytest
import torch

from outblas.core import problem as operands
from outblas.core.epilogue import EpilogueArgs
from outblas.hopper import gemm
from outblas.hopper.gemm import epilogue_load
from outblas.hopper.gemm.variant import example_variant
from outblas.hopper.parts.compile import NUMERIC

BF16 = torch.bfloat16
PINGPONG = replace(
    gemm.Config(), cluster_m=1, tile_n=192, pingpong=True, stages=5, epilogue_stages=1
)


def residual_access(config, offset: int = 0) -> str:
    """How the kernel reads a residual that begins so many elements past a cache line."""
    M, N, K = 256, 192, 64
    a, b, out = torch.empty(M, K), torch.empty(N, K).t(), torch.empty(M, N)
    lines = torch.empty(M * N + 128, dtype=BF16)
    start = (-lines.data_ptr() % 128) // 2 + offset
    residual = lines[start : start + M * N].view(M, N)
    extra = EpilogueArgs(residual=residual)
    problem = operands.problem(a.to(BF16), b.to(BF16), out.to(BF16), extra=extra)
    return example_variant(problem, config).traits.residual


@pytest.mark.parametrize(
    ("offset", "access"), [(0, "staged"), (8, "staged"), (4, "matrix"), (1, "matrix")]
)
def test_tma_loads_a_source_at_multiples_of_16_bytes_alone(offset: int, access: str) -> None:
    assert residual_access(replace(gemm.Config(), cluster_m=1), offset) == access


def test_in_pingpong_the_source_leaves_the_last_k_tile_its_stage() -> None:
    taken = epilogue_load.stages_per_tile(PINGPONG, PINGPONG.epilogue_config(False), NUMERIC[BF16])
    enough = replace(PINGPONG, stages=taken + PINGPONG.in_flight)

    assert residual_access(enough) == "staged"
    assert residual_access(replace(enough, stages=enough.stages - 1)) == "matrix"

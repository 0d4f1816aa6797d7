"""Products of fp8 operands of which each row of A and each column of B has scales of its own, on a
GPU: TMA loads both where neighbours have neighbouring scales. Operands are small integers and
scales powers of two, so that sums are exact.
"""

from typing import Any

import pytest
import torch
from support.fp8 import BY_ROW, block_scale, fp8_operands, scaled
from support.gemm_problems import gemm_config

import outblas
from outblas.core.epilogue import EpilogueArgs
from outblas.core.problem import problem as describe
from outblas.hopper import gemm
from outblas.torch_ops import eager_scaled

Tensor = torch.Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.timeout(600)]

TILES = {
    "256x128": "tile_m=256,tile_n=128,cluster_m=1,stages=4,epilogue_stages=1",
    "256x128, A shared": "tile_m=256,tile_n=128,cluster_m=1,cluster_n=2,stages=4,epilogue_stages=1",
    "256x128, B shared": "tile_m=256,tile_n=128,cluster_m=2,stages=4,epilogue_stages=1",
    "192x128": (
        "tile_m=192,tile_n=128,consumers=3,cluster_m=1,producer_registers=32,"
        "consumer_registers=160,stages=4,epilogue_stages=1"
    ),
    "128x192": "tile_n=192,cluster_m=1,cluster_n=2,stages=4,epilogue_stages=1",
    "128x128": "tile_n=128,cluster_m=1,stages=5,epilogue_stages=2",
    "128x128, in turn": "tile_n=128,cluster_m=1,pingpong=True,stages=5,epilogue_stages=1",
    "64x96": (
        "tile_m=64,tile_n=96,consumers=1,cluster_m=1,producer_registers=0,consumer_registers=0,"
        "stages=8,epilogue_stages=1"
    ),
    "128x64, swapped": "tile_n=64,cluster_m=1,swap_ab=True,stages=6,epilogue_stages=1",
    "128x128, split": "tile_n=128,cluster_m=1,split_k=3,stages=5,epilogue_stages=1",
}
# Rows and columns that end inside of a tile, and one tile that has few of both.
SHAPES = (4, 8, 128), (300, 392, 272), (1000, 1288, 1408), (4096, 1032, 640)


def operands(M: int, N: int, K: int, order: str = "by columns") -> list[Any]:
    a, b = fp8_operands(M, N, K, device="cuda", most=1)
    of_a, of_b = (block_scale(n, K, BY_ROW, order, "cuda") for n in (M, N))
    return [a, b, of_a, of_b.t()]


def exact(given: list[Any]) -> Tensor:
    a, b, of_a, of_b = given
    return scaled(a, of_a, BY_ROW) @ scaled(b.t(), of_b.t(), BY_ROW).t()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_every_tile_has_the_scales_of_its_rows_and_columns(
    tile: str, shape: tuple[int, int, int], out_dtype: torch.dtype
) -> None:
    given = operands(*shape)
    a, b, *scales = given
    words = eager_scaled.as_16_bit_pairs(a), eager_scaled.as_16_bit_pairs(b.t()).t()
    storage = torch.full((3, *shape[:2]), torch.nan, dtype=out_dtype, device="cuda")
    out = storage[1]
    problem = describe(
        *words,
        out,
        extra=EpilogueArgs(""),
        scales=tuple(scales),
        formats="e4m3 e4m3 promoted 1x128 1x128",
    )

    launch = gemm.plan(problem, gemm_config(TILES[tile]))
    for _ in range(3):
        launch(*words, None, out, 1, 0, None, None, None, *scales)

    assert torch.equal(out, exact(given).to(out_dtype))
    assert storage[0].isnan().all()
    assert storage[2].isnan().all()


@pytest.mark.parametrize("order", ["by columns", "by rows", "padded", "every second"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scales_of_any_strides(shape: tuple[int, int, int], order: str) -> None:
    given = operands(*shape, order)

    out = outblas.scaled_mm(*given, out_dtype=torch.float32)

    assert torch.equal(out, exact(given).float())

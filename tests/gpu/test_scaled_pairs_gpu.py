"""Gated products of fp8 operands whose halves have whole blocks of 128 columns, on a GPU:
hopper.gemm sums one half after the other, in tiles of 256 columns of B. Operands are small
integers and scales powers of two, so that sums are exact.
"""

from typing import Any

import pytest
import torch
from support.fp8 import BY_ROW, SQUARE, block_scale, fp8_operands, scaled
from support.gemm_problems import gemm_config

import outblas
from outblas.core.epilogue import EpilogueArgs
from outblas.core.problem import problem as describe
from outblas.hopper import gemm
from outblas.torch_ops import eager_scaled

Tensor = torch.Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.timeout(600)]

TILES = {
    "128x256": "tile_n=256,mma_n=128,cluster_m=1,stages=4,epilogue_stages=1",
    "128x256, two buffers": "tile_n=256,mma_n=128,cluster_m=1,stages=3,epilogue_stages=2",
    "128x256, A shared": "tile_n=256,mma_n=128,cluster_m=1,cluster_n=2,stages=4,epilogue_stages=1",
    "128x256, B shared": "tile_n=256,mma_n=128,cluster_m=2,stages=4,epilogue_stages=1",
    "64x256": (
        "tile_m=64,tile_n=256,mma_n=128,consumers=1,cluster_m=1,producer_registers=0,"
        "consumer_registers=0,stages=4,epilogue_stages=1"
    ),
    # Halves that divide a block, and halves that do not.
    "128x128": "tile_n=128,cluster_m=1,stages=5,epilogue_stages=1",
    "128x64": "tile_n=64,cluster_m=1,stages=5,epilogue_stages=1",
    "128x96": "tile_n=96,cluster_m=1,stages=4,epilogue_stages=1",
}
RECIPES = {
    "1x128 by 128x128": (BY_ROW, SQUARE),
    "1x128 by 1x128": (BY_ROW, BY_ROW),
    "1x128 by 1x128, loaded": (BY_ROW, BY_ROW),  # by TMA, where a warp copies the others
    "128x128 by 1x128": (SQUARE, BY_ROW),
}
SHAPES = (1, 128, 128), (77, 384, 272), (1000, 1280, 640)
POISON = 0xA5


def operands(M: int, N: int, K: int, recipe: str = "1x128 by 128x128") -> list[Tensor]:
    """A, B with the columns of both halves, and their scales."""
    of_a, of_b = RECIPES[recipe]
    given = fp8_operands(M, 2 * N, K, device="cuda", most=1)
    order = "by columns" if "loaded" in recipe else "by rows"
    scale_a = block_scale(M, K, of_a, "by columns", "cuda")
    return [*given, scale_a, block_scale(2 * N, K, of_b, order, "cuda").t()]


def halves(given: list[Tensor], recipe: str) -> tuple[Tensor, Tensor]:
    """The exact sums of both halves."""
    a, b, scale_a, scale_b = given
    of_a, of_b = RECIPES[recipe]
    x = scaled(a, scale_a, of_a) @ scaled(b.t(), scale_b.t(), of_b).t()
    gate, value = x.float().chunk(2, dim=1)
    return gate, value


def guarded(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Poisoned bytes, and an output in their midst."""
    size = torch.empty((), dtype=dtype).element_size() * shape[0] * shape[1]
    storage = torch.full((1024 + size,), POISON, dtype=torch.uint8, device="cuda")
    return storage, storage[512:-512].view(dtype).view(shape)


def run(tile: str, given: list[Tensor], out: Tensor, recipe: str, extra: EpilogueArgs) -> None:
    a, b, *scales = given
    words = eager_scaled.as_16_bit_pairs(a), eager_scaled.as_16_bit_pairs(b.t()).t()
    formats = f"e4m3 e4m3 promoted {' '.join(RECIPES[recipe])}"
    call = describe(*words, out, extra=extra, scales=tuple(scales), formats=formats)
    tensors: Any = (extra.bias, extra.residual, extra.aux, *scales)
    launch = gemm.plan(call, gemm_config(TILES[tile]))
    for _ in range(3):
        launch(*words, None, out, 1, 0, *tensors)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_every_tile_pairs_exact_sums(
    tile: str, shape: tuple[int, int, int], recipe: str, out_dtype: torch.dtype
) -> None:
    given = operands(*shape, recipe)
    gate, value = halves(given, recipe)
    storage, out = guarded(shape[:2], out_dtype)

    run(tile, given, out, recipe, EpilogueArgs("reglu"))

    assert torch.equal(out, (gate.relu() * value).to(out_dtype))
    assert (storage[:512] == POISON).all()
    assert (storage[-512:] == POISON).all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tile", TILES)
def test_a_bias_comes_before_a_pair_and_a_residual_after_it(tile: str, recipe: str) -> None:
    """And x is stored. Without scales that differ all of it is exact."""
    M, N, K = 500, 640, 272
    a, b, *scales = operands(M, N, K, recipe)
    given = [a, b, *(scale.fill_(1) for scale in scales)]
    gate, value = halves(given, recipe)
    bias = torch.randint(-2, 3, (2 * N,), device="cuda").bfloat16()
    residual = torch.randint(-4, 5, (M, N), device="cuda").bfloat16()
    aux = torch.empty(M, 2 * N, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")

    run(tile, given, out, recipe, EpilogueArgs("reglu", bias, residual, aux))

    x = torch.cat((gate, value), 1) + bias
    left, right = x.chunk(2, dim=1)
    assert torch.equal(aux, x.bfloat16())
    assert torch.equal(out, (left.relu() * right + residual).bfloat16())


@pytest.mark.parametrize("N", [1024, 1000], ids=["whole blocks", "a part of one"])
@pytest.mark.parametrize("M", [1, 64, 3000])
def test_a_call_has_the_same_pairs_whatever_tile_it_takes(M: int, N: int) -> None:
    recipe = "1x128 by 128x128"
    given = operands(M, N, 640, recipe)
    gate, value = halves(given, recipe)

    out = outblas.scaled_mm(*given, out_dtype=torch.float32, activation="reglu")

    assert torch.equal(out, gate.relu() * value)

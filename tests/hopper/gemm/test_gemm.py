"""What hopper.gemm refuses, and in which words."""

from dataclasses import replace

import pytest
import torch
from support.gemm_problems import (
    BF16,
    OWN_CONFIG,
    SMALL_TILE,
    fp8_product,
    gemm_config,
    problem_of,
    product,
)

from outblas.call.epilogue import Epilogue
from outblas.call.problem import Problem
from outblas.hopper import gemm

SMALL = product(64, 64, 64)
GATED = replace(SMALL, epilogue=Epilogue("gelu", gated=True))
BLOCKS, COLUMNS = fp8_product(), fp8_product(pair="1x128 1x128")
QUANTIZED, PAIRS = fp8_product(quantized=True), fp8_product(quantized=True, activation="swiglu")
PROMOTED = fp8_product(formats="e4m3 e4m3 promoted")
NARROW = f"{SMALL_TILE},tile_n=16,tile_k=16"
HALVES = "tile_n=256,mma_n=128,cluster_m=1,stages=4,epilogue_stages=1"
REFUSED: list[tuple[Problem, str, str]] = [
    (SMALL, "split_k=65", "split_k is 65, expected 1 to 64 partitions of K"),
    (SMALL, "split_k=2,stream_k=True", "split_k is 2 with stream_k, expected 1"),
    (
        SMALL,
        "pingpong=True,consumers=1,producer_registers=0,consumer_registers=0,tile_n=64",
        "pingpong with 1 consumers",
    ),
    (SMALL, "pingpong=True,split_k=2,tile_m=64", "pingpong with 2 consumers and partitions of K"),
    (
        SMALL,
        "variable_tile_n=True,tile_n=20",
        "expected a multiple of 8 from 24 to 256 and 0 when variable_tile_n",
    ),
    (SMALL, "variable_tile_n=True,tile_n=192,mma_n=96", "mma_n 96, expected"),
    (SMALL, "tile_m=64", "consumers is 2, expected 1, 2 or 3 that share tile_m"),
    (SMALL, "phases=True", "phases is True, expected False"),
    (SMALL, "cluster_m=3", "cluster_m is 3, expected 1, 2 or 4"),
    # Beside the barriers of 61 stages other words of shared memory have no room.
    (SMALL, NARROW.replace("stages=16", "stages=61"), "stages is 61, expected at most 60"),
    (GATED, "swap_ab=True", "gated pairs need swap_ab"),
    (GATED, "tile_n=80,cluster_m=1", "tile_n is 80, expected a multiple of 32"),
    (PROMOTED, "", "needs 256 registers for its sums and those of a stage"),
    (PROMOTED, f"{SMALL_TILE},tile_n=64,tile_k=128,stages=4", "tile_k is 128, expected at most 64"),
    # Scales that vary along K.
    (BLOCKS, "tile_n=64,tile_k=128,stages=2,cluster_m=1,epilogue_stages=1", "expected at most 64"),
    (BLOCKS, "tile_n=128,tile_k=32", "tile_k is 32, expected 64"),
    (BLOCKS, "", "registers for its sums"),
    (BLOCKS, "tile_n=128,stages=1,in_flight=0", "stages is 1, expected at least 2"),
    (
        COLUMNS,
        "tile_n=128,cluster_m=1,stages=6,epilogue_stages=2",
        "the tiles and their scales need 236544 bytes",
    ),
    # Outputs in fp8, of which 128 columns of a row share a scale.
    (QUANTIZED, "tile_n=192,stages=3,cluster_m=1", "a CTA stores 192 columns"),
    (PAIRS, "tile_n=128", "a CTA stores 64 columns, expected a multiple of 128"),
    (
        QUANTIZED,
        "tile_n=128,cluster_k=2,cluster_m=1,stages=3,epilogue_stages=1",
        "a CTA stores 64 columns",
    ),
    (QUANTIZED, "tile_n=128,swap_ab=True", "needs swap_ab, variable_tile_n"),
    (QUANTIZED, "tile_n=128,variable_tile_n=True", "needs swap_ab, variable_tile_n"),
    (QUANTIZED, "tile_n=128,split_k=2", "stream_k False, and split_k 1"),
    (QUANTIZED, "tile_n=128,stream_k=True", "stream_k False, and split_k 1"),
    (QUANTIZED, "tile_n=128,epilogue_stages=0", "epilogue_stages is 0"),
    # Wide pairs have room for the sums of one half.
    (PAIRS, HALVES.replace("mma_n=128", "mma_n=64"), "mma_n is 64, expected 0 or 128"),
    (PAIRS, HALVES.replace("mma_n=128", "mma_n=0"), "needs 256 registers for its sums"),
    (QUANTIZED, HALVES, "needs 256 registers for its sums"),
    (fp8_product(N=4088, activation="swiglu"), HALVES, "mma_n 0"),
    (fp8_product(formats="e4m3 e4m3", activation="swiglu"), HALVES, "mma_n 0"),
]


@pytest.mark.parametrize(("problem", "config", "reason"), REFUSED)
def test_a_config_that_does_not_suit_is_refused(problem: Problem, config: str, reason: str) -> None:
    assert reason in str(gemm.unsupported(problem, gemm_config(config)))


MATRIX = torch.empty(4096, 4096, device="meta")
UNSUPPORTED: dict[str, tuple[Problem, str]] = {
    "gated pairs by rows": (
        replace(GATED, N=60, b=(120, 1), alignment=(16, 16, 16)),
        "multiples of 8 columns",
    ),
    "scales far apart": (fp8_product(line=2**29), "strides of scale_a below 536870912"),
    "columns of half a block": (
        fp8_product(N=4160, quantized=True),
        "multiples of 128 columns, but was given 4160",
    ),
    "a residual": (fp8_product(quantized=True, residual=MATRIX), "no residual of outputs in fp8"),
    "8 bytes": (
        replace(QUANTIZED, alignment=(*QUANTIZED.alignment[:2], 8)),
        "contiguous matrices",
    ),
    "padded rows": (replace(QUANTIZED, out=(4100, 1)), "contiguous matrices"),
    "by columns": (replace(QUANTIZED, out=(1, 4096)), "contiguous matrices"),
}


@pytest.mark.parametrize(("problem", "reason"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_a_problem_that_no_config_takes_is_refused(problem: Problem, reason: str) -> None:
    assert reason in str(gemm.unsupported(problem))


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (fp8_product(line=2**29 - 4), None),
        (QUANTIZED, None),
        (PAIRS, HALVES),
        (fp8_product(activation="swiglu"), HALVES),
        (replace(fp8_product(activation="swiglu"), out_dtype=torch.float32), HALVES),
    ],
)
def test_what_just_fits_is_taken(problem: Problem, config: str | None) -> None:
    assert gemm.unsupported(problem, gemm_config(config) if config else None) is None


@pytest.mark.parametrize(
    "text", ["split_k=2,k_serpentine=False", "stream_k=True,k_serpentine=False", ""]
)
def test_k_has_one_order_where_a_row_s_bits_must_not_depend_on_others(text: str) -> None:
    given = product(64, 64, 4096, batch_invariant=True)
    one_order = replace(gemm_config(text), split_k=1, stream_k=False, k_serpentine=False)

    reason = gemm.unsupported(given, gemm_config(text))

    assert "batch_invariant needs one order of K" in str(reason)
    assert gemm.unsupported(given, one_order) is None


@pytest.mark.parametrize(("split_k", "is_refused"), [(64, True), (16, False)])
def test_partial_sums_beyond_32_bits_are_refused(split_k: int, is_refused: bool) -> None:
    given = problem_of(*(torch.empty(8192, 8192, dtype=BF16, device="meta") for _ in range(3)))
    config = replace(OWN_CONFIG, split_k=split_k, k_serpentine=False)

    reason = gemm.unsupported(given, config)

    assert ("split_k supports up to 2147483648 partial sums" in str(reason)) == is_refused
    assert (reason is not None) == is_refused

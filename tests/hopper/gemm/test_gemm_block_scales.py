"""Scales of fp8 operands that vary along K in hopper.gemm, without a GPU: which variant a problem
takes, what is refused, and what it compiles to.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.gemm_problems import BF16, gemm_config, variant_of

from outblas.base import configs
from outblas.core import fp8
from outblas.core import problem as operands
from outblas.core.epilogue import EpilogueArgs, glu_split
from outblas.core.problem import Problem
from outblas.hopper import gemm
from outblas.hopper.gemm import block_scales, heuristic
from outblas.hopper.gemm.compile import shared_memory
from outblas.hopper.parts.config import SHARED_MEMORY, stage_scales
from outblas.hopper.parts.config_limits import block_scaled_reason, promoted_reason

H100 = heuristic.Rates()
PAIRS = ("1x128 128x128", "1x128 1x128", "128x128 1x128", "128x128 128x128")
ROWS = PAIRS[0]  # each row of A has a scale, and 128 columns of B share one
BOTH = PAIRS[1]
TILES = {
    "256x128": "tile_m=256,tile_n=128,cluster_m=1,stages=4,epilogue_stages=1",
    "192x128": (
        "tile_m=192,tile_n=128,consumers=3,cluster_m=1,producer_registers=32,"
        "consumer_registers=160,stages=4,epilogue_stages=1"
    ),
    "128x192": "tile_n=192,cluster_m=1,stages=5,epilogue_stages=1",
    "128x128": "tile_n=128,cluster_m=1,stages=6,epilogue_stages=1",
}


def lying(rows: int, columns: int, line: int, first: int = 0) -> torch.Tensor:
    """Scales of so many columns that lie `line` numbers apart, without data; `first`: of which
    number of the memory they begin.
    """
    memory = torch.empty(columns * line + first, device="meta")
    return memory[first:].as_strided((rows, columns), (1, line))


def problem(
    M: int = 4096,
    N: int = 4096,
    K: int = 4096,
    pair: str = ROWS,
    *,
    line: int | None = None,
    by_columns: bool = False,
    **epilogue: Any,
) -> Problem:
    """A product of K fp8 terms, without data. The scales of A's rows are neighbours, and blocks of
    K `line` numbers apart, by default as many as there are rows; those of B's columns likewise in
    K. `by_columns`: of C are contiguous. `epilogue`: an activation, and tensors.
    """
    formats = f"e4m3 e4m3 promoted {pair}"
    given = fp8.formats(formats)
    columns, blocks = N * glu_split(epilogue.get("activation", "")), -(-K // fp8.BLOCK)
    of_a, of_b = -(-M // given.block_a), -(-columns // given.block_b)
    out = torch.empty(N, M, dtype=BF16, device="meta").t()
    return operands.problem(
        torch.empty(M, K // 2, dtype=BF16, device="meta"),
        torch.empty(columns, K // 2, dtype=BF16, device="meta").t(),
        out if by_columns else torch.empty(M, N, dtype=BF16, device="meta"),
        extra=EpilogueArgs(**{"activation": "", **epilogue}),
        scales=(lying(of_a, blocks, line or of_a), lying(of_b, blocks, of_b).t()),
        formats=formats,
    )


# ---- the variant


@pytest.mark.parametrize(
    ("given", "wide"),
    [
        (problem(), True),
        (problem(M=4), True),
        (problem(M=4098), False),
        (problem(M=4098, line=4100), False),
        (problem(M=4096, line=4100), True),
        (problem(M=4096, line=4098), False),
        (problem(pair="1x128 1x128"), True),
        (problem(M=4098, pair="1x128 1x128"), False),
        (problem(pair="128x128 1x128"), False),
        (problem(pair="128x128 128x128"), False),
    ],
    ids=str,
)
def test_tma_loads_scales_of_rows_that_come_in_whole_granules(given: Problem, wide: bool) -> None:
    traits = variant_of(given, gemm_config("tile_n=128")).traits

    assert traits.wide_scales == wide


def test_scales_are_copied_where_operands_come_before_the_previous_call_has_ended() -> None:
    """The warp that loads them need not wait for that call then."""
    early = gemm_config("tile_n=128,pdl=True,weights_ready=True")

    assert not variant_of(problem(), early).traits.wide_scales


@pytest.mark.parametrize(
    ("columns", "line", "alignment", "wide"),
    [
        (1024, 1024, 16, True),
        (1024, 1028, 16, True),
        (1024, 1026, 16, False),
        (1024, 1024, 8, False),
        (1022, 1024, 16, False),
    ],
)
def test_tma_loads_scales_of_columns_that_come_in_whole_granules(
    columns: int, line: int, alignment: int, wide: bool
) -> None:
    """Beside those of rows, which a warp copies where it copies those of columns."""
    given = problem(pair="1x128 1x128", N=columns)
    view = given.epilogue.scale_b
    assert view is not None
    lying = replace(view, strides=(line, 1), alignment=alignment)
    given = replace(given, epilogue=replace(given.epilogue, scale_b=lying))

    for swap in (False, True):
        config = gemm_config(f"tile_n=128,swap_ab={swap}")
        assert variant_of(given, config).traits.wide_scales == wide


@pytest.mark.parametrize("name", ["scale_a", "scale_b"])
def test_scales_at_any_address_are_copied(name: str) -> None:
    """In a transposed problem those of B are the kernel's rows."""
    swapped = name == "scale_b"
    given = problem(pair="128x128 1x128" if swapped else ROWS)
    if swapped:  # neighbours along N
        view = given.epilogue.scale_b
        assert view is not None
        wide = replace(view, strides=(4096, 1))
        given = replace(given, epilogue=replace(given.epilogue, scale_b=wide))
    config = gemm_config(f"tile_n=128,swap_ab={swapped}")
    view = getattr(given.epilogue, name)

    moved = replace(given, epilogue=replace(given.epilogue, **{name: replace(view, alignment=8)}))

    assert variant_of(given, config).traits.wide_scales
    assert not variant_of(moved, config).traits.wide_scales


@pytest.mark.parametrize(
    ("tile", "block_b", "count"),
    [("256x128", 128, 256), ("256x128", 1, 384), ("128x192", 128, 128), ("128x192", 1, 320)],
)
def test_a_stage_has_scales_of_all_rows_and_of_columns_of_their_own(
    tile: str, block_b: int, count: int
) -> None:
    assert stage_scales(gemm_config(TILES[tile]), block_b) == count


@pytest.mark.parametrize(
    ("tile_n", "gated"),
    [(256, False), (128, False), (64, False), (192, False), (96, False), (256, True), (96, True)],
)
def test_a_tile_has_factors_for_all_blocks_of_columns_that_it_meets(
    tile_n: int, gated: bool
) -> None:
    """A half of gated pairs may begin at any column, other tiles at multiples of their width."""
    config = gemm_config(f"tile_n={tile_n}")
    traits = replace(variant_of(problem(), gemm_config("tile_n=128")).traits, gated=gated)
    width = tile_n // 2 if gated else tile_n

    found = block_scales.blocks_of(config, traits, width)

    begins = range(128) if gated else range(0, 128 * tile_n, tile_n)
    met = {(first + width - 1) // 128 - first // 128 + 1 for first in begins}
    assert max(met) <= found <= max(met) + 1


# ---- what is refused
REFUSED = {
    "k tiles of two blocks": (
        "tile_n=64,tile_k=128,stages=2,cluster_m=1,epilogue_stages=1",
        ROWS,
        "tile_k is 128, expected at most 64",
    ),
    "k tiles of half a block": ("tile_n=128,tile_k=32", ROWS, "tile_k is 32, expected 64"),
    "no memory beside the stages": (
        "tile_n=128,cluster_m=1,stages=6,epilogue_stages=2",
        "1x128 1x128",
        "the tiles and their scales need 236544 bytes",
    ),
    "no registers for the sums of a stage": ("", ROWS, "registers for its sums"),
    "one stage": ("tile_n=128,stages=1,in_flight=0", ROWS, "stages is 1, expected at least 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_cannot_have_scales_of_blocks_is_refused(name: str) -> None:
    config, pair, reason = REFUSED[name]

    assert reason in str(gemm.unsupported(problem(pair=pair), gemm_config(config)))


def test_scales_that_lie_too_far_apart_are_refused() -> None:
    near, far = problem(line=2**29 - 4), problem(line=2**29)

    assert gemm.unsupported(near) is None
    assert "strides of scale_a below 536870912" in str(gemm.unsupported(far))


@pytest.mark.parametrize("activation", ["", "swiglu"])
@pytest.mark.parametrize("pair", PAIRS)
def test_configs_of_the_rule_fit_memory_and_registers(pair: str, activation: str) -> None:
    rows, others = (1, 16, 64, 128, 500, 4096, 16384), ((512, 7168), (4096, 512), (24576, 1536))
    for number, (M, (N, K)) in enumerate(itertools.product(rows, others)):
        by_columns = bool(number // 2 % 2)
        given = problem(M, N, K, pair, by_columns=by_columns, activation=activation)

        config: Any = heuristic.config(given, H100)

        assert gemm.Gemm.invalid_reason(config) is None
        assert gemm.unsupported(given, config) is None
        assert promoted_reason(config, activation == "swiglu") is None
        made = variant_of(given, config)
        assert block_scaled_reason(config, made.traits.block_b) is None
        assert shared_memory(made) <= SHARED_MEMORY
        assert configs.from_text(gemm.Config, configs.to_text(config)) == config


@pytest.mark.parametrize("M", [256, 1024, 8192])
def test_pairs_of_whole_blocks_take_tiles_whose_additions_select_no_factors(M: int) -> None:
    """With many rows they share B, which was the faster cluster of two."""
    given = problem(M, 18432, 7168, activation="swiglu")

    config: Any = heuristic.config(given, H100)

    half = config.tile_n // 2
    assert half % 128 == 0 or 128 % half == 0
    if M > 256:
        assert (config.tile_n, config.mma_n) == (256, 128)
        assert (config.cluster_m, config.cluster_n) == (2, 1)


@pytest.mark.parametrize(
    ("given", "is_tall"),
    [
        (problem(pair=BOTH), True),
        (problem(pair=BOTH, line=4098), False),
        (problem(pair="128x128 1x128"), False),
    ],
    ids=str,
)
def test_tiles_of_256_rows_need_scales_of_columns_that_tma_loads(
    given: Problem, is_tall: bool
) -> None:
    """The warp that copies them has no registers for so many addresses."""
    config: Any = heuristic.config(given, H100)

    assert (config.tile_m == 256) == is_tall
    assert variant_of(given, config).traits.wide_scales == is_tall

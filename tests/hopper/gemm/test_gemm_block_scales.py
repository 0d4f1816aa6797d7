"""fp8 operands and outputs of hopper.gemm, without a GPU: where scales lie, which variant a problem
takes, and which config the rule gives it.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from support.gemm_problems import fp8_product, gemm_config, variant_of

from outblas.base import configs
from outblas.call.problem import Problem
from outblas.hopper import gemm
from outblas.hopper.gemm import heuristic
from outblas.hopper.gemm.compile import shared_memory
from outblas.hopper.parts.config import SHARED_MEMORY
from outblas.hopper.parts.config_limits import (
    block_scaled_reason,
    gated_reason,
    promoted_reason,
    quantized_reason,
)

H100 = heuristic.Rates()
PAIRS = ("1x128 128x128", "1x128 1x128", "128x128 1x128", "128x128 128x128")
ROWS = PAIRS[0]  # each row of A has a scale, and 128 columns of B share one
BOTH = PAIRS[1]
FORMATS = (*(f"e4m3 e4m3 promoted {pair}" for pair in PAIRS), "e4m3 e5m2 promoted", "e5m2 e4m3")


# ---- the variant
@pytest.mark.parametrize(
    ("given", "wide"),
    [
        (fp8_product(), True),
        (fp8_product(M=4), True),
        (fp8_product(M=4098), False),
        (fp8_product(M=4098, line=4100), False),
        (fp8_product(M=4096, line=4100), True),
        (fp8_product(M=4096, line=4098), False),
        (fp8_product(pair="1x128 1x128"), True),
        (fp8_product(M=4098, pair="1x128 1x128"), False),
        (fp8_product(pair="128x128 1x128"), False),
        (fp8_product(pair="128x128 128x128"), False),
    ],
    ids=str,
)
def test_tma_loads_scales_of_rows_that_come_in_whole_granules(given: Problem, wide: bool) -> None:
    traits = variant_of(given, gemm_config("tile_n=128")).traits

    assert traits.wide_scales == wide


def test_scales_are_copied_where_operands_come_before_the_previous_call_has_ended() -> None:
    """The warp that loads them need not wait for that call then."""
    early = gemm_config("tile_n=128,pdl=True,weights_ready=True")

    assert not variant_of(fp8_product(), early).traits.wide_scales


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
    given = fp8_product(pair="1x128 1x128", N=columns)
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
    given = fp8_product(pair="128x128 1x128" if swapped else ROWS)
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


# ---- the rule
@pytest.mark.parametrize("activation", ["silu", "swiglu"])
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("quantized", [False, True])
def test_configs_of_the_rule_fit_memory_and_registers(
    formats: str, activation: str, quantized: bool
) -> None:
    gated = activation == "swiglu"
    rows, others = (1, 16, 64, 128, 500, 4096, 16384), ((512, 7168), (4096, 512), (24576, 1536))
    for number, (M, (N, K)) in enumerate(itertools.product(rows, others)):
        given = fp8_product(
            M,
            N,
            K,
            formats=formats,
            by_columns=not quantized and number // 2 % 2 > 0,
            quantized=quantized,
            activation=activation,
        )

        config: Any = heuristic.config(given, H100)

        assert gemm.invalid_reason(config) is None
        assert gemm.unsupported(given, config) is None
        variant = variant_of(given, config)
        if gated:
            assert gated_reason(config, in_halves=True) is None
        if variant.traits.promoted:
            assert promoted_reason(config, gated) is None
        if variant.traits.block_scaled:
            assert block_scaled_reason(config, variant.traits.block_b) is None
        if quantized:
            assert quantized_reason(config, gated) is None
            assert variant.traits.staged
        assert shared_memory(variant) <= SHARED_MEMORY
        assert configs.from_text(gemm.Config, configs.to_text(config)) == config


def test_a_warp_that_copies_scales_of_wide_pairs_has_registers_for_them() -> None:
    """With fewer it spills."""
    calls = [
        fp8_product(8192, pair=pair, line=8194, quantized=True, activation="swiglu")
        for pair in ("1x128 128x128", "1x128 1x128", "128x128 1x128")
    ]
    choices = [heuristic.config(call, H100) for call in calls]

    registers = [(c.producer_registers, c.consumer_registers) for c in choices]
    assert registers == [(40, 232), (56, 224), (56, 224)]


def test_large_products_are_quantized_in_the_kernel_and_narrow_ones_of_few_rows_are_not() -> None:
    """Of few rows, CTAs that hold 128 columns of pairs are too few for the GPU."""
    shapes = (8192, 4096, 4096), (16, 24576, 4096), (16, 1024, 7168)
    calls = [fp8_product(*shape, quantized=True, activation="swiglu") for shape in shapes]

    assert [heuristic.quantizes(call, H100) for call in calls] == [True, True, False]


@pytest.mark.parametrize("M", [256, 1024, 8192])
def test_pairs_of_whole_blocks_take_tiles_whose_additions_select_no_factors(M: int) -> None:
    """With many rows they share B, which was the faster cluster of two."""
    given = fp8_product(M, 18432, 7168, activation="swiglu")

    config: Any = heuristic.config(given, H100)

    half = config.tile_n // 2
    assert half % 128 == 0 or 128 % half == 0
    if M > 256:
        assert (config.tile_n, config.mma_n) == (256, 128)
        assert (config.cluster_m, config.cluster_n) == (2, 1)


@pytest.mark.parametrize(
    ("given", "is_tall"),
    [
        (fp8_product(pair=BOTH), True),
        (fp8_product(pair=BOTH, line=4098), False),
        (fp8_product(pair="128x128 1x128"), False),
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

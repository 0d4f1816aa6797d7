"""fp8 operands on the model of the Hopper kernels' protocols: sums that consumers add up stage by
stage, and scales that vary along K, of which each stage, row and column has its own.
"""

import os
import random
from dataclasses import replace
from typing import Any

import pytest
from protocol.fault import ProtocolFault
from protocol.launch import Case, simulate, traits_of
from protocol.scale_faults import SCALE_FAULTS
from protocol.schedules import (
    FORMATS,
    OWN,
    SCALED,
    SMALL_TILES,
    TIMINGS,
    TIMINGS_OF_GRIDS,
    case_of,
    is_clean,
    run_grids,
    runs_clean,
)

from outblas.call import fp8
from outblas.hopper.gemm import rule_tiles, search_space
from outblas.hopper.gemm.config import Config, invalid_reason
from outblas.hopper.parts.config_limits import block_scaled_reason, gated_reason, promoted_reason

SAMPLES = int(os.environ.get("OUTBLAS_PROTOCOL_SAMPLES", "32")) // 2


def refused_reason(case: Case) -> str | None:
    """Why the host refuses a case, if it does."""
    config, formats = case.config, fp8.formats(case.formats)
    reason = invalid_reason(config) or promoted_reason(config, "gated" in case.epilogue)
    if formats.block_a:
        reason = reason or block_scaled_reason(config, formats.block_b)
    if "gated" in case.epilogue:
        reason = reason or gated_reason(config, in_halves=True)
    return reason


@pytest.mark.parametrize("name", SCALED)
def test_a_schedule_is_one_that_the_host_takes(name: str) -> None:
    case = case_of(*SCALED[name])

    assert refused_reason(case) is None
    traits = traits_of(case)
    assert traits.formats == case.formats
    assert traits.wide_scales == ("loaded" in name)


@pytest.mark.parametrize("timing", TIMINGS_OF_GRIDS)
@pytest.mark.parametrize("name", SCALED)
def test_sums_are_multiplied_by_the_scales_of_their_stage_in_every_timing(
    name: str, timing: int
) -> None:
    config, words = SCALED[name]
    run_grids(config, words, timing, ((1, 1, 2), (2, 3, 1), (2, 2, 2)), stages=config.stages + 1)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize(("rows", "columns"), [(64, 200), (132, 8)])
@pytest.mark.parametrize(
    "name",
    ["scales copied", "scales loaded", "scales of columns, gated", "scales of columns loaded"],
)
def test_scales_end_where_their_rows_and_columns_do(
    name: str, rows: int, columns: int, timing: int
) -> None:
    """Which is inside of a tile. Nothing behind the last one is read."""
    case = replace(case_of(*SCALED[name], k_tiles=6), M=rows, N=columns)

    runs_clean(case, timing)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize(
    "slow", ["load A", "load B", "load scales", "load residual", "copy", "wgmma", "store", "wake"]
)
@pytest.mark.parametrize("word", ["wide", "", "columns", "columns wide"])
def test_scales_with_one_kind_of_long_delay(word: str, slow: str, timing: int) -> None:
    words = f"{word} residual" if "columns" in word else f"blocks residual {word}"
    case = case_of(replace(OWN, stages=2), words, k_tiles=5, clusters=1)

    runs_clean(case, 1 + timing, slow={slow: 100_000.0})


@pytest.mark.parametrize("name", ["scales loaded", "scales copied, split", "scales loaded, stream"])
def test_scaled_sums_are_added_in_one_order_in_every_timing(name: str) -> None:
    config, words = SCALED[name]
    case = case_of(config, words, columns=4, k_tiles=7, clusters=3)

    orders = [runs_clean(case, seed).order for seed in range(3)]

    assert all(order == orders[0] for order in orders)


# ---- samples of the space
def sampled(number: int) -> Case:
    """A config of the search space that can have scales, for a problem of a few tiles that may end
    inside of the last ones.
    """
    draw = random.Random(number)
    while True:
        tile, cluster, cut = (
            draw.choice(options)
            for options in (
                search_space._TILES,
                ((1, 1), (2, 1), (1, 2), (2, 2)),
                search_space._PARTITIONS,
            )
        )
        words = f"{draw.choice([*FORMATS])} {draw.choice(('', 'wide', 'wide'))} " + draw.choice(
            ("", "", "addend", "residual", "gated aux", "bias", "unstaged", "transposed", "fp32")
        )
        config = replace(
            rule_tiles.shaped(Config(), *tile[:2], *cluster),
            pingpong=bool(tile[2]),
            in_flight=tile[3],
            tile_n=draw.choice((32, 64, 96, 104, 128, 160, 192)),
            variable_tile_n=draw.random() < 0.3,
            split_k=cut[0],
            stream_k=bool(cut[1]),
            cluster_k=cut[2],
            k_serpentine=cut[0] == 1,
        )
        config = rule_tiles.filled(config)
        config = replace(config, stages=draw.randint(1, min(config.stages, 4)))
        config = replace(
            config,
            in_flight=min(config.in_flight, config.stages - 1),
            epilogue_stages=draw.randint(0, config.epilogue_stages),
        )
        case = case_of(
            config,
            words,
            rows=draw.randint(1, 2),
            columns=draw.randint(1, 3),
            k_tiles=draw.choice((1, 2, config.stages + 1, 2 * config.stages + 1)),
            clusters=draw.randint(1, 4 if config.cluster <= 2 else 2),
        )
        if refused_reason(case) is None and config.cluster_k <= case.k_tiles:
            return case


@pytest.mark.parametrize("quarter", range(4))
def test_samples_of_the_space_with_scales_run_clean(quarter: int) -> None:
    for number in range(quarter, SAMPLES, 4):
        case = sampled(number)
        runs_clean(case, number + 1, calls=2 if case.config.split else 1)


# ---- planted faults
# Launches that only some faults show in.
FAULT_CASES = {
    "scales loaded, rows end inside of a tile": replace(
        case_of(*SCALED["scales loaded"], k_tiles=7), M=132
    ),
    "scales of columns loaded, columns end inside of a tile": replace(
        case_of(*SCALED["scales of columns loaded"], k_tiles=7), N=136
    ),
}


@pytest.mark.parametrize("fault", SCALE_FAULTS, ids=lambda fault: fault.what)
def test_a_planted_fault_in_scales_is_found(fault: Any) -> None:
    case = FAULT_CASES.get(fault.schedule) or case_of(
        *SCALED[fault.schedule], rows=2, columns=2, k_tiles=7
    )
    for seed in range(1, 41):
        try:
            simulate(case, seed, patches=fault.changes)
        except ProtocolFault:
            assert is_clean(case, seed)
            return
    pytest.fail(f"40 timings of {case} are clean")


def test_a_small_tile_has_the_scales_of_its_own_columns() -> None:
    """Two tiles share a block of 128 columns."""
    runs_clean(case_of(SMALL_TILES, "blocks wide", columns=4), 1)

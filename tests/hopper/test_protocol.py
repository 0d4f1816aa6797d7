"""The Hopper kernels' protocols on a model that runs their own source: no timing deadlocks, none
reads early.

`protocol` says what the model is. Here it runs every schedule and samples of the search space under
random and adversarial delays, and has to find the faults that are planted in the source.
"""

import importlib
import os
import random
from dataclasses import replace
from typing import Any

import pytest
from protocol.fault import ProtocolFault
from protocol.faults import FAULTS, TURN_EARLY
from protocol.launch import Case, simulate, simulate_rung, traits_of
from protocol.schedules import (
    COOPERATIVE,
    EARLY,
    ELASTIC,
    PINGPONG,
    SCHEDULES,
    STREAM_K,
    TIMINGS,
    TIMINGS_OF_GRIDS,
    case_of,
    is_clean,
    run_grids,
    runs_clean,
)

from outblas.base.registry import LADDERS
from outblas.hopper.gemm import rule_tiles, search_space, subtiles
from outblas.hopper.gemm.config import Config, invalid_reason
from outblas.hopper.parts.config import STAGGERS
from outblas.hopper.parts.config_limits import gated_reason

SAMPLES = int(os.environ.get("OUTBLAS_PROTOCOL_SAMPLES", "32"))


# ---- every schedule
@pytest.mark.parametrize("timing", TIMINGS_OF_GRIDS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_runs_clean_in_every_timing(name: str, timing: int) -> None:
    config, words = SCHEDULES[name]
    run_grids(config, words, timing, ((1, 1, 2), (2, 3, 1), (3, 3, 2)), stages=config.stages)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("name", ["cooperative", "multicast", "pingpong", "split-K", "cluster-K"])
def test_a_batch_runs_clean(name: str, timing: int) -> None:
    config, words = SCHEDULES[name]
    case = case_of(config, words, columns=2, matrices=3)

    runs_clean(case, 1 + timing, calls=2 if config.split else 1)


@pytest.mark.parametrize(
    "name",
    ["cooperative", "pingpong", "elastic columns", "cluster-K", "split-K", "stream-K"],
)
def test_sums_are_added_in_one_order_in_every_timing(name: str) -> None:
    config, words = SCHEDULES[name]
    case = case_of(config, words, columns=4, k_tiles=7, clusters=3)

    orders = [runs_clean(case, seed).order for seed in range(3)]

    assert all(order == orders[0] for order in orders)


def test_a_cta_that_sees_all_others_arrive_writes_no_sums() -> None:
    case = case_of(STREAM_K, rows=3, columns=4, k_tiles=9, clusters=5)

    written = {len(runs_clean(case, seed).workspace.memory.values) for seed in range(1, 9)}

    assert len(written) > 1, f"in eight timings as many sums are written: {written}"


@pytest.mark.parametrize(
    ("name", "slow"),
    [
        ("split-K", "global write"),
        ("split-K", "fence"),
        ("stream-K", "global read"),
        ("stream-K", "atomic"),
        ("stream-K, small tiles", "global write"),
        ("stream-K, small tiles", "wgmma"),
    ],
)
def test_partial_sums_survive_one_kind_of_delay(name: str, slow: str) -> None:
    config, words = SCHEDULES[name]
    case = case_of(config, words, rows=3, columns=4, k_tiles=9, clusters=5)

    orders = [runs_clean(case, seed, slow={slow: 100_000.0}, calls=2).order for seed in (1, 2)]

    assert all(order == orders[0] for order in orders)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("slow", ["load A", "load B", "load addend", "wgmma", "store", "wake"])
def test_one_kind_of_delay_a_thousand_times_as_long_as_the_others(slow: str, timing: int) -> None:
    """As with an addend in host memory, which takes longer to come than a tile to multiply."""
    for config in (PINGPONG, COOPERATIVE, ELASTIC):
        case = case_of(config, "addend", rows=3, k_tiles=8, clusters=1)
        runs_clean(case, 1 + timing, slow={slow: 100_000.0})


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("rung", LADDERS["hopper"][:-1])
def test_a_rung_of_the_ladder_runs_clean(rung: str, timing: int) -> None:
    name = rung.removeprefix("hopper.")
    config = importlib.import_module(f"outblas.hopper.{name}").Config()
    # 2 x 3 cluster tiles for four clusters, of which two have none in the last step.
    M, N = config.tile_m * config.cluster_m * 2, config.tile_n * config.cluster_n * 3
    for number, k_tiles in enumerate((1, config.stages, 2 * config.stages + 1)):
        seed = (timing + number) % 3
        try:
            simulate_rung(name, config, M, N, k_tiles, 4, seed)
        except ProtocolFault as fault:
            pytest.fail(f"{fault}\nseed {seed}, {k_tiles} k tiles, {config}")


# ---- samples of the space
EPILOGUES = (
    "",
    "",
    "addend",
    "addend in_place",
    "residual",
    "aux",
    "bias",
    "gated",
    "gated aux",
    "residual aux",
    "unstaged",
    "unstaged residual",
    "gated residual",
    "bias residual",
)


def sampled(number: int) -> Case:
    """A config of the search space, or one like them with fewer stages and buffers, for a problem
    of a few tiles.
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
        words = draw.choice(EPILOGUES) + (" fp32" if draw.random() < 0.2 else "")
        config = replace(
            rule_tiles.shaped(Config(), *tile[:2], *cluster),
            pingpong=bool(tile[2]),
            in_flight=tile[3],
            tile_n=draw.choice((32, 64, 96, 104, 128, 160, 192, 208, 256)),
            variable_tile_n=draw.random() < 0.3,
            tile_k=draw.choice((64, 64, 128)),
            split_k=cut[0],
            stream_k=bool(cut[1]),
            cluster_k=cut[2],
            k_serpentine=cut[0] == 1,
            order=draw.choice(("serpentine", "hilbert", "consecutive")),
            stagger=STAGGERS[number % 3],
            stagger_k_tiles=number % 5,
        )
        config = rule_tiles.filled(config)
        if draw.random() < 0.5:
            config = replace(config, stages=draw.randint(1, config.stages))
        config = replace(
            config,
            in_flight=min(config.in_flight, config.stages - 1),
            epilogue_stages=draw.randint(0, config.epilogue_stages),
        )
        k_tiles = draw.choice((1, 2, 3, config.stages, config.stages + 1, 2 * config.stages + 1))
        gated = gated_reason(config) if "gated" in words else None
        if invalid_reason(config) is None and gated is None and config.cluster_k <= k_tiles:
            return case_of(
                config,
                words,
                rows=draw.randint(1, 3),
                columns=draw.randint(1, 3),
                k_tiles=k_tiles,
                clusters=draw.randint(1, 4 if config.cluster <= 2 else 2),
                matrices=0 if "addend" in words else draw.choice((0, 0, 2)),
            )


@pytest.mark.parametrize("eighth", range(8))
def test_samples_of_the_space_run_clean(eighth: int) -> None:
    for number in range(eighth, SAMPLES, 8):
        case = sampled(number)
        runs_clean(case, number + 1, calls=2 if case.config.split else 1)


# ---- planted faults
def one_tile(schedule: str) -> Case:
    """A call of one tile in a schedule, of enough k tiles for consumers to be staggered."""
    return case_of(*SCHEDULES[schedule], rows=1, columns=1, k_tiles=9, clusters=1)


# Launches that only some faults show in.
FAULT_CASES = {
    "pingpong, one k tile": case_of(
        replace(PINGPONG, tile_n=64), "addend fp32", rows=3, columns=3, k_tiles=1, clusters=1
    ),
    "stream-K, five clusters": case_of(STREAM_K, rows=3, columns=4, k_tiles=9, clusters=5),
    "one wave, not staggered": one_tile("one wave, not staggered"),
    # Stages are left for the source when the weights of a tile's only k tile are loaded.
    "weights ready, transposed, one k tile": case_of(
        EARLY, "transposed residual", rows=1, columns=1, k_tiles=1, clusters=1
    ),
    "one wave": one_tile("one wave"),
    "one wave, three consumers": one_tile("one wave, three consumers"),
}
SEEDS = range(1, 61)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_planted_fault_is_found(fault: Any) -> None:
    case = FAULT_CASES.get(fault.schedule) or case_of(
        *SCHEDULES[fault.schedule], rows=2, columns=3, k_tiles=9
    )
    calls = 2 if case.config.split else 1
    for seed in SEEDS:
        try:
            simulate(case, seed, patches=fault.changes, calls=calls)
        except ProtocolFault:
            assert is_clean(case, seed, calls)
            return
    pytest.fail(f"{len(SEEDS)} timings of {case} are clean")


def test_the_turn_that_passed_early_reads_an_addend_as_an_operand() -> None:
    """The fault that was shipped gave wrong results, silently: products of an addend's bytes."""
    case = case_of(PINGPONG, "addend", rows=3, k_tiles=8, clusters=1)
    kinds = set()
    for seed in range(1, 30):
        try:
            simulate(
                case,
                seed,
                patches=TURN_EARLY,
                slow={"load addend": 100_000.0, "load A": 1.0, "load B": 1.0},
            )
        except ProtocolFault as fault:
            kinds.add(fault.kind)
    assert "early read" in kinds


def test_no_k_tile_is_no_product() -> None:
    """A tile without k tiles waits for a stage that never comes; the host refuses K = 0."""
    with pytest.raises(ProtocolFault, match="deadlock"):
        simulate(case_of(COOPERATIVE, k_tiles=0), 0)


@pytest.mark.parametrize(
    ("name", "trait", "value"),
    [
        ("pingpong, addend fetched", "source", "addend"),
        ("staggered turns, residual fetched", "staggered_tail", True),
        ("staggered turns, residual fetched", "source", "residual"),
        ("staggered turns, gated pairs", "aux", "staged"),
    ],
)
def test_a_schedule_has_the_traits_that_its_name_says(name: str, trait: str, value: Any) -> None:
    traits = traits_of(case_of(*SCHEDULES[name], k_tiles=9))

    assert getattr(traits, trait) == value


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name.startswith("one wave")])
def test_a_case_of_one_tile_is_a_single_wave_with_c_over_a(name: str) -> None:
    case = one_tile(name)
    traits = traits_of(case)

    assert traits.single_wave
    assert traits.staggered_tail == (case.config.stagger == "rule")
    stored = case.config.epilogue_config(traits.gated)
    assert subtiles.overlays_stages(stored, case.out_dtype.itemsize, traits)

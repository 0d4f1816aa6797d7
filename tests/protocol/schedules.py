"""The schedules of `hopper.gemm` that run on the model, and launches of them."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from outblas.hopper.gemm import rule_tiles
from outblas.hopper.gemm.config import Config
from outblas.hopper.parts.config import HopperConfig

from .fault import ProtocolFault
from .launch import Case, simulate

OWN = replace(Config(), cluster_m=1, tile_n=128)  # 128x128, two consumers that share a tile
SMALL = rule_tiles.shaped(OWN, 64, 1, 1, 1)


COOPERATIVE = OWN
PINGPONG = replace(OWN, tile_n=192, stages=5, pingpong=True, epilogue_stages=1)
THREE = replace(rule_tiles.shaped(OWN, 192, 3, 1, 1), tile_n=128, in_flight=0, stages=4)
MULTICAST = replace(OWN, cluster_m=2, cluster_n=2)
ELASTIC = replace(OWN, tile_n=160, variable_tile_n=True)
CLUSTER_K = replace(SMALL, tile_n=64, cluster_k=4, epilogue_stages=1)
SPLIT_K = replace(OWN, split_k=3, k_serpentine=False)
STREAM_K = replace(OWN, stream_k=True)
# A call that starts before the previous one has ended, and loads weights before.
EARLY = replace(OWN, pdl=True, weights_ready=True)
SMALL_TILES = replace(SMALL, tile_n=64, epilogue_stages=1, k_serpentine=False)

ONE_WAVE = replace(OWN, tile_n=256, epilogue_stages=1)  # C of a single tile lies over A
THREE_ONE_WAVE = replace(THREE, tile_n=192, epilogue_stages=1)

# Schedule: config, and what the epilogue has.
SCHEDULES: dict[str, tuple[HopperConfig, str]] = {
    "one consumer": (replace(SMALL, tile_n=64, epilogue_stages=1), ""),
    "cooperative": (COOPERATIVE, ""),
    "cooperative, no group in flight": (replace(COOPERATIVE, in_flight=0), ""),
    "cooperative, one stage": (replace(COOPERATIVE, stages=1, in_flight=0), ""),
    "cooperative, registers to memory": (replace(COOPERATIVE, epilogue_stages=0), ""),
    "three consumers": (THREE, ""),
    "staggered turns": (COOPERATIVE, "bias"),
    "staggered turns, residual fetched": (COOPERATIVE, "residual"),
    "staggered turns, x stored": (COOPERATIVE, "aux"),
    "staggered turns, gated pairs": (COOPERATIVE, "gated aux"),
    "staggered turns, nothing after the product": (replace(COOPERATIVE, stagger="always"), ""),
    "staggered turns, no group in flight": (replace(COOPERATIVE, in_flight=0), "bias"),
    "staggered turns of three": (replace(THREE, stagger="always"), ""),
    "staggered turns of three, residual fetched": (replace(THREE, stagger="always"), "residual"),
    "one wave": (ONE_WAVE, ""),
    "one wave, two k tiles in turn": (replace(ONE_WAVE, stagger_k_tiles=2), ""),
    "one wave, one k tile in turn": (replace(ONE_WAVE, stagger_k_tiles=1), ""),
    "one wave, no group in flight, one k tile in turn": (
        replace(ONE_WAVE, in_flight=0, stagger_k_tiles=1),
        "",
    ),
    "one wave, no group in flight": (replace(ONE_WAVE, in_flight=0), "bias"),
    "one wave, not staggered": (replace(ONE_WAVE, stagger="never"), ""),
    "one wave, two rows of wgmma": (
        replace(ONE_WAVE, tile_m=256, tile_n=128, cluster_n=2, in_flight=1),
        "",
    ),
    "one wave in a cluster": (replace(ONE_WAVE, cluster_m=2), ""),
    "one wave, elastic columns": (replace(ONE_WAVE, tile_n=216, variable_tile_n=True), ""),
    "one wave, gated pairs": (ONE_WAVE, "gated"),
    "one wave, three consumers": (THREE_ONE_WAVE, ""),
    "one wave, three consumers in a cluster": (
        replace(THREE_ONE_WAVE, cluster_n=2, in_flight=1),
        "",
    ),
    "addend fetched": (COOPERATIVE, "addend"),
    "pingpong": (PINGPONG, ""),
    "pingpong, addend fetched": (PINGPONG, "addend"),
    "pingpong, residual fetched, fp32": (replace(PINGPONG, tile_n=128, stages=6), "residual fp32"),
    "pingpong, in a cluster": (replace(PINGPONG, cluster_m=2), "addend"),
    "multicast": (MULTICAST, ""),
    "multicast, residual fetched": (replace(OWN, cluster_m=2), "residual"),
    "elastic columns": (ELASTIC, ""),
    "elastic columns, addend in place": (ELASTIC, "addend in_place"),
    "elastic columns, few to a stage": (replace(ELASTIC, tile_n=136), "residual"),
    "cluster-K": (CLUSTER_K, ""),
    "cluster-K, two consumers, in a cluster": (
        replace(OWN, cluster_m=2, cluster_k=2, epilogue_stages=1),
        "",
    ),
    "split-K": (SPLIT_K, ""),
    "split-K, small tiles": (replace(SMALL_TILES, split_k=3), ""),
    "stream-K": (STREAM_K, ""),
    "stream-K, small tiles": (replace(SMALL_TILES, stream_k=True), ""),
    "stream-K, in a cluster": (replace(STREAM_K, cluster_m=2), ""),
    "dependent launch": (replace(OWN, pdl=True), "addend"),
    "weights ready": (EARLY, "residual bias"),
    "weights ready, transposed": (EARLY, "transposed residual"),
    "weights ready, multicast": (replace(EARLY, cluster_m=2, cluster_n=2), ""),
    "weights ready, pingpong": (replace(PINGPONG, pdl=True, weights_ready=True), "addend"),
    "weights ready, cluster-K": (replace(CLUSTER_K, pdl=True, weights_ready=True), "transposed"),
    "weights ready, split-K": (replace(SPLIT_K, pdl=True, weights_ready=True), ""),
    "weights ready, stream-K": (replace(STREAM_K, pdl=True, weights_ready=True), "transposed"),
}


# What a word of a schedule makes of the formats of fp8 operands.
FORMATS = {
    "promoted": "e4m3 e4m3 promoted",
    "blocks": "e4m3 e4m3 promoted 1x128 128x128",
    "columns": "e4m3 e4m3 promoted 1x128 1x128",
    "rows_share": "e4m3 e4m3 promoted 128x128 1x128",
    "all_share": "e4m3 e4m3 promoted 128x128 128x128",
}
PINGPONG_FP8 = replace(PINGPONG, tile_n=128)
TALL = replace(OWN, tile_m=256, stages=3, epilogue_stages=1)  # two times 64 rows for a consumer
# Consumers add up the sums of each stage, multiplied by its scales. "wide": TMA loads those of
# rows, and of columns that have their own, else a warp copies them.
SCALED: dict[str, tuple[HopperConfig, str]] = {
    "promoted sums": (OWN, "promoted"),
    "promoted sums, two rows of wgmma": (TALL, "promoted residual"),
    "promoted sums, three": (THREE, "promoted"),
    "promoted sums in turn": (PINGPONG_FP8, "promoted residual"),
    "promoted sums, swapped": (OWN, "promoted transposed"),
    "scales copied": (OWN, "blocks"),
    "scales loaded": (OWN, "blocks wide"),
    "promoted sums, two stages": (replace(OWN, stages=2), "promoted"),
    "scales copied, two stages": (replace(OWN, stages=2, in_flight=0), "blocks"),
    "scales loaded, two stages": (replace(OWN, stages=2), "blocks wide residual"),
    "scales loaded, small tiles": (SMALL_TILES, "blocks wide bias"),
    "scales copied, two rows of wgmma": (TALL, "blocks residual"),
    "scales loaded, two rows of wgmma": (TALL, "blocks wide residual"),
    "scales of columns, two rows of wgmma": (TALL, "columns residual"),
    "scales of columns loaded": (replace(OWN, stages=2), "columns wide residual"),
    "scales of columns loaded, two rows of wgmma": (TALL, "columns wide"),
    "scales copied, three": (THREE, "blocks residual"),
    "scales loaded, three": (THREE, "blocks wide"),
    "scales copied in turn": (PINGPONG_FP8, "blocks addend"),
    "scales loaded in turn": (PINGPONG_FP8, "blocks wide residual"),
    "scales of columns in turn": (PINGPONG_FP8, "columns"),
    "scales copied, A shared": (replace(OWN, cluster_n=2), "blocks"),
    "scales loaded, A shared": (replace(OWN, cluster_n=2), "blocks wide residual"),
    "scales copied, B shared": (replace(OWN, cluster_m=2), "blocks residual"),
    "scales loaded, B shared": (replace(OWN, cluster_m=2), "blocks wide"),
    "scales of columns, both shared": (MULTICAST, "columns"),
    "scales of columns loaded, both shared": (MULTICAST, "columns wide"),
    "scales copied, two widths": (ELASTIC, "blocks"),
    "scales loaded, two widths": (replace(ELASTIC, tile_n=136), "blocks wide residual"),
    "scales of columns, two widths": (ELASTIC, "columns"),
    "scales of columns loaded, two widths": (ELASTIC, "columns wide"),
    "scales copied, residual": (OWN, "blocks residual"),
    "scales loaded, residual": (OWN, "blocks wide residual"),
    "scales of columns, addend in place": (OWN, "columns addend in_place"),
    "scales loaded, 192 columns": (replace(OWN, tile_n=192, epilogue_stages=1), "blocks wide"),
    "scales loaded, 112 columns": (replace(OWN, tile_n=112), "blocks wide"),
    "scales loaded, gated": (OWN, "blocks wide gated aux"),
    "scales of columns, gated": (OWN, "columns gated residual"),
    "scales loaded, one gated half after the other": (
        replace(OWN, mma_n=64),
        "blocks wide gated bias",
    ),
    "scales of columns, one gated half after the other": (
        replace(TALL, mma_n=64),
        "columns gated",
    ),
    "scales of columns loaded, one gated half after the other": (
        replace(OWN, mma_n=64),
        "columns wide gated bias",
    ),
    "scales of columns, 96 gated": (replace(OWN, tile_n=96), "columns gated"),
    "scales copied, split": (SPLIT_K, "blocks"),
    "scales loaded, split": (SPLIT_K, "blocks wide"),
    "scales copied, stream": (STREAM_K, "blocks"),
    "scales loaded, stream": (replace(STREAM_K, cluster_m=2), "blocks wide"),
    "scales copied, shared K": (CLUSTER_K, "blocks"),
    "scales loaded, shared K": (
        replace(OWN, cluster_m=2, cluster_k=2, epilogue_stages=1),
        "blocks wide",
    ),
    "scales of columns, swapped": (OWN, "columns transposed residual"),
    "scales of columns loaded, swapped": (OWN, "columns wide transposed"),
    "scales of rows shared, swapped": (OWN, "rows_share transposed"),
    "scales loaded, swapped": (OWN, "blocks wide transposed"),
    "scales all shared": (OWN, "all_share"),
    "scales copied, dependent launch": (replace(OWN, pdl=True), "blocks residual"),
    "scales loaded, dependent launch": (replace(OWN, pdl=True), "blocks wide"),
    "scales loaded, from registers": (replace(OWN, epilogue_stages=0), "blocks wide fp32"),
}

# Of three timings in which a test runs all of its cases, CI takes one. Cases choose it by their
# number, so that each of the three runs.
TIMINGS = (
    0,
    pytest.param(1, marks=pytest.mark.slow),
    pytest.param(2, marks=pytest.mark.slow),
)
# The same, where a case has one of three grids in each of three timings.
TIMINGS_OF_GRIDS = (0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 9)))


Grid = tuple[int, int, int]  # rows and columns of tiles, and clusters


def run_grids(
    config: HopperConfig, text: str, timing: int, grids: tuple[Grid, Grid, Grid], stages: int
) -> None:
    """Runs each number of k tiles with one of three grids; with each, and thrice, in all nine
    timings of `TIMINGS_OF_GRIDS`. `stages`: as many k tiles as fill the pipeline, or one more.
    """
    for place, k_tiles in enumerate((1, 2, stages, 2 * config.stages + 1)):
        k_tiles = max(k_tiles, config.cluster_k)
        number = (timing + place) % 3
        rows, columns, clusters = grids[number]
        case = case_of(config, text, rows=rows, columns=columns, k_tiles=k_tiles, clusters=clusters)
        seed = (timing + timing // 3 + number) % 3 + 10 * k_tiles
        runs_clean(case, seed, calls=2 if config.split else 1)


def case_of(
    config: HopperConfig,
    text: str = "",
    *,
    rows: int = 2,
    columns: int = 3,
    k_tiles: int = 5,
    clusters: int = 2,
    matrices: int = 0,
) -> Case:
    """A launch of so many cluster tiles, with variable tile N of both widths. `text`: words for
    what the epilogue has, "fp32" for C's dtype, "in_place" for an addend in C's memory,
    "transposed" for a call that computes C's transpose, a word of `FORMATS` for fp8 operands and
    "wide" for scales that TMA can load.
    """
    words = frozenset(text.split())
    epilogue = words - {"fp32", "in_place", "transposed", "wide", *FORMATS}
    N = config.tile_n * config.cluster_n * columns // (2 if "gated" in words else 1)
    return Case(
        config,
        M=config.tile_m * config.cluster_m * rows,
        N=N - 8 if config.variable_tile_n else N,
        k_tiles=k_tiles,
        clusters=clusters,
        matrices=matrices,
        epilogue=epilogue,
        out_dtype=torch.float32 if "fp32" in words else torch.bfloat16,
        in_place="in_place" in words,
        transposed="transposed" in words,
        formats="".join(formats for word, formats in FORMATS.items() if word in words),
        wide="wide" in words,
    )


@lru_cache(maxsize=256)
def is_clean(case: Case, seed: int, calls: int = 1) -> bool:
    """Whether a case runs without a fault; many planted faults ask for the same."""
    runs_clean(case, seed, calls=calls)
    return True


def runs_clean(case: Case, seed: int, **options: Any) -> Any:
    """The run of a case in the timing that the seed draws, which has no fault."""
    try:
        return simulate(case, seed, **options)
    except ProtocolFault as fault:
        pytest.fail(f"{fault}\nseed {seed}, {case}")

"""The config that hopper.gemm chooses where none was tuned."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gemm_problems import BF16, FP32, OWN_CONFIG, product

from outblas.base import configs, machines
from outblas.call.artifact import example
from outblas.call.epilogue import Epilogue
from outblas.call.problem import Problem
from outblas.call.products import parse_line
from outblas.hopper import gemm
from outblas.hopper.gemm import heuristic, rule_tiles
from outblas.packing import examples

H100 = heuristic.Rates()
RATES = st.builds(
    heuristic.Rates,
    sms=st.sampled_from([1, 78, 114, 132]),
    flops_per_clock=st.sampled_from([1024, 4096]),
    dram_bytes_per_clock=st.sampled_from([1260.0, 1832.0, 2623.0]),
    l2_bytes=st.sampled_from([2**20, 50 * 2**20]),
)


@st.composite
def problems(draw: Any) -> Problem:
    """Products of any size, both output dtypes, both orders of C and of batches, gated pairs, and
    promoted sums of fp8.
    """
    extent = st.one_of(st.integers(1, 300), st.integers(1, 20_000))
    M, N, K = draw(extent), draw(extent), draw(extent)
    dtype = draw(st.sampled_from([BF16, FP32]))
    problem = product(M, N, K, dtype, batch_invariant=draw(st.booleans()))
    match draw(st.sampled_from(["", "gated", "promoted"])):
        case "gated":
            return replace(product(M, 8 * N, K, dtype), epilogue=Epilogue("silu", gated=True))
        case "promoted":
            return replace(problem, formats="e4m3 e4m3 promoted")
    if draw(st.booleans()):
        problem = replace(problem, out=(1, M))
    if draw(st.booleans()):
        batch = (draw(st.integers(1, 40)),)
        a, b, out = (0, *problem.a), (0, *problem.b), (M * N, *problem.out)
        problem = replace(problem, batch=batch, a=a, b=b, out=out)
    return problem


@settings(max_examples=100, deadline=None)
@given(problem=problems(), rates=RATES)
def test_the_config_can_be_built_and_launched(problem: Problem, rates: heuristic.Rates) -> None:
    """And has one order of K where a row's bits must not depend on others."""
    config = heuristic.config(problem, rates)

    assert gemm.invalid_reason(config) is None
    assert gemm.unsupported(problem, config) is None
    assert config.cluster <= 8
    assert config.split_k <= max(1, math.ceil(problem.K / config.tile_k))
    assert configs.from_text(gemm.Config, configs.to_text(config)) == config
    if problem.batch_invariant:
        assert (config.split, config.cluster_k, config.k_serpentine) == (False, 1, False)


@settings(max_examples=40, deadline=None)
@given(problem=problems(), rates=RATES)
def test_a_config_that_is_given_up_early_is_none_of_the_fastest(
    problem: Problem, rates: heuristic.Rates
) -> None:
    call = heuristic.call_of(problem, rates)
    models = list(heuristic._candidates(call, rule_tiles.tiles_of(OWN_CONFIG)))
    whole = [model.cycles(call) for model in models]

    for most in (min(whole), max(whole)):
        bounded = [model.cycles(call, most) for model in models]
        assert all(
            early == cycles or (early == math.inf and cycles >= most)
            for early, cycles in zip(bounded, whole, strict=True)
        )


H20 = heuristic.rates(machines.find("H20"))


def of_layout(layout: str, m: int, n: int, k: int) -> Problem:
    return example(BF16, None, layout, (m, n, k))


# Calls, the rates of a GPU, and what the config has then. Times were measured on an H100.
CHOSEN: dict[str, tuple[Problem, heuristic.Rates, dict[str, Any]]] = (
    {
        "few tiles of a long K": (product(64, 64, 65536), H100, {"split_k": 32}),
        "few tiles of a long K, batch invariant": (
            product(64, 64, 65536, batch_invariant=True),
            H100,
            {"split_k": 1},
        ),
        "few rows": (
            product(16, 4096, 4096),
            H100,
            {"cluster_k": 2, "split_k": 1, "swap_ab": True},
        ),
        # Few SMs, and of each a quarter of an H100's rate: it waits for products sooner than for
        # what a cluster along K saves of loads.
        "few rows on slow tensor cores": (product(16, 4096, 4096), H20, {"cluster_k": 1}),
        "few rows, batch invariant": (
            product(16, 4096, 4096, batch_invariant=True),
            H100,
            {"cluster_k": 1},
        ),
        # 4% faster than tiles of 128 rows.
        "all of some rows, weights from DRAM": (
            product(200, 8192, 4096),
            H100,
            {"tile_m": 64, "tile_n": 208, "swap_ab": True},
        ),
        # With cold weights, 4 to 8% faster than what L2 would suggest.
        "a row, weights from DRAM": (
            product(1, 8192, 8192),
            H100,
            {"tile_m": 128, "tile_n": 16, "tile_k": 128, "cluster_k": 2, "swap_ab": True},
        ),
        "a row, weights that L2 holds": (
            product(1, 8192, 8192),
            heuristic.Rates(l2_bytes=400 * 2**20),
            {"tile_m": 64},
        ),
        "a large product": (
            product(8192, 8192, 8192),
            H100,
            {"split_k": 1, "cluster_k": 1, "variable_tile_n": True},
        ),
    }
    | {
        # 4 to 6% faster than 128x128 with a cluster of two along K, because sums cannot be
        # exchanged before the last weights have come from DRAM.
        f"some rows, {N} weights of {K} from DRAM, {layout}": (
            of_layout(layout, 128, N, K),
            H100,
            {"tile_m": 64, "tile_n": columns, "tile_k": 128, "cluster": 1},
        )
        for layout in ("nt", "nn", "tn")
        for N, K, columns in ((8192, 4096, 128), (4096, 14336, 64))
    }
    | {
        # Of 17 configs on an H200, with one scale for each operand; two fp8 values are one element.
        f"promoted sums, {size}": (
            replace(product(size, size, size // 2), formats="e4m3 e4m3 promoted"),
            H100,
            {"tile_m": 256, "tile_n": 128, "cluster_m": 1, "cluster_n": 2},
        )
        for size in (2048, 4096, 8192)
    }
)


@pytest.mark.parametrize("name", CHOSEN)
def test_the_config_is_the_one_that_suits_the_call(name: str) -> None:
    problem, on, chosen = CHOSEN[name]

    config = heuristic.config(problem, on)

    assert {field: getattr(config, field) for field in chosen} == chosen


@pytest.mark.parametrize("name", ["H100 PCIe", "H20"])
def test_a_call_of_one_wave_has_no_more_tiles_than_the_gpu_has_sms(name: str) -> None:
    sms = machines.find(name).sms

    config = heuristic.config(product(1024, 1024, 1024), heuristic.Rates(sms))

    assert math.ceil(1024 / config.tile_m) * math.ceil(1024 / config.tile_n) <= sms


def test_few_columns_meet_the_same_tiles_as_few_rows() -> None:
    rows, columns = (
        heuristic.config(product(*shape), H100) for shape in ((1, 8192, 8192), (8192, 1, 8192))
    )

    assert rows == replace(columns, swap_ab=not columns.swap_ab)


@pytest.mark.parametrize(
    ("shape", "fast"),
    [
        ("8x24576x4096", {(192, 16, 1)}),
        ("32x24576x4096", {(192, 32, 1)}),
        ("8x57344x8192", {(64, 16, 1)}),
        ("64x57344x8192", {(64, 64, 1), (64, 96, 1), (64, 128, 1)}),
        ("8x5120x25600", {(64, 16, 1), (128, 16, 2)}),
        ("32x5120x25600", {(128, 32, 2)}),
        ("8x4096x4096", {(64, 16, 2)}),
        ("64x4096x12288", {(64, 64, 2)}),
        ("128x5120x8192", {(128, 96, 2)}),
    ],
)
def test_few_rows_of_scaled_blocks_take_a_tile_that_was_fast(
    shape: str, fast: set[tuple[int, int, int]]
) -> None:
    """Of up to 28 configs on an H200, with weights from DRAM, those within 2% of the fastest. The
    tile of the rule as it was took 1.02 to 1.12 times as long at the first six and the last.
    """
    (problem,) = examples.problems(parse_line(f"{shape} fp8-e4m3 1x128:128x128"))
    h200 = heuristic.rates(machines.find("H200"))

    config = heuristic.config(gemm.pack_problem(problem, machines.find("H200")), h200)

    assert (config.tile_m, config.tile_n, config.cluster_k) in fast


@pytest.mark.parametrize(
    ("layout", "variable", "swap_ab"),
    [("nn", True, True), ("nt", True, False), ("tt", True, False), ("tn", False, None)],
)
@pytest.mark.parametrize("size", [1280, 1536, 5120])
def test_tiles_of_variable_width_lie_along_rows_of_k(
    size: int, layout: str, variable: bool, swap_ab: bool | None
) -> None:
    """They begin at any column of B, or with operands swapped at any row of A, which costs nothing
    where that operand's k lie together; in "tn" neither operand has such rows.
    """
    config = heuristic.config(example(BF16, None, layout, (size,) * 3), H100)

    assert config.variable_tile_n == variable
    if variable:
        assert config.swap_ab == swap_ab
    else:  # tiles begin at whole cache lines
        assert config.tile_n % 64 == 0


@pytest.mark.parametrize("shape", [(128, 8192, 8192), (200, 6144, 4096), (256, 3072, 3072)])
def test_no_tile_is_loaded_in_short_boxes_of_contiguous_columns(
    shape: tuple[int, int, int],
) -> None:
    """200x6144x4096 took 1.7 times as long as torch with all rows as the columns of a tile, 208,
    which are loaded 16 at a time where they are contiguous.
    """
    config = heuristic.config(example(BF16, None, "tn", shape), H100)

    assert config.stage_n % 64 == 0

"""The documents' claims about the CUDA cores that arithmetic or timings settle."""

import pytest
import seed_claims
from seed_claims import compare
from seed_claims.arithmetic import doc_000, formulas
from seed_claims.measured import simt_runs, simt_speed
from support.reports import Entry, finding, verdict
from support.simt_reports import BOTH_CONFLICT, V06, timed

from outblas.core import configs, registry

OPEN = (seed_claims.OPEN, None)
V06_WITH_DEEPER_TILES = V06.replace("block_k=8,", "")


# ---- the runs that claims compare
SIDE_EXPERIMENTS = sorted(
    {
        run
        for run in vars(simt_runs).values()
        if isinstance(run, compare.Run) and run.provider != "cublas"
    },
    key=str,
)


def test_there_are_eighteen_side_experiments() -> None:
    assert len(SIDE_EXPERIMENTS) == 18


@pytest.mark.parametrize(
    "run", SIDE_EXPERIMENTS, ids=lambda run: f"{run.provider}-{run.config}-{run.n}"
)
def test_a_side_experiment_is_a_config_of_its_rung_in_brief_form(run: compare.Run) -> None:
    config = configs.from_text(registry.load(run.provider).Config, run.config)

    assert set(configs.brief(config).split(",")) == set(run.config.split(","))


# ---- arithmetic
@pytest.mark.parametrize(
    ("words", "stride", "ways"),
    [(1, 0, 1), (1, 1, 1), (1, 2, 2), (1, 32, 32), (1, 33, 1), (4, 4, 1), (4, 8, 2)],
)
def test_bank_conflicts_of_a_warp_whose_lanes_are_a_stride_apart(
    words: int, stride: int, ways: int
) -> None:
    starts = (lane * stride for lane in range(32))

    assert formulas.conflict_ways(starts, words) == ways


@pytest.mark.parametrize(
    ("block_k", "stride", "ways"), [(8, 128, 2), (8, 132, 1), (16, 128, 4), (16, 132, 2)]
)
def test_bank_conflicts_of_storing_a_tile_transposed(block_k: int, stride: int, ways: int) -> None:
    assert doc_000.transposed_ways(block_k, stride) == ways


@pytest.mark.parametrize(("stride", "lines"), [(0, 1), (4, 1), (8, 2), (16384, 32)])
def test_lines_that_a_warp_touches_by_the_stride_of_its_lanes(stride: int, lines: int) -> None:
    assert formulas.strided_lines(stride) == lines


@pytest.mark.parametrize(("tile", "traffic"), [(64, 2**30), (128, 2**29)])
def test_tiles_twice_as_long_load_half_the_bytes(tile: int, traffic: int) -> None:
    assert formulas.tile_traffic(2048, tile, tile) == traffic


@pytest.mark.parametrize(
    ("part", "expected", "value"),
    [
        ("a warp loads A in lines of 128 bytes", "refuted", 32),
        ("6352 GFLOP/s are nearly 12 times", "differs", pytest.approx(12.64, abs=0.01)),
        ("nearly 100 times faster than 502.5", "confirmed", pytest.approx(99.6, abs=0.1)),
        ("loads of A show no conflicts either", "confirmed", 1),
        ("loads of B, eight columns", "differs", 2),
        ("four columns a thread", "confirmed", 1),
        ("64×64 tiles move twice the bytes", "confirmed", 2),
        ("BK = 8 is the root cause of the traffic", "refuted", 1),
        ("the lanes of a warp conflict 8-way", "refuted", 1),
        ("do 8 FLOP per load from shared memory", "confirmed", 8),
    ],
)
def test_a_claim_that_arithmetic_settles(part: str, expected: str, value: float) -> None:
    assert verdict(part) == (expected, value)


# ---- the steps of document 002, each one run against another
STEPS = [step for step in simt_speed.COMPARISONS if step.source.startswith("002")]
each_step = pytest.mark.parametrize("step", STEPS, ids=lambda step: step.source)


def timings(step: compare.Comparison, faster: float, slower: float) -> list[Entry]:
    """Timings of both runs of a step by their ratios to cuBLAS."""
    ratios = (step.faster, faster), (step.slower, slower)
    return [timed(run.provider, ratio, config=run.config) for run, ratio in ratios]


def as_stated(step: compare.Comparison) -> list[Entry]:
    """Timings of both runs that are as fast as the document has them."""
    faster, slower = step.stated
    return timings(step, faster / 50, slower / 50)


def test_document_002_has_six_steps_of_which_each_has_its_figures() -> None:
    assert len(STEPS) == 6
    assert STEPS[0].stated == (6.3522, 0.5025)
    assert STEPS[-1].stated == (41.496, 31.4208)


@each_step
def test_the_documents_own_figures_confirm_a_step(step: compare.Comparison) -> None:
    assert verdict(step.text, *as_stated(step))[0] == "confirmed"


@each_step
def test_figures_in_another_layout_leave_a_step_open(step: compare.Comparison) -> None:
    in_nt = [entry | {"layout": "nt"} for entry in as_stated(step)]

    assert verdict(step.text, *in_nt) == OPEN


@each_step
def test_a_step_that_loses_is_refuted(step: compare.Comparison) -> None:
    backwards = timings(step, faster=0.3, slower=0.5)

    assert verdict(step.text, *backwards) == ("refuted", pytest.approx(-0.4))


def test_a_gain_of_several_times_is_said_in_times() -> None:
    found = finding("coalescing gains", timed("simt.coalesced", 0.126), timed("simt.naive", 0.01))

    assert found.ours.startswith("12.60 times")


# ---- shares of cuBLAS and of the roofline
@pytest.mark.parametrize(
    ("part", "rung", "config", "ratio", "expected"),
    [
        ("nearly 100 times slower", "naive", "", 0.0101, "confirmed"),
        ("nearly 100 times slower", "naive", "", 0.005, "differs"),
        ("simt.coalesced is 8 times slower", "coalesced", "", 0.126, "confirmed"),
        ("more than 5 times slower", "shared", "", 0.18, "confirmed"),
        ("more than 5 times slower", "shared", "", 0.25, "differs"),
        ("achieves nearly 0.84", "warptile", "pad=0,prefetch=False", 0.82, "confirmed"),
        ("kernel reached 0.937", "warptile", "prefetch=False", 0.82, "differs"),
        ("56% of the fp32 roofline", "vectorized", BOTH_CONFLICT, 0.65, "confirmed"),
        ("56% of the fp32 roofline", "vectorized", BOTH_CONFLICT, 0.95, "differs"),
    ],
)
def test_a_share_of_cublas_or_of_the_roofline(
    part: str, rung: str, config: str, ratio: float, expected: str
) -> None:
    assert verdict(part, timed(f"simt.{rung}", ratio, config=config))[0] == expected


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        pytest.param("nn", ("confirmed", 0.85), id="the climb's layout"),
        pytest.param("nt", OPEN, id="another layout"),
    ],
)
def test_cublas_itself_counts_in_the_layout_of_the_climb(
    layout: str, expected: tuple[str, float | None]
) -> None:
    assert verdict("cuBLAS reaches 85%", timed("cublas", 1.0, layout=layout)) == expected


@pytest.mark.parametrize(
    ("tflops", "expected"),
    [
        pytest.param(6.0, "differs", id="faster than DRAM allows"),
        pytest.param(0.8, "confirmed", id="as slow as DRAM"),
    ],
)
def test_what_caches_add_at_4096_is_speed_beyond_that_of_dram(tflops: float, expected: str) -> None:
    found = verdict("vanishes at 4096", timed("simt.coalesced", 0.12, tflops=tflops))

    dram_tflops = 3.352 * 0.25  # TB/s times FLOP per byte
    assert found == (expected, pytest.approx(tflops / dram_tflops))


# ---- v06 of document 003, in burst at 2048
def v06_beside_v05(small: float, deep: float | None = None) -> list[Entry]:
    """Timings of v05, of v06, and of v06 with the rung's BK = 16 by their ratios to cuBLAS."""
    ratios = {V06: small} | ({V06_WITH_DEEPER_TILES: deep} if deep is not None else {})
    v06 = [timed("simt.warptile", ratio, 2048, config=config) for config, ratio in ratios.items()]
    return [timed("simt.vectorized", 0.8, 2048, config="block_k=16"), *v06]


@pytest.mark.parametrize(
    ("v06", "expected", "value"),
    [
        pytest.param(0.4, "confirmed", 1.0, id="half as fast"),
        pytest.param(0.8 / 1.57, "differs", 0.57, id="under 3/4 of the stated factor"),
        pytest.param(0.9, "refuted", -1 / 9, id="faster"),
    ],
)
def test_v06_loses_to_v05(v06: float, expected: str, value: float) -> None:
    found = verdict("64×64×8 lose to v05", *v06_beside_v05(v06))

    assert found == (expected, pytest.approx(value))


@pytest.mark.parametrize(
    ("v06", "deep", "expected", "value"),
    [
        pytest.param(0.4, 0.5, "differs", 0.25, id="BK = 16 closes a quarter of the gap"),
        pytest.param(0.4, 0.7, "confirmed", 0.75, id="BK = 16 closes most of the gap"),
        pytest.param(0.4, None, *OPEN, id="BK = 16 not timed"),
        pytest.param(0.9, 0.9, "differs", None, id="v06 does not lose"),
    ],
)
def test_a_k_tile_of_8_is_the_cause_of_v06s_loss(
    v06: float, deep: float | None, expected: str, value: float | None
) -> None:
    found = verdict("root cause of its loss", *v06_beside_v05(v06, deep))

    assert found == (expected, pytest.approx(value))


# ---- the climb of another ladder, which starts from a CUDA-core rung
@pytest.mark.parametrize(
    "reached",
    ["simt.warptile reaches 32 TFLOP/s at 4096", "simt.warptile reaches 4% of cuBLAS at 4096"],
)
def test_what_document_001_starts_from_is_measured_with_mixed_operands(reached: str) -> None:
    mixed = timed("simt.warptile", 0.05, dtype="bfloat16", tflops=38.0)

    assert verdict(f"{reached} with bfloat16 operands", mixed)[0] == "differs"


@pytest.mark.parametrize(("layout", "expected"), [("nn", "not yet measured"), ("nt", "confirmed")])
def test_claims_of_hopper_keep_their_own_layout(layout: str, expected: str) -> None:
    large_tile, parent = (
        timed(f"hopper.{name}", ratio, dtype="bfloat16", layout=layout)
        for name, ratio in (("large_tile", 0.6), ("tma_wgmma", 0.4))
    )

    assert verdict("hopper.large_tile gains", large_tile, parent)[0] == expected

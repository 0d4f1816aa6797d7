"""What calls take of results with cold weights and with epilogues."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.known import CONFIGS, H200, SQUARE, Know, knowing, winner
from support.stored import INTERPRETED

from outblas.autotune.lookup import TuningIndex
from outblas.autotune.store.records import Workload
from outblas.autotune.tuned_entries import HERE
from outblas.core.configs import to_text
from outblas.hopper import gemm

NEAR = Workload(2048, 4096, 4096)
COLD = replace(SQUARE, weights="cold")
FUSED = replace(SQUARE, epilogue="bias+gelu")


@pytest.fixture
def know(tmp_path: Path) -> Know:
    """Makes the knowledge of a GPU from winners in its store, and from those that were shipped."""
    return knowing(tmp_path)


def configs(known: TuningIndex, asked: Workload = SQUARE) -> list[int]:
    """The numbers of the choices' configs."""
    return [CONFIGS.index(choice.config) for choice in known.choices(asked)]


# Cold weights.


def test_a_result_with_warm_weights_is_all_that_a_call_takes(know: Know) -> None:
    assert configs(know(winner(0), winner(1, workload=COLD))) == [0]


def test_a_result_with_cold_weights_stands_in_for_one_with_warm_weights(know: Know) -> None:
    found = configs(know(winner(0, workload=COLD), winner(1, workload=NEAR)))

    assert found[0] == 0
    assert 1 in found, "what won at a neighbour is no alternative"


def test_a_choice_says_that_its_weights_were_cold(know: Know) -> None:
    choice = know(winner(workload=COLD)).choices(SQUARE)[0]

    assert choice.why == f"{HERE}, 4096 bfloat16 nt cold, 1.000 × cuBLAS there"


@pytest.mark.parametrize(
    ("kernel", "config"), [("portable", CONFIGS[0]), ("hopper.gemm", to_text(gemm.Config()))]
)
def test_neighbours_with_cold_weights_say_nothing(know: Know, kernel: str, config: str) -> None:
    cold = replace(NEAR, weights="cold")

    known = know(winner(workload=cold, kernel=kernel, config=config))

    assert known.choices(SQUARE) == ()


LARGE = Workload(16, 57344, 8192)  # whose weights are many times the L2 cache
COLD_NEAR_LARGE = Workload(16, 51200, 8192, weights="cold")
COLD_BUT_SMALL = Workload(16, 32768, 512, weights="cold")


@pytest.mark.parametrize(
    ("kernel", "config"), [("portable", CONFIGS[0]), ("hopper.gemm", to_text(gemm.Config()))]
)
def test_a_neighbour_with_cold_weights_says_something_of_weights_that_l2_cannot_hold(
    know: Know, kernel: str, config: str
) -> None:
    known = know(winner(workload=COLD_NEAR_LARGE, kernel=kernel, config=config))

    choices = known.choices(LARGE)

    assert (kernel, config) in {(choice.kernel, choice.config) for choice in choices}
    assert "neighbour 16x51200x8192 bfloat16 nt cold" in choices[0].why + choices[-1].why


@pytest.mark.parametrize(
    ("asked", "measured"),
    [
        pytest.param(LARGE, COLD_BUT_SMALL, id="the weights that were measured"),
        pytest.param(replace(COLD_BUT_SMALL, weights="warm"), COLD_NEAR_LARGE, id="those asked"),
    ],
)
def test_a_neighbour_with_cold_weights_says_nothing_where_l2_can_hold(
    asked: Workload, measured: Workload, know: Know, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outblas.autotune.lookup.REACH", 99.0)  # all shapes are neighbours

    known = know(winner(workload=measured))

    assert known.choices(asked) == ()


# For few rows, with so few stages that the rule of the kernel promises more.
FEW_ROWS = gemm.Config(
    tile_m=64,
    tile_n=16,
    stages=4,
    consumers=1,
    producer_registers=0,
    consumer_registers=0,
    cluster_m=1,
    epilogue_stages=1,
    swap_ab=True,
)


@pytest.mark.parametrize(("slower", "first"), [(1.02, "portable"), (1.09, "hopper.gemm")])
def test_what_another_model_measured_at_the_shape_comes_before_a_rule_in_a_tie(
    slower: float, first: str, know: Know
) -> None:
    shape = Workload(1, 10240, 8192)
    near = winner(
        workload=Workload(1, 8192, 8192, weights="cold"),
        gpu=H200,
        kernel="hopper.gemm",
        config=to_text(FEW_ROWS),
        us=47.0,
    )
    why = next(c.why for c in know(shipped=(near,)).choices(shape) if not c.config)
    by_rule = float(why.removeprefix("its own heuristic, ").split(" µs")[0])
    there = winner(workload=replace(shape, weights="cold"), gpu=H200, us=slower * by_rule)

    known = know(shipped=(near, there))

    assert known.choices(shape)[0].kernel == first


def test_results_with_cold_weights_are_among_the_steps(know: Know) -> None:
    steps = dict(know(winner(), winner(1, workload=COLD)).steps(SQUARE))

    assert steps[HERE] == "portable[group_m=1], 1.000 × cuBLAS"
    assert steps[f"{HERE}, cold"].startswith("portable[group_m=2], 1.000")


def test_a_winner_of_the_interpreter_is_described_by_its_time(know: Know) -> None:
    known = know(winner(gpu=INTERPRETED, us=123.4), of=INTERPRETED)

    assert known.choices(SQUARE)[0].why == f"{HERE}, 4096 bfloat16 nt, 123.4 µs there"


# Epilogues.


def test_a_call_takes_what_won_with_its_epilogue_and_then_what_its_product_takes(
    know: Know,
) -> None:
    assert configs(know(winner(0), winner(1, workload=FUSED)), FUSED) == [1, 0]


@pytest.mark.parametrize("epilogue", ["bias", "gelu", "bias+relu", "bias+gelu+residual"])
def test_a_call_takes_nothing_of_another_epilogue(know: Know, epilogue: str) -> None:
    other = replace(SQUARE, epilogue=epilogue)

    assert configs(know(winner(0), winner(1, workload=other)), FUSED) == [0]


def test_a_plain_call_takes_nothing_of_an_epilogue(know: Know) -> None:
    assert know(winner(workload=FUSED)).choices(SQUARE) == ()


def test_an_epilogue_that_was_tuned_with_cold_weights_alone_is_taken(know: Know) -> None:
    cold = replace(FUSED, weights="cold")

    assert configs(know(winner(0), winner(1, workload=cold)), FUSED) == [1, 0]


def test_a_gated_call_that_was_not_tuned_takes_what_the_columns_of_its_output_take(
    know: Know,
) -> None:
    gated = Workload(4096, 8192, 4096, epilogue="swiglu")

    known = know(winner(0), winner(1, workload=replace(gated, epilogue="")))

    assert configs(known, gated)[0] == 0


def test_results_with_an_epilogue_are_the_first_steps(know: Know) -> None:
    place, found = know(winner(1, workload=FUSED)).steps(FUSED)[0]

    assert place == f"{HERE}, bias+gelu"
    assert found.startswith("portable[group_m=2], 1.000")


def test_the_steps_say_that_an_epilogue_was_not_tuned(know: Know) -> None:
    step = know(winner()).steps(FUSED)[0]

    assert step == ("tuned, bias+gelu", "nothing for bfloat16 nt bias+gelu")


# What was measured of a workload.


def test_the_gain_is_that_of_the_config_which_calls_take(know: Know) -> None:
    known = know(winner(0, ratio=0.9), winner(1, workload=NEAR, ratio=1.1))

    assert known.measured_gain(SQUARE) == 0.9


def test_the_gain_with_cold_weights_stands_in_for_one_with_warm_weights(know: Know) -> None:
    assert know(winner(workload=COLD, ratio=1.2)).measured_gain(SQUARE) == 1.2


def test_neighbours_have_no_gain_to_tell(know: Know) -> None:
    assert know(winner(workload=NEAR, ratio=1.1)).measured_gain(SQUARE) is None


def test_the_gains_of_a_weight_are_those_of_each_number_of_rows(know: Know) -> None:
    rows_1, rows_16 = (replace(SQUARE, M=rows) for rows in (1, 16))
    known = know(
        winner(workload=rows_16, ratio=1.1),
        winner(workload=replace(rows_1, weights="cold"), ratio=1.2),
        winner(workload=replace(rows_1, N=2048), ratio=1.3),
        winner(workload=replace(rows_1, epilogue="bias"), ratio=1.4),
        winner(workload=replace(rows_1, layout="nn"), ratio=1.5),
    )

    assert known.measured_gains(SQUARE) == {1: 1.2, 16: 1.1}


def test_another_model_of_gpu_tells_of_no_gains(know: Know) -> None:
    assert know(shipped=(winner(gpu=H200, ratio=1.1),)).measured_gains(SQUARE) == {}

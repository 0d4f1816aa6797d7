"""What a report on a sweep says: the best configs, the winner, tiles, stages, failures, the model's
agreement, and of which trials it speaks.
"""

from dataclasses import replace
from typing import Any

import pytest
from support.stored import H200, INTERPRETED, WORKLOAD
from support.tuning_reports import (
    FIRST,
    SECOND,
    SWEPT,
    build,
    predicting,
    rows,
    timed,
    winner,
)

from outblas.report import model, tables


@pytest.fixture
def report() -> model.TuneReport:
    """The report on the imagined sweep and its finals."""
    return build(SWEPT, winner())


# The best configs.


def test_the_best_are_listed_with_their_figures_and_whence_those_come() -> None:
    report = build(SWEPT, winner(), limits=lambda config: config[:8])

    best = rows(report, "best")

    assert best[0] == (
        "1 | tile_m=128, tile_n=256, stages=4 | 200.5 | 1.047 (1.040–1.050) | finals | 170.0 | "
        "tile_m=1"
    )
    assert best[2] == (
        "3 | tile_m=128, tile_n=256, stages=2 | 168.3 | 1.040 | screening | 172.0 | tile_m=1"
    )


# The winner.


def test_the_winner_is_described(report: model.TuneReport) -> None:
    assert rows(report, "Winner") == [
        f"config | {FIRST.replace(',', ', ')}",
        "µs | 200.5, median of 30 rounds of the finals; cuBLAS 210.0",
        "× cuBLAS | 1.047 (1.040–1.050)",
        "lead | +1.00% (+0.50% to +2.00%)",
        "confidence | at least 99.0%",
        "runner-up | stages=3",
        "measured | 60 of 80 valid configs",
    ]


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"confidence": 0.0}, "tie"),
        ({"confidence": 1.0}, "over 99.9%"),
        ({"confidence": None}, "–"),
    ],
    ids=str,
)
def test_the_confidence_is_said_in_words(facts: dict[str, Any], text: str) -> None:
    """It can be 0: doubts of several finalists add up to more than 1, and bound nothing."""
    assert f"confidence | {text}" in rows(build(SWEPT, winner(**facts)), "Winner")


# Tiles, stages and failures.


def test_the_best_ratio_of_each_tile_stands_in_a_grid(report: model.TuneReport) -> None:
    assert rows(report, "by tile") == [
        "64 | 0.750 | – | – | –",
        "128 | – | 0.850 | – | 1.050",
        "192 | – | – | failed | –",
        "256 | – | 0.950 | – | –",
    ]


def test_failures_are_counted_with_their_most_frequent_reason(report: model.TuneReport) -> None:
    assert rows(report, "Failures") == ["hang | 3 | not done in 30 s", "crash | 1 | –"]
    assert "20 configs were tried: 16 right, 4 failed." in tables.notes(report)


# The model beside the measurement.


def test_a_model_that_predicts_one_time_for_all_has_no_correlation() -> None:
    report = build(predicting(5.0))

    assert report.rho is None
    assert report.place == 16


@pytest.mark.parametrize(
    ("first", "second", "rho"),
    [
        (
            [106, 100, 86, 101, 99, 103, 97, 113, 112, 110],
            [7, 27, 2, 50, 28, 29, 20, 12, 6, 17],
            -29 / 165,
        ),
        ([1, 1, 2, 3], [1, 2, 3, 4], 4.5 / (4.5 * 5) ** 0.5),
        ([1, 2, 3, 4], [10, 20, 30, 1000], 1),
    ],
    ids=["the textbook's IQ and hours of television", "equal values", "the same order"],
)
def test_spearman_compares_two_orders(first: list[float], second: list[float], rho: float) -> None:
    assert model.spearman(first, second) == pytest.approx(rho)


# What the ratio is, and from which stage a time comes.


def test_with_an_epilogue_the_ratio_is_to_torch() -> None:
    fused = replace(WORKLOAD, epilogue="bias")

    report = build([replace(trial, workload=fused) for trial in SWEPT])

    assert report.metric == "× torch"
    assert any("torch's own calls" in note for note in tables.notes(report))


def test_on_a_cpu_times_are_compared() -> None:
    trials = [replace(trial, gpu=INTERPRETED, predicted_us=None) for trial in SWEPT]
    interpreted = build(trials, winner(gpu=INTERPRETED))

    assert rows(interpreted, "best")[:3] == [
        "1 | tile_m=128, tile_n=256, stages=4 | 200.5 | finals",
        "2 | tile_m=128, tile_n=256, stages=3 | 201.0 | finals",
        "3 | tile_m=128, tile_n=256, stages=2 | 168.3 | screening",
    ]
    assert rows(interpreted, "Best µs in screening by tile")[1] == "128 | – | 205.9 | – | 166.7"


# Of which trials a report speaks.


def test_trials_of_another_source_of_the_kernel_are_left_out() -> None:
    old = [replace(trial, source="old", when="2025-04-01") for trial in SWEPT]

    report = build([*SWEPT, *old], winner(source="old"))

    assert set(report.trials) == set(SWEPT)
    assert (report.left_out, report.winner) == (20, None)


def test_of_two_trials_of_a_config_the_newer_counts() -> None:
    again = timed(SECOND, 0.5, when="2026-06-01")

    report = build([again, *SWEPT])

    ratios = {trial.config: trial.ratio for trial in report.trials}
    assert ratios[SECOND] == 0.5
    assert report.left_out == 1


def test_of_two_winners_the_newer_counts_and_none_of_another_gpu_or_kernel() -> None:
    newest, oldest = winner(rounds=1, when="b"), winner(rounds=2, when="a")
    others = [winner(when="c", **changes) for changes in ({"gpu": H200}, {"kernel": "portable"})]

    assert build(SWEPT, newest, oldest, *others).winner == newest

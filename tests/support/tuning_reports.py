"""The trials of an imagined sweep, and the reports that `outblas tune --report` makes of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outblas.autotune.store.records import BestConfig, Trial
from outblas.report import model, tables
from support import stored
from support.stored import FINALIST, failed

CUBLAS_US = 175


def timed(config: str, ratio: float, predicted: float | None = None, **changes: Any) -> Trial:
    """A trial that was right, `ratio` times as fast as cuBLAS; the model predicted so many µs."""
    return stored.trial(
        config=config, us=CUBLAS_US / ratio, ratio=ratio, predicted_us=predicted, **changes
    )


def config_text(tile_m: int, tile_n: int, stages: int) -> str:
    return f"tile_m={tile_m},tile_n={tile_n},tile_k=64,stages={stages},order=hilbert,group_m=8"


def _right_trials() -> list[Trial]:
    """Four tiles, each a tenth slower than the one before, with 2 to 5 stages.

    By the screen 3 stages are the best of each tile, by the model 4 are; the model cannot tell 3
    stages from 5.
    """
    found = []
    for place, (tile_m, tile_n) in enumerate([(128, 256), (256, 128), (128, 128), (64, 64)]):
        for stages in (2, 3, 4, 5):
            ratio = 1.05 - 0.1 * place - 0.01 * abs(stages - 3)
            predicted_us = 170 + 10 * place + abs(stages - 4)
            found.append(timed(config_text(tile_m, tile_n, stages), ratio, predicted_us))
    return found


FAILED = [
    failed(config=config_text(192, 160, 2), reason="odd"),
    failed(config=config_text(192, 160, 3), reason="not done\n  in 30 s"),
    failed(config=config_text(192, 160, 4), reason="not done\n  in 30 s"),
    failed(config=config_text(64, 64, 6), status="crash", reason=""),
]
# Sixteen right configs and four that failed.
SWEPT = [*_right_trials(), *FAILED]

# The best by the finals, which the screen has as the second best, and the other finalist.
FIRST, SECOND = config_text(128, 256, 4), config_text(128, 256, 3)


def winner(**changes: Any) -> BestConfig:
    """The winner of `SWEPT`'s finals, where a config of another kernel was the second best."""
    finalists = (
        replace(FINALIST, config=FIRST),
        replace(FINALIST, kernel="portable"),
        replace(FINALIST, config=SECOND, us=201.0, ratio=1.045),
    )
    return stored.winner(**{"config": FIRST, "runner_up": SECOND, "finalists": finalists} | changes)


def predicting(us: float | None) -> list[Trial]:
    """`SWEPT`, where the model predicts the same for every config."""
    return [replace(trial, predicted_us=us) for trial in SWEPT]


def build(trials: Sequence[Trial], *winners: BestConfig, **options: Any) -> model.TuneReport:
    """The report on trials of hopper.hilbert at one workload."""
    return model.build(trials, winners, **options)


def rows(report: model.TuneReport, heading: str) -> list[str]:
    """The rows of the one table whose heading has these words, the cells apart by " | "."""
    (found,) = [table.rows for table in tables.tables(report) if heading in table.heading]
    return [" | ".join(row) for row in found]

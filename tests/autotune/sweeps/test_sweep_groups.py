"""Sweeps over groups, measured in this process and without a GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.in_process import measure_here

from outblas.autotune import sweep
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import Workload
from outblas.autotune.store.store import Store
from outblas.base.grouped_shapes import parse

TARGET = TuneTarget("grouped", "support.grouped_kernel")
TEXT = "4x24x16x8:zipf,4x24x16x8:terms"
OPTIONS: dict[str, Any] = {"dtype": "float32", "gpus": "cpu", "top_k": 2}
WORKLOADS = [
    Workload(24, 16, 8, "float32", grouping="4:zipf"),
    Workload(8, 16, 24, "float32", layout="tn", grouping="4:terms"),
]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_here(monkeypatch)


@pytest.mark.parametrize("shapes", [TEXT, parse(TEXT)], ids=["text", "workloads"])
def test_a_sweep_finds_a_winner_for_each_workload(shapes: Any, path: Path) -> None:
    found = sweep(TARGET, shapes, store=path, **OPTIONS)

    assert found.failures == []
    assert [winner.workload for winner in found.winners] == WORKLOADS


def test_what_won_with_balanced_groups_is_tried_with_skewed_ones(path: Path) -> None:
    """First, wherever the strategy has it."""
    options = OPTIONS | {"trials": 1}
    with Store(path) as store:
        (outcome,) = sweep(TARGET, "4x24x16x8", store=store, **OPTIONS).outcomes
        assert outcome.winner is not None
        store.record_best(replace(outcome.winner, config="number=2,fault="))

        (skewed,) = sweep(TARGET, "4x24x16x8:zipf", store=store, **options).outcomes

    assert "number=2,fault=" in [trial.config for trial in skewed.trials]

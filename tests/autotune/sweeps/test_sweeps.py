"""Sweeps without a GPU: what they are asked for, groups, budgets, and one in real processes."""

import typing
from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.faulty_kernel import Config, notes
from support.in_process import measure_here
from support.sweeps import H100, OPTIONS, SUBJECT, WORKLOAD, gone, soon

from outblas.autotune import Sweep, SweepOptions, sweep
from outblas.autotune.measure.compile_pool import Compilers
from outblas.autotune.measure.isolated import MeasureWorker
from outblas.autotune.measure.progress import Progress
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import Workload
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps import engine, tuner
from outblas.autotune.sweeps.engine import LEAST_SECONDS, Budget, one_at_a_time
from outblas.autotune.sweeps.options import SweepKeywords
from outblas.autotune.sweeps.outcome import Job
from outblas.autotune.sweeps.sweep import visible_gpus
from outblas.base.configs import from_text
from outblas.base.grouped_shapes import parse

pytestmark = pytest.mark.usefixtures("faulty_log")

FAULTS = {"segfault": "crash", "compile-raise": "failed"}


@pytest.mark.long
def test_faults_cost_a_trial_each(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as for an H100, in processes of their own that see no GPU, and measured in the
    interpreter. Other faults are those of test_tuner_promises and test_worker.
    """
    monkeypatch.setenv("FAULTY_CONFIGS", "1")
    monkeypatch.setenv("FAULTY_FAULTS", " ".join(FAULTS))
    job = Job((SUBJECT,), WORKLOAD, SweepOptions(top_k=1))
    with MeasureWorker("cpu") as bench, Compilers(1) as compilers, Store(path) as store:
        outcome = tuner.Tuning(job, H100, bench, compilers, store).run()

    trials = defaultdict(list)
    for trial in outcome.trials:
        trials[from_text(Config, trial.config).fault].append(trial)
    assert [trial.status for trial in trials.pop("")] == ["ok"]
    assert {fault: [t.status for t in of_fault] for fault, of_fault in trials.items()} == {
        fault: [status] for fault, status in FAULTS.items()
    }
    assert {fault: of_fault[0].reason for fault, of_fault in trials.items()} == {
        "segfault": "the worker died: signal SIGSEGV",
        "compile-raise": "RuntimeError: no luck today",
    }
    assert outcome.finished
    assert outcome.winner is not None
    assert from_text(Config, outcome.winner.config).fault == ""
    compiling = {note.process for note in notes(".compiled")}
    measuring = {note.process for note in notes()}
    assert {note.visible for note in notes(".compiled")} == {""}
    assert not compiling & measuring
    assert soon(lambda: all(map(gone, compiling | measuring)))


# Arguments.

BAD = [
    ("trials", 0, "trials is 0, expected an integer of at least 1"),
    ("top_k", 1.5, "top_k is 1.5"),
    ("budget", float("nan"), "budget is nan, expected seconds above 0"),
    ("trial_seconds", -1.0, "trial_seconds is -1.0"),
    ("engine", "slurm", "engine is 'slurm', expected one of local, ray"),
    ("dtype", "float64", "dtype is 'float64'"),
    ("out_dtype", "bfloat16", "out_dtype is 'bfloat16'"),
    ("layout", "nm", "layout is 'nm'"),
    ("weights", "hot", "weights is 'hot', expected one of warm, cold"),
    ("epilogue", "gelu+bias", r"epilogue is 'gelu\+bias', expected some of bias, an activation"),
    ("epilogue", "bias", "kernel 'faulty' has no epilogue besides alpha and C, but was given bias"),
    ("shapes", [(16, 16)], "shapes is"),
    ("shapes", (16, 0, 16), "N is 0"),
    ("shapes", "moe", "kernel 'faulty' multiplies no groups, but was given groups 8"),
    ("kernels", [], "kernels is empty"),
    ("kernels", TuneTarget("My kernel", "support.faulty_kernel"), "My kernel"),
    ("kernels", "hopper.grouped", "kernel 'hopper.grouped' multiplies groups, but was given one"),
    ("gpus", "9", "gpus is '9'"),
    ("strategy", "luck", "strategy is 'luck'"),
]


@pytest.mark.parametrize(("argument", "value", "message"), BAD)
def test_a_bad_argument_is_an_error_before_anything_is_measured(
    argument: str, value: Any, message: str, path: Path
) -> None:
    arguments = {"kernels": SUBJECT, "shapes": 16, "store": path, **OPTIONS, argument: value}

    with pytest.raises(ValueError, match=message):
        sweep(**arguments)
    assert notes() == []
    assert not path.exists(), "a store was made"


def test_a_module_and_an_option_that_are_not_there_are_named(path: Path) -> None:
    with pytest.raises(ImportError, match="no_such_module is not installed"):
        sweep(TuneTarget("mine", "no_such_module"), 16, store=path, **OPTIONS)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'trails'"):
        sweep(SUBJECT, 16, trails=4, store=path, **OPTIONS)  # type: ignore[call-arg]


def test_a_keyword_takes_precedence_over_the_record(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_local = Mock(return_value=Sweep())
    monkeypatch.setattr(engine, "run_local", run_local)

    sweep(SUBJECT, 16, options=SweepOptions(trials=1, top_k=2), trials=4, store=path, **OPTIONS)

    options = run_local.call_args.args[-1]
    assert (options.trials, options.top_k) == (4, 2)


def test_keywords_are_the_fields_of_the_record() -> None:
    types = typing.get_type_hints(SweepOptions)

    assert [field.name for field in fields(SweepOptions)] == list(types)
    assert typing.get_type_hints(SweepKeywords) == types


@pytest.mark.parametrize(
    ("gpus", "visible", "names"),
    [
        ("all", "", ["0", "1"]),
        ("0,1", "", ["0", "1"]),
        ([0, 1], "", ["0", "1"]),
        (1, "", ["1"]),
        ("1,1", "", ["1"]),
        ("all", "GPU-a, MIG-b", ["GPU-a", "MIG-b"]),
        (1, "GPU-a, MIG-b", ["MIG-b"]),
        ("2", "", None),
        ("-1", "", None),
        ("", "", None),
        ([], "", None),
        ("0;1", "", None),
    ],
)
def test_gpus_are_named_as_cuda_is_told_of_them(
    gpus: Any, visible: str, names: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    if names is None:
        with pytest.raises(ValueError, match="gpus is"):
            visible_gpus(gpus)
    else:
        assert visible_gpus(gpus) == names


# Groups.

TARGET = TuneTarget("grouped", "support.grouped_kernel")
TEXT = "4x24x16x8:zipf,4x24x16x8:terms"
OF_GROUPS: dict[str, Any] = {"dtype": "float32", "gpus": "cpu", "top_k": 2}


@pytest.mark.parametrize("shapes", [TEXT, parse(TEXT)], ids=["text", "workloads"])
def test_a_sweep_finds_a_winner_for_each_workload(
    shapes: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_here(monkeypatch)

    found = sweep(TARGET, shapes, store=path, **OF_GROUPS)

    assert found.failures == []
    assert [winner.workload for winner in found.winners] == [
        Workload(24, 16, 8, "float32", grouping="4:zipf"),
        Workload(8, 16, 24, "float32", layout="tn", grouping="4:terms"),
    ]
    assert all(winner.config.endswith("fault=") for winner in found.winners)


def test_what_won_with_balanced_groups_is_tried_with_skewed_ones(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First, wherever the strategy has it."""
    measure_here(monkeypatch)
    with Store(path) as store:
        (outcome,) = sweep(TARGET, "4x24x16x8", store=store, **OF_GROUPS).outcomes
        assert outcome.winner is not None
        store.record_best(replace(outcome.winner, config="number=2,fault="))

        skewed = sweep(TARGET, "4x24x16x8:zipf", store=store, trials=1, **OF_GROUPS)

    assert "number=2,fault=" in [trial.config for trial in skewed.outcomes[0].trials]


# Budgets and reports.


def test_a_workload_gets_its_share_of_the_budget() -> None:
    """Two GPUs share six workloads: each has three of them in 100 seconds."""
    budget = Budget(100.0, 6, 2)

    shares = [budget.share() or 0.0 for _ in range(6)]

    assert 30 < shares[0] <= 100 / 3
    assert 99 < shares[-1] <= 100, "the last gets what is left"
    assert Budget(0.1, 1, 1).share() == LEAST_SECONDS == 5.0


@pytest.mark.filterwarnings("ignore:.*progress is no longer reported")
def test_a_report_that_raises_is_not_called_again() -> None:
    report = Mock(side_effect=ValueError("no terminal"))
    tell = one_at_a_time(report)

    tell(Progress(WORKLOAD))
    tell(Progress(WORKLOAD))

    assert report.call_count == 1

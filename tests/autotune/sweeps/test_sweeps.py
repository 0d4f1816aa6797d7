"""Whole sweeps without a GPU, in real processes: a config costs its own trial."""

from collections import defaultdict
from pathlib import Path

import pytest
from support.faulty_kernel import Config, notes
from support.sweeps import (
    H100,
    SUBJECT,
    WORKLOAD,
    gone,
    soon,
)

from outblas.autotune.measure.compile_pool import Compilers
from outblas.autotune.measure.isolated import MeasureWorker
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps import tuner
from outblas.autotune.sweeps.outcome import Job
from outblas.base.configs import from_text

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("faulty_log")]


FAULTS = {"segfault": "crash", "compile-raise": "failed"}


def test_faults_cost_a_trial_each(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as for an H100, in processes of their own that see no GPU, and measured in the
    interpreter. Other faults are those of test_tuner_promises and test_worker.
    """
    monkeypatch.setenv("FAULTY_CONFIGS", "1")
    monkeypatch.setenv("FAULTY_FAULTS", " ".join(FAULTS))
    job = Job((SUBJECT,), WORKLOAD, top_k=1)
    with MeasureWorker("cpu") as bench, Compilers(1) as compilers, Store(path) as store:
        outcome = tuner.tune(job, H100, bench, compilers, store)

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

"""Whole sweeps without a GPU, in real processes: a config costs its own trial."""

import signal
from collections import defaultdict
from pathlib import Path

import pytest
from support.faulty_kernel import Config, notes
from support.sweeps import (
    H100,
    OPTIONS,
    SUBJECT,
    WORKLOAD,
    gone,
    soon,
    start,
    stored,
)

from outblas.autotune.measure.compile_pool import Compilers
from outblas.autotune.measure.isolated import MeasureWorker
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps import tuner
from outblas.autotune.sweeps.outcome import Job
from outblas.autotune.sweeps.sweep import sweep
from outblas.base.configs import from_text

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("faulty_log")]


FAULTS = {
    "segfault": "crash",
    "wrong": "wrong",
    "compile-segfault": "compile crash",
    "compile-memory": "compile crash",
    "compile-raise": "failed",
}


def test_faults_cost_a_trial_each(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as for an H100, in processes of their own that see no GPU, and measured in the
    interpreter. Hangs are those of test_tuner_promises, which need no torch.
    """
    monkeypatch.setenv("FAULTY_FAULTS", " ".join(FAULTS))
    job = Job((SUBJECT,), WORKLOAD, top_k=1)
    with MeasureWorker("cpu") as bench, Compilers(1) as compilers, Store(path) as store:
        outcome = tuner.tune(job, H100, bench, compilers, store)

    trials = defaultdict(list)
    for trial in outcome.trials:
        trials[from_text(Config, trial.config).fault].append(trial)
    assert [trial.status for trial in trials.pop("")] == ["ok"] * 3
    assert {fault: [t.status for t in of_fault] for fault, of_fault in trials.items()} == {
        fault: [status] for fault, status in FAULTS.items()
    }
    reasons = {fault: of_fault[0].reason for fault, of_fault in trials.items()}
    assert reasons == reasons | {
        "segfault": "the worker died: signal SIGSEGV",
        "compile-segfault": "the worker died: signal SIGSEGV",
        "compile-memory": "out of memory: the compile process reached its limit",
        "compile-raise": "RuntimeError: no luck today",
    }
    assert "1 of 256 elements" in reasons["wrong"]
    assert outcome.finished
    assert outcome.winner is not None
    assert from_text(Config, outcome.winner.config).fault == ""
    assert outcome.winner.screened == 6  # those that a crash of the compiler took are not
    compiling = {note.process for note in notes(".compiled")}
    measuring = {note.process for note in notes()}
    assert {note.visible for note in notes(".compiled")} == {""}
    assert not compiling & measuring
    assert soon(lambda: all(map(gone, compiling | measuring)))


def test_an_interrupt_ends_everything(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does to a program that goes on, and had opened the store itself.

    The program is a script, and its worker no fork: as a user's are.
    """
    monkeypatch.setenv("FAULTY_CONFIGS", "1000")
    code = """
with Store(Path(sys.argv[1])) as store:
    try:
        run(store, progress=lambda p: print(p.screened, flush=True))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    soon(lambda: not active_children())
    for pause in (0, 1):
        time.sleep(pause)
        print("ended", len(active_children()), len(store.trials()), flush=True)
"""
    said = []
    with start(code, path) as process:
        for line in process.stdout:
            said.append(line.strip())
            if said[-1] == "3":
                process.send_signal(signal.SIGINT)
        complaint = process.stderr.read()

    assert process.returncode == 0, complaint
    trials = len(stored(path))
    assert [line for line in said if not line.isdecimal()] == [
        "interrupted",
        *[f"ended 0 {trials}"] * 2,
    ]
    assert trials < 100
    assert path.with_name("ran").read_text() == "ran\n"  # and not once more by the worker


def test_a_workload_that_cannot_be_had_fails_alone(path: Path) -> None:
    """fp32 cannot hold the sums of so long a K, which the worker says when it makes its
    operands.
    """
    found = sweep(SUBJECT, [(1, 1, 1 << 24), (16, 16, 16)], store=path, top_k=1, **OPTIONS)

    (failure,) = found.failures
    assert failure.workload.K == 1 << 24
    assert "expected K < 2**24" in failure.reason
    assert [winner.workload.K for winner in found.winners] == [16]
    assert not found.finished

"""Whole sweeps without a GPU: a config costs its own trial, and whoever is killed loses the trial that ran."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_kernel import COMPILED, MEASURED, Config, notes
from sweeps import H100, OPTIONS, SUBJECT, WORKLOAD, gone, run, soon, start, stored

from outblas.autotune import isolated, sweeping, tuning
from outblas.autotune.compilers import Compilers
from outblas.autotune.isolated import Bench
from outblas.autotune.progress import Progress
from outblas.autotune.records import Status
from outblas.autotune.store import Store
from outblas.autotune.subjects import Subject
from outblas.autotune.sweeping import Budget, sweep, visible_gpus
from outblas.autotune.tuning import Job, Outcome
from outblas.configs import from_text

pytestmark = pytest.mark.usefixtures("faulty_log")


def test_a_killed_sweep_goes_on_where_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_CONFIGS", "9")
    monkeypatch.setenv("FAULTY_SLEEP", "100")
    code = "run(sys.argv[1], progress=lambda p: print(p.stage, p.screened, flush=True))"
    with start(code, path) as first:
        assert first.stdout
        for line in first.stdout:
            if line == "screening 4\n":
                first.kill()
    assert first.returncode == -signal.SIGKILL
    (process,) = {note.process for note in notes()}
    assert soon(lambda: gone(process))
    before, begun = stored(path), len(notes())
    assert 4 <= len(before) <= begun <= len(before) + 1

    screened: list[int] = []
    found = run(path, progress=lambda p: screened.append(len(notes())) if p.stage == "finals" else None)
    (outcome,) = found.outcomes
    after = stored(path)
    assert [trial for trial in after if trial in before] == before
    assert len({trial.config for trial in after}) == len(after) == 9
    assert outcome.new == 9 - len(before)
    counts = Counter(note.config for note in notes()[: screened[0]])
    assert {config for config, times in counts.items() if times > 1} <= {notes()[begun - 1].config}
    assert all(counts[trial.config] == 1 for trial in before)
    assert outcome.winner in found.winners
    with Store(path) as store:
        assert store.winners() == found.winners


def reasons_of(outcome: Outcome, statuses: dict[str, str], figure: str) -> dict[str, str]:
    """Why each fault failed: one trial each with its status and without that figure, and three sound ones with it."""
    trials = {from_text(Config, trial.config): trial for trial in outcome.trials}
    assert outcome.new == len(trials) == len(outcome.trials) == 3 + len(statuses)
    for config, trial in trials.items():
        assert trial.status == statuses.get(config.fault, "ok"), trial
        assert (getattr(trial, figure) is None) == (trial.reason != "") == bool(config.fault)
    return {config.fault: trial.reason for config, trial in trials.items()}


def test_faults_cost_a_trial_each(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_FAULTS", " ".join(MEASURED))
    monkeypatch.setattr(isolated, "TURNS", 0)  # else more than 5 s are granted where even torch is slow
    found = run(path, trial_seconds=5.0)
    (outcome,) = found.outcomes
    reasons = reasons_of(outcome, MEASURED, "us")
    assert reasons["hang"] == "not done in 5 s: the worker was killed"
    assert reasons["segfault"] == "the worker died: signal SIGSEGV"
    assert reasons["exit"] == "the worker died: exit status 3"
    assert "1 of 256 elements" in reasons["wrong"]
    assert reasons["raise"] == "RuntimeError: no luck today"
    assert reasons["refuse"] == "fault is refuse, expected another"
    assert found.finished
    assert found.failures == []
    assert outcome.winner is not None
    assert from_text(Config, outcome.winner.config).fault == ""

    measured = len(notes())
    again = run(path)
    assert again.outcomes[0].new == 0
    assert {from_text(Config, note.config).fault for note in notes()[measured:]} <= {""}
    assert len(stored(path)) == len(outcome.trials)


def test_compiles_that_fail_cost_a_trial_each(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as for an H100, and measured in the interpreter."""
    monkeypatch.setenv("FAULTY_FAULTS", " ".join(COMPILED))
    job = Job((SUBJECT,), WORKLOAD, top_k=1)
    with Bench("cpu") as bench, Compilers(2, timeout=5.0, memory=6 << 30) as compilers, Store(path) as store:
        outcome = tuning.tune(job, H100, bench, compilers, store)
        processes = {note.process for note in notes(".compiled")}
        measuring = {note.process for note in notes()}
    reasons = reasons_of(outcome, COMPILED, "compile_s")
    assert reasons["compile-segfault"] == "the compiler's process ended with -11"
    assert reasons["compile-memory"] == "the compiler reached its memory bound"
    assert reasons["compile-raise"] == "RuntimeError: no luck today"
    assert outcome.winner is not None
    assert outcome.winner.screened == 4  # those that a hang or a crash of the compiler took are not
    assert {note.visible for note in notes(".compiled")} == {""}
    assert not processes & measuring
    assert soon(lambda: all(map(gone, processes | measuring)))
    assert {note.config for note in notes()} == {trial.config for trial in outcome.trials if trial.status == "ok"}


def test_two_sweeps_share_a_store(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_CONFIGS", "8")
    monkeypatch.setenv("FAULTY_SLEEP", "100")
    code = """
screened = None
def report(p):
    global screened
    if p.stage in ("finals", "done") and screened is None:
        mine = {child.pid for child in active_children()}
        screened = [note.config for note in notes() if note.process in mine]
found = run(sys.argv[1], progress=report)
print(json.dumps([found.finished, len(found.outcomes[0].trials), found.outcomes[0].new, screened, len(found.winners)]))
"""
    both = [start(code, path) for _ in range(2)]
    said = [json.loads(process.communicate(timeout=200)[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert path.with_name("ran").read_text() == "ran\n" * 2  # and not once more by every worker
    assert len({trial.config for trial in stored(path)}) == len(stored(path)) == 8
    assert sum(new for _, _, new, _, _ in said) == 8
    for finished, trials, _, screened, winners in said:
        assert finished
        assert trials == 8
        assert winners == 1
        assert len(set(screened)) == len(screened)
    times = Counter(config for _, _, _, screened, _ in said for config in screened)
    assert times.keys() == {trial.config for trial in stored(path)}
    assert times.total() <= 8 + 2  # what both are at when they have nothing else left


def test_interrupt_ends_everything(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does to a program that goes on, and had opened the store itself."""
    monkeypatch.setenv("FAULTY_CONFIGS", "1000")
    code = """
with Store(Path(sys.argv[1])) as store:
    try:
        run(store, progress=lambda p: print(p.screened, flush=True))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    began = time.monotonic()
    while active_children() and time.monotonic() - began < 20:
        time.sleep(0.05)
    print("ended", len(active_children()), len(store.trials()), flush=True)
    time.sleep(1)
    print("and then", len(store.trials()), flush=True)
"""
    with start(code, path) as process:
        assert process.stdout
        for line in process.stdout:
            if line == "3\n":
                process.send_signal(signal.SIGINT)
            if line == "interrupted\n":
                break
        rest = process.stdout.read().split("\n")
        complaint = process.stderr.read() if process.stderr else ""
    assert process.returncode == 0, complaint
    said = [line for line in rest if not line.isdecimal()]
    children, trials = said[0].removeprefix("ended ").split()
    assert children == "0"
    assert said[1] == f"and then {trials}"
    assert int(trials) == len(stored(path)) < 100


def test_interrupted_program_leaves_nothing_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_FAULTS", "hang")
    with start("run(sys.argv[1])", path) as process:
        assert soon(lambda: any("hang" in note.config for note in notes()), 120)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        process.wait(60)
    assert time.monotonic() - began < 20
    assert process.returncode != 0
    assert soon(lambda: all(gone(note.process) for note in notes()))
    assert [trial.status for trial in stored(path)] == ["ok"]


def test_a_workload_that_cannot_be_had_fails_alone(path: Path) -> None:
    """fp32 cannot hold the sums of so long a K, which the worker says when it makes its operands."""
    found = sweep(SUBJECT, [(1, 1, 1 << 24), (16, 16, 16)], store=path, top_k=1, **OPTIONS)
    (failure,) = found.failures
    assert failure.workload.K == 1 << 24
    assert "expected K < 2**24" in failure.reason
    assert [winner.workload.K for winner in found.winners] == [16]
    assert not found.finished


def test_a_report_that_raises_is_not_heard_again() -> None:
    heard: list[Progress] = []

    def report(progress: Progress) -> None:
        heard.append(progress)
        raise ValueError("no terminal")

    tell = sweeping._serial(report)
    with pytest.warns(UserWarning, match=r"progress is no longer reported: ValueError\('no terminal'\)"):
        tell(Progress(WORKLOAD))
    tell(Progress(WORKLOAD))
    assert len(heard) == 1


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "trials": ({"trials": 0}, "trials is 0, expected an integer of at least 1"),
    "top_k": ({"top_k": 1.5}, "top_k is 1.5"),
    "workers": ({"compile_workers": -1}, "compile_workers is -1"),
    "budget": ({"budget": 0}, "budget is 0, expected seconds above 0"),
    "nan": ({"budget": float("nan")}, "budget is nan"),
    "trial_seconds": ({"trial_seconds": -1.0}, r"trial_seconds is -1.0"),
    "engine": ({"engine": "slurm"}, "engine is 'slurm', expected one of local, ray"),
    "ranker": ({"ranker": "luck"}, "ranker is 'luck', expected one of model, heuristics"),
    "dtype": ({"dtype": "float64"}, "dtype is 'float64'"),
    "out_dtype": ({"out_dtype": "bfloat16"}, "out_dtype is 'bfloat16'"),
    "layout": ({"layout": "nm"}, "layout is 'nm'"),
    "shapes": ({"shapes": [(16, 16)]}, "shapes is"),
    "size": ({"shapes": (16, 0, 16)}, "N is 0"),
    "text": ({"shapes": "16x16"}, "shapes is '16x16'"),
    "no kernels": ({"kernels": []}, "kernels is empty"),
    "kernel": ({"kernels": "hopper.nothing"}, "kernel is 'hopper.nothing', expected one of"),
    "gpus": ({"gpus": "9"}, "gpus is '9'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case: str, path: Path) -> None:
    changed, message = BAD[case]
    arguments: dict[str, Any] = {"kernels": SUBJECT, "shapes": 16, "store": path, **OPTIONS, **changed}
    with pytest.raises(ValueError, match=message):
        sweep(arguments.pop("kernels"), arguments.pop("shapes"), **arguments)
    assert notes() == []


def test_names_that_no_store_takes_are_refused_at_once(path: Path) -> None:
    with pytest.raises(ValueError, match="My kernel"):
        sweep(Subject("My kernel", "faulty_kernel"), 16, store=path, **OPTIONS)
    assert notes() == []


def test_modules_that_are_not_there(path: Path) -> None:
    with pytest.raises(ImportError, match="no_such_module is not installed"):
        sweep(Subject("mine", "no_such_module"), 16, store=path, **OPTIONS)


def test_budget_is_shared() -> None:
    budget = Budget(100.0, 6, 2)
    first = budget.share()
    assert first is not None
    assert 30 < first <= 100 / 3
    for _ in range(4):
        budget.share()
    last = budget.share()
    assert last is not None
    assert 99 < last <= 100
    assert Budget(None, 3, 1).share() is None
    assert Budget(0.1, 1, 1).share() == 5.0


def test_gpus_as_cuda_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus("all") == visible_gpus("0,1") == visible_gpus([0, 1]) == ["0", "1"]
    assert visible_gpus(1) == visible_gpus("1,1") == ["1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, MIG-b")
    assert visible_gpus("all") == ["GPU-a", "MIG-b"]
    assert visible_gpus(1) == ["MIG-b"]
    for wrong in ("2", "-1", "", [], True, "0;1"):
        with pytest.raises(ValueError, match="gpus is"):
            visible_gpus(wrong)  # type: ignore[arg-type]


def test_statuses_of_faults_are_statuses() -> None:
    known = set(Status.__args__)  # type: ignore[attr-defined]
    assert {*MEASURED.values(), *COMPILED.values()} <= known
    assert os.environ["FAULTY_LOG"]

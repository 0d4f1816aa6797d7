"""Whole sweeps without a GPU: a config costs its own trial, and whoever is killed loses the trial
that ran.
"""

import os
import signal
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.drivers import Driver
from support.faulty_kernel import COMPILED, MEASURED, Config, notes
from support.sweeps import (
    H100,
    OPTIONS,
    SUBJECT,
    WORKLOAD,
    active_children,
    gone,
    run,
    soon,
    start,
    stored,
)

from outblas.autotune.measure import isolated
from outblas.autotune.measure.compile_pool import Compilers
from outblas.autotune.measure.isolated import MeasureWorker
from outblas.autotune.measure.progress import Progress
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store import transfer
from outblas.autotune.store.records import STATUSES
from outblas.autotune.store.store import Store, StoreError
from outblas.autotune.sweeps import outcome, tuner
from outblas.autotune.sweeps.outcome import Budget
from outblas.autotune.sweeps.sweep import sweep, visible_gpus
from outblas.autotune.sweeps.tuner import Job, Outcome
from outblas.core.configs import from_text

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("faulty_log")]


def sweep_and_say(say: Connection, path: Path, **options: Any) -> None:
    """Runs a sweep, and says how far it is."""
    run(path, progress=lambda p: say.send((p.stage, p.screened)), **options)


def test_a_killed_sweep_goes_on_where_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_CONFIGS", "9")
    monkeypatch.setenv("FAULTY_SLEEP", "100")
    with Driver(sweep_and_say, path) as first:
        for said in first.said():
            if said == ("screening", 4):
                first.send(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
    (process,) = {note.process for note in notes()}
    assert soon(lambda: gone(process))
    before, begun = stored(path), len(notes())
    assert 4 <= len(before) <= begun <= len(before) + 1

    screened = []
    found = run(
        path, progress=lambda p: screened.append(len(notes())) if p.stage == "finals" else None
    )
    (outcome,), after = found.outcomes, stored(path)
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
    """Why each fault failed: one trial each with its status and without that figure, and three
    sound ones with it.
    """
    trials = {from_text(Config, trial.config): trial for trial in outcome.trials}
    assert outcome.new == len(trials) == len(outcome.trials) == 3 + len(statuses)
    for config, trial in trials.items():
        assert trial.status == statuses.get(config.fault, "ok"), trial
        assert (getattr(trial, figure) is None) == (trial.reason != "") == bool(config.fault)
    return {config.fault: trial.reason for config, trial in trials.items()}


def test_faults_cost_a_trial_each(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_FAULTS", " ".join(MEASURED))
    monkeypatch.setattr(
        isolated, "TURNS", 0
    )  # else more than 5 s are granted where even torch is slow
    found = run(path, trial_seconds=5.0)
    (outcome,) = found.outcomes
    reasons = reasons_of(outcome, MEASURED, "us")
    assert "1 of 256 elements" in reasons["wrong"]
    assert reasons == reasons | {
        "hang": "not done in 5 s: the worker was killed",
        "segfault": "the worker died: signal SIGSEGV",
        "exit": "the worker died: exit status 3",
        "raise": "RuntimeError: no luck today",
        "refuse": "fault is refuse, expected another",
    }
    assert found.finished
    assert found.failures == []
    assert from_text(Config, outcome.winner.config).fault == ""

    measured = len(notes())
    assert run(path).outcomes[0].new == 0
    assert {from_text(Config, note.config).fault for note in notes()[measured:]} <= {""}
    assert len(stored(path)) == len(outcome.trials)


def test_compiles_that_fail_cost_a_trial_each(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as for an H100, and measured in the interpreter."""
    monkeypatch.setenv("FAULTY_FAULTS", " ".join(COMPILED))
    job = Job((SUBJECT,), WORKLOAD, top_k=1)
    with (
        MeasureWorker("cpu") as bench,
        Compilers(2, timeout=5.0, memory=6 << 30) as compilers,
        Store(path) as store,
    ):
        outcome = tuner.tune(job, H100, bench, compilers, store)
        processes = {note.process for note in notes(".compiled")}
        measuring = {note.process for note in notes()}
    reasons = reasons_of(outcome, COMPILED, "compile_s")
    assert reasons == reasons | {
        "compile-segfault": "the compiler's process ended with -11",
        "compile-memory": "out of memory: the compiler reached its bound",
        "compile-raise": "RuntimeError: no luck today",
    }
    assert outcome.winner.screened == 4  # those that a hang or a crash of the compiler took are not
    assert {note.visible for note in notes(".compiled")} == {""}
    assert not processes & measuring
    assert soon(lambda: all(map(gone, processes | measuring)))
    assert {note.config for note in notes()} == {
        trial.config for trial in outcome.trials if trial.status == "ok"
    }


def sweep_beside_another(say: Connection, path: Path) -> None:
    """Says what came of a sweep: whether it finished, its winners and trials, those of its own, and
    what its worker screened.
    """
    screened: list[str] | None = None

    def report(progress: Progress) -> None:
        nonlocal screened
        if progress.stage in ("finals", "done") and screened is None:
            mine = {child.pid for child in active_children()}
            screened = [note.config for note in notes() if note.process in mine]

    found = run(path, progress=report)
    (outcome,) = found.outcomes
    say.send((found.finished, len(found.winners), len(outcome.trials), outcome.new, screened))


def test_two_sweeps_share_a_store(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_CONFIGS", "8")
    monkeypatch.setenv("FAULTY_SLEEP", "100")
    with Driver(sweep_beside_another, path) as one, Driver(sweep_beside_another, path) as other:
        said = [*one.said(), *other.said()]
        assert [one.wait(), other.wait()] == [0, 0]
    assert len({trial.config for trial in stored(path)}) == len(stored(path)) == 8
    assert sum(new for *_, new, _ in said) == 8
    for *facts, _, screened in said:
        assert facts == [True, 1, 8]
        assert len(set(screened)) == len(screened)
    times = Counter(config for *_, screened in said for config in screened)
    assert times.keys() == {trial.config for trial in stored(path)}
    assert times.total() == 8


def test_interrupts_brand_no_config(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sweep is interrupted while it measures, the next is killed; the third measures it."""
    monkeypatch.setenv("FAULTY_FAULTS", "wait")
    gate = tmp_path / "log.wait"
    gate.touch()
    for kill in (signal.SIGINT, signal.SIGKILL):
        before = len(notes())
        with Driver(sweep_and_say, path) as driver:
            assert soon(
                lambda before=before: any("wait" in note.config for note in notes()[before:]), 120
            )
            driver.send(kill)
            assert driver.wait() != 0
        assert soon(lambda: all(gone(note.process) for note in notes()))
    gate.unlink()
    (outcome,) = run(path, top_k=1).outcomes
    assert {trial.status for trial in outcome.trials} == {"ok"}
    assert outcome.finished


def test_a_worker_that_is_killed_from_outside_says_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTY_FAULTS", "killed-once")
    monkeypatch.setenv("FAULTY_CONFIGS", "1")
    (outcome,) = run(path, top_k=1).outcomes
    assert outcome.finished
    assert [trial.status for trial in outcome.trials] == ["ok", "ok"]
    assert sum("killed-once" in note.config for note in notes()) == 2


def test_what_has_failed_is_measured_anew_where_that_is_asked_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTY_FAULTS", "raise refuse wrong")
    monkeypatch.setenv("FAULTY_CONFIGS", "1")
    run(path, top_k=1)
    before = {trial.config: trial for trial in stored(path)}
    assert sorted(trial.status for trial in before.values()) == ["failed", "ok", "refused", "wrong"]
    (outcome,) = run(path, top_k=1, retry_failed=True).outcomes
    assert (outcome.new, len(outcome.trials)) == (1, 4)
    assert [trial.status for trial in outcome.trials[-1:]] == ["failed"]
    assert [trial for trial in stored(path) if trial != before[trial.config]] in (
        [],
        outcome.trials[-1:],
    )


def test_interrupt_ends_everything(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def sweep_for_hours(say: Connection, path: Path) -> None:
    """Runs a sweep whose trials may take hours."""
    sweep_and_say(say, path, trial_seconds=1e4)


def test_interrupted_program_leaves_nothing_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTY_FAULTS", "hang")
    with Driver(sweep_for_hours, path) as driver:
        assert soon(lambda: any("hang" in note.config for note in notes()), 120)
        driver.send(signal.SIGINT)
        assert driver.wait() != 0  # nothing but the interrupt ends the trial
    assert soon(lambda: all(gone(note.process) for note in notes()))
    assert [trial.status for trial in stored(path)] == ["ok"]


def test_a_store_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with (
        pytest.warns(UserWarning, match="results are kept in memory"),
        pytest.raises(StoreError, match="file"),
    ):
        run(tmp_path / "file" / "store.sqlite")
    with Store(tmp_path / "store.sqlite") as store:
        leave_room(store)
        with pytest.raises(StoreError, match="full"):
            run(store)
    assert notes() == []


@pytest.mark.filterwarnings("ignore:.*results are kept in memory")
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_disk_that_fills_up_loses_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    """What the store refuses is exported elsewhere, and said, however the sweep ends."""
    monkeypatch.setenv("FAULTY_CONFIGS", "200")
    monkeypatch.chdir(tmp_path)

    signals = [signal.SIGINT] if interrupted else []

    def report(progress):
        if progress.screened == 1:
            leave_room(store)
        # One signal: a second one, as from an impatient user, ends the wait for the last trial.
        if progress.screened == 150 and signals:
            os.kill(os.getpid(), signals.pop())

    with Store(path) as store:
        if interrupted:
            with pytest.raises(KeyboardInterrupt) as error:
                run(store, progress=report, top_k=1)
            (note,) = error.value.__notes__
            (rescued,) = tmp_path.glob("*.json*")
            assert note.startswith(
                f"{store.unsaved} results could not be written to {path}: they are in {rescued}"
            )
        else:
            found = run(store, progress=report, top_k=1)
            rescued, there = found.rescued, found.unsaved
            assert (there, rescued.parent) == (store.unsaved, tmp_path)
        assert store.unsaved > 20
        leave_room(store, 1_000_000)
        in_file, everything = stored(path), store.trials()
    with Store(tmp_path / "other.sqlite") as other:
        transfer.import_into(other, rescued)
        kept = {trial.config for trial in [*in_file, *other.trials()]}
    assert kept == {trial.config for trial in everything}
    assert len(kept) == 200 or (interrupted and len(kept) >= 150)


def leave_room(store, pages=0) -> None:
    with store._mutex:
        if pages == 0:
            store._file.execute("VACUUM")
        used = store._file.execute("PRAGMA page_count").fetchone()[0]
        store._file.execute(f"PRAGMA max_page_count = {used + pages}")


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


def test_a_report_that_raises_is_not_heard_again() -> None:
    report = Mock(side_effect=ValueError("no terminal"))
    tell = outcome.one_at_a_time(report)
    with pytest.warns(
        UserWarning, match=r"progress is no longer reported: ValueError\('no terminal'\)"
    ):
        tell(Progress(WORKLOAD))
    tell(Progress(WORKLOAD))
    assert report.call_count == 1


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("trials", 0, "trials is 0, expected an integer of at least 1"),
        ("top_k", 1.5, "top_k is 1.5"),
        ("compile_workers", -1, "compile_workers is -1"),
        ("budget", 0, "budget is 0, expected seconds above 0"),
        ("budget", float("nan"), "budget is nan"),
        ("trial_seconds", -1.0, "trial_seconds is -1.0"),
        ("engine", "slurm", "engine is 'slurm', expected one of local, ray"),
        ("ranker", "luck", "ranker is 'luck', expected one of model, heuristics"),
        ("dtype", "float64", "dtype is 'float64'"),
        ("out_dtype", "bfloat16", "out_dtype is 'bfloat16'"),
        ("layout", "nm", "layout is 'nm'"),
        ("shapes", [(16, 16)], "shapes is"),
        ("shapes", (16, 0, 16), "N is 0"),
        ("shapes", "16x16", "shapes is '16x16'"),
        ("kernels", [], "kernels is empty"),
        (
            "kernels",
            TuneTarget("My kernel", "support.faulty_kernel"),
            "My kernel",
        ),  # which no store takes
        ("gpus", "9", "gpus is '9'"),
    ],
)
def test_bad_arguments(argument: str, value: Any, message: str, path: Path) -> None:
    given = {"kernels": SUBJECT, "shapes": 16, "store": path, **OPTIONS, argument: value}
    with pytest.raises(ValueError, match=message):
        sweep(**given)
    assert notes() == []


def test_modules_that_are_not_there(path: Path) -> None:
    with pytest.raises(ImportError, match="no_such_module is not installed"):
        sweep(TuneTarget("mine", "no_such_module"), 16, store=path, **OPTIONS)


def test_budget_is_shared() -> None:
    budget = Budget(100.0, 6, 2)
    assert 30 < budget.share() <= 100 / 3
    for _ in range(4):
        budget.share()
    assert 99 < budget.share() <= 100
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
            visible_gpus(wrong)


def test_statuses_of_faults_are_statuses() -> None:
    assert {*MEASURED.values(), *COMPILED.values()} <= set(STATUSES)

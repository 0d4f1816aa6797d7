"""Whole sweeps without a GPU: a config costs its own trial, and whoever is killed loses the trial
that ran.
"""

import signal
from collections import Counter, defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from support.drivers import Driver
from support.faulty_kernel import COMPILED, MEASURED, Config, notes
from support.in_process import measure_here
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
from outblas.autotune.store.records import Trial
from outblas.autotune.store.store import Store, StoreError
from outblas.autotune.sweeps import tuner
from outblas.autotune.sweeps.sweep import sweep
from outblas.autotune.sweeps.tuner import Job, Outcome
from outblas.core.configs import from_text

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("faulty_log")]


def sweep_and_say(say: Connection, path: Path, **options: Any) -> None:
    """Runs a sweep, and says how far it is."""
    run(path, progress=lambda p: say.send((p.stage, p.screened)), **options)


def test_a_killed_sweep_goes_on_where_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_CONFIGS", "9")
    monkeypatch.setenv("FAULTY_SLEEP", "100")
    kill_when_screened(path, 4)
    before, begun = stored(path), [note.config for note in notes()]
    assert 4 <= len(before) <= len(begun) <= len(before) + 1, "more than the trial that ran is lost"
    screened: list[str] = []

    def report(progress: Progress) -> None:
        if progress.stage == "finals" and not screened:
            screened.extend(note.config for note in notes())

    found = run(path, progress=report)
    (outcome,), after = found.outcomes, stored(path)

    assert [trial for trial in after if trial in before] == before
    assert len({trial.config for trial in after}) == len(after) == 9
    assert outcome.new == 9 - len(before)
    times = Counter(screened)
    assert {config for config in times if times[config] > 1} <= {begun[-1]}, "measured again"
    assert all(times[trial.config] == 1 for trial in before)


def kill_when_screened(path: Path, trials: int) -> None:
    """Kills a sweep that has so many trials; its worker goes with it."""
    with Driver(sweep_and_say, path) as driver:
        for said in driver.said():
            if said == ("screening", trials):
                driver.send(signal.SIGKILL)
        assert driver.wait() == -signal.SIGKILL
    (process,) = {note.process for note in notes()}
    assert soon(lambda: gone(process))


def test_the_winners_of_a_sweep_are_in_its_store(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_here(monkeypatch)

    found = run(path)

    with Store(path) as store:
        assert store.winners() == found.winners
    assert [outcome.winner for outcome in found.outcomes] == found.winners


def by_fault(outcome: Outcome) -> dict[str, list[Trial]]:
    """The trials of a sweep by the faults of their configs; "" is none."""
    found = defaultdict(list)
    for trial in outcome.trials:
        found[from_text(Config, trial.config).fault].append(trial)
    return found


def check_trials(outcome: Outcome, statuses: dict[str, str], figure: str) -> None:
    """Each fault has cost one trial, with its status, a reason and no figure of that name; three
    sound configs have one.
    """
    trials = by_fault(outcome)
    sound = trials.pop("")
    failed = {fault: [trial.status for trial in trials[fault]] for fault in trials}
    assert failed == {fault: [status] for fault, status in statuses.items()}
    assert [trial.status for trial in sound] == ["ok"] * 3
    for trial in outcome.trials:
        has_figure = getattr(trial, figure) is not None
        assert has_figure == (trial.reason == "") == (trial in sound), trial


def test_faults_cost_a_trial_each(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_FAULTS", " ".join(MEASURED))
    monkeypatch.setattr(isolated, "TURNS", 0)  # a trial has 5 s, however slow torch is

    found = run(path, trial_seconds=5.0)

    (outcome,) = found.outcomes
    check_trials(outcome, MEASURED, "us")
    reasons = {fault: trials[0].reason for fault, trials in by_fault(outcome).items()}
    assert "1 of 256 elements" in reasons["wrong"]
    assert reasons == reasons | {
        "hang": "not done in 5 s: the worker was killed",
        "segfault": "the worker died: signal SIGSEGV",
        "exit": "the worker died: exit status 3",
        "raise": "RuntimeError: no luck today",
        "refuse": "fault is refuse, expected another",
    }
    assert (found.finished, found.failures, outcome.new) == (True, [], len(outcome.trials))
    assert from_text(Config, outcome.winner.config).fault == ""


def test_compiles_that_fail_cost_a_trial_each(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as for an H100, in processes of their own that see no GPU, and measured in the
    interpreter.
    """
    monkeypatch.setenv("FAULTY_FAULTS", " ".join(COMPILED))
    job = Job((SUBJECT,), WORKLOAD, top_k=1)
    with (
        MeasureWorker("cpu") as bench,
        Compilers(2, timeout=5.0, memory=6 << 30) as compilers,
        Store(path) as store,
    ):
        outcome = tuner.tune(job, H100, bench, compilers, store)

    check_trials(outcome, COMPILED, "compile_s")
    trials = by_fault(outcome)
    reasons = {fault: trials[fault][0].reason for fault in trials}
    assert reasons == reasons | {
        "compile-segfault": "the compile process ended with -11",
        "compile-memory": "out of memory: the compile process reached its limit",
        "compile-raise": "RuntimeError: no luck today",
    }
    assert outcome.winner.screened == 4  # those that a hang or a crash of the compiler took are not
    assert {note.config for note in notes()} == {trial.config for trial in trials[""]}
    compiling = {note.process for note in notes(".compiled")}
    measuring = {note.process for note in notes()}
    assert {note.visible for note in notes(".compiled")} == {""}
    assert not compiling & measuring
    assert soon(lambda: all(map(gone, compiling | measuring)))


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


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that one config waits for the end of."""
    monkeypatch.setenv("FAULTY_FAULTS", "wait")
    gate = tmp_path / "log.wait"
    gate.touch()
    return gate


def end_while_it_waits(path: Path, number: signal.Signals) -> None:
    """Ends a sweep by a signal while it measures the config that waits; nothing of it is left."""
    begun_before = len(notes())

    def waits() -> bool:
        return any("wait" in note.config for note in notes()[begun_before:])

    with Driver(sweep_and_say, path) as driver:
        assert soon(waits, 120)
        driver.send(number)
        assert driver.wait() != 0
    assert soon(lambda: all(gone(note.process) for note in notes()))


def test_ends_of_sweeps_brand_no_config(path: Path, gate: Path) -> None:
    """One sweep is interrupted while it measures, the next is killed; the third measures it."""
    end_while_it_waits(path, signal.SIGINT)
    end_while_it_waits(path, signal.SIGKILL)
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


@pytest.fixture
def failed_before(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Trial]:
    """The trials of a sweep in which configs failed, by their status; it measures in this
    process.
    """
    measure_here(monkeypatch)
    monkeypatch.setenv("FAULTY_FAULTS", "raise refuse wrong")
    monkeypatch.setenv("FAULTY_CONFIGS", "1")
    run(path, top_k=1)
    return {trial.status: trial for trial in stored(path)}


def test_each_status_is_stored(failed_before: dict[str, Trial]) -> None:
    assert sorted(failed_before) == ["failed", "ok", "refused", "wrong"]


def test_what_was_measured_is_not_measured_again(
    path: Path, failed_before: dict[str, Trial]
) -> None:
    measured = len(notes())

    (outcome,) = run(path, top_k=1).outcomes

    assert (outcome.new, len(outcome.trials), len(stored(path))) == (0, 4, 4)
    assert {note.config for note in notes()[measured:]} <= {failed_before["ok"].config}


def test_what_has_failed_is_measured_anew_where_that_is_asked_for(
    path: Path, failed_before: dict[str, Trial]
) -> None:
    (outcome,) = run(path, top_k=1, retry_failed=True).outcomes

    assert (outcome.new, len(outcome.trials)) == (1, 4)
    anew = outcome.trials[-1]
    assert (anew.status, anew.config) == ("failed", failed_before["failed"].config)
    changed = [trial for trial in stored(path) if trial != failed_before[trial.status]]
    assert changed in ([], [anew])


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


def sweep_for_hours(say: Connection, path: Path) -> None:
    """Runs a sweep whose trials may take hours."""
    sweep_and_say(say, path, trial_seconds=1e4)


def test_an_interrupted_program_leaves_nothing_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTY_FAULTS", "hang")
    with Driver(sweep_for_hours, path) as driver:
        assert soon(lambda: any("hang" in note.config for note in notes()), 120)
        driver.send(signal.SIGINT)
        assert driver.wait() != 0  # nothing but the interrupt ends the trial

    assert soon(lambda: all(gone(note.process) for note in notes()))
    assert [trial.status for trial in stored(path)] == ["ok"]


# ---- disks
def test_a_store_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")

    with pytest.raises(StoreError, match="file"):
        run(tmp_path / "file" / "store.sqlite")

    assert notes() == []


def test_a_disk_that_fills_up_ends_the_sweep_and_keeps_what_was_stored(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_here(monkeypatch)

    def report(progress: Progress) -> None:
        if progress.screened == 1:
            store._connection.execute("PRAGMA max_page_count = 1")  # at most what there is

    with Store(path) as store:
        monkeypatch.setenv("FAULTY_CONFIGS", "200")
        with pytest.raises(StoreError, match="is full; nothing of this was written"):
            run(store, progress=report, top_k=1)

    assert 1 <= len(stored(path)) < 200


# ---- what cannot be had
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

"""What the tuner promises, tested by real faults: drivers and workers that are killed at random
moments, a full disk, two drivers on one store, configs that hang, crash or compute wrong results.

No trial that was acknowledged is lost, no correct config counts as faulty, and no process outlives
its driver. Drivers are forks of this process; their workers are processes of
support/lean_worker.py, which multiply nothing. The environment variable PROMISES is the number of
drivers that are killed, 20 by default; a quarter as many workers are.
"""

import contextlib
import ctypes
import functools
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import lean_worker
from support.faulty_kernel import notes
from support.sweeps import H100, OPTIONS, SUBJECT, WORKLOAD, descendants, gone, soon

from outblas.autotune.measure import isolated
from outblas.autotune.measure.isolated import MeasureWorker
from outblas.autotune.measure.progress import Progress
from outblas.autotune.store.records import Trial
from outblas.autotune.store.store import Store, StoreError
from outblas.autotune.sweeps import engine
from outblas.autotune.sweeps.options import SweepOptions
from outblas.autotune.sweeps.outcome import Job, Outcome
from outblas.autotune.sweeps.sweep import sweep
from outblas.autotune.sweeps.tuner import Tuning
from outblas.base.processes import WorkerProcess

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes"),
    pytest.mark.usefixtures("faulty_log"),
]
KILLS = int(os.environ.get("PROMISES", "20"))
CONFIGS = 30
SUBREAPER = 36  # of prctl


class LeanWorker(MeasureWorker):
    """A measuring worker whose process multiplies nothing."""

    def _call(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
        if function.__name__ == "describe":
            return H100
        lean = getattr(lean_worker, function.__name__)
        if function.__name__ == "screen":
            return super()._call(seconds, lean, arguments[0][1])
        if function.__name__ == "race":
            texts = [text for _, text in arguments[0]]
            return super()._call(seconds, lean, texts, *arguments[1:])
        return super()._call(seconds, lean)


@pytest.fixture(autouse=True)
def lean_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        isolated,
        "WorkerProcess",
        lambda modules, **options: WorkerProcess([lean_worker.__name__], **options),
    )
    monkeypatch.setenv("FAULTY_CONFIGS", str(CONFIGS))
    monkeypatch.setenv("FAULTY_SLEEP", "15")


class AcknowledgingStore(Store):
    """A store that notes in a file each trial whose storing has returned."""

    acknowledged: Path

    def add(self, trial: Trial, *, replace: bool = False) -> bool:
        added = super().add(trial, replace=replace)
        with self.acknowledged.open("a") as file:
            file.write(f"{trial.config}\n")
        return added


def drive(path: Path, *, trial_seconds: float = 20.0, **options: Any) -> Outcome:
    """Tunes all configs, in this process."""
    AcknowledgingStore.acknowledged = path.with_suffix(".acknowledged")
    with (
        AcknowledgingStore(path) as store,
        LeanWorker("cpu", trial_seconds=trial_seconds) as bench,
    ):
        job = Job((SUBJECT,), WORKLOAD, SweepOptions(**options))
        return Tuning(job, H100, bench, None, store).run()


def forked(function: Callable[..., object], *arguments: Any, **options: Any) -> int:
    """Starts a process that calls a function, and ends with status 0, or 7 for a StoreError."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        function(*arguments, **options)
        status = 0
    except StoreError:
        status = 7
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def ended(process: int) -> int:
    """Waits for the end of a process; returns its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.fixture
def running() -> Iterator[Callable[[], list[int]]]:
    """The processes that a test has started and that run; none may outlive it. One that loses its
    parent becomes a child of this process meanwhile.
    """
    prctl = ctypes.CDLL(None).prctl
    others = {*descendants(os.getpid())}

    def started() -> list[int]:
        return [process for process in descendants(os.getpid()) if process not in others]

    def running() -> list[int]:
        return [process for process in started() if not gone(process)]

    prctl(SUBREAPER, 1, 0, 0, 0)
    yield running
    left = [] if soon(lambda: not running()) else running()
    prctl(SUBREAPER, 0, 0, 0, 0)
    for process in left:
        os.kill(process, signal.SIGKILL)
    for process in started():
        with contextlib.suppress(ChildProcessError):  # somebody else's child
            os.waitpid(process, 0)
    assert left == []


def trials(path: Path) -> dict[str, Trial]:
    with Store(path, read_only=True) as store:
        return {trial.config: trial for trial in store.trials()}


def check(path: Path) -> int:
    """All trials that were acknowledged are there, and none failed. Returns their number."""
    stored = trials(path)
    file = path.with_suffix(".acknowledged")
    acknowledged = file.read_text().split() if file.exists() else []
    assert set(acknowledged) <= set(stored)
    assert {trial.status for trial in stored.values()} <= {"ok"}
    return len(stored)


@pytest.mark.usefixtures("running")
def test_killed_drivers_lose_nothing_and_leave_nothing(path: Path) -> None:
    dice, places = random.Random(KILLS), Counter[int]()
    for kill in range(KILLS):
        driver = forked(drive, path)
        time.sleep(dice.uniform(0.0, 1.2))
        below = descendants(driver)
        os.kill(driver, signal.SIGKILL)
        ended(driver)
        ends = (soon(functools.partial(gone, process)) for process in below)
        assert all(ends), f"orphans after kill {kill}"
        places[check(path)] += 1
        if check(path) == CONFIGS:
            for file in path.parent.glob(f"{path.stem}*"):
                file.unlink()

    assert len(places) > min(KILLS, 20) / 4, "all drivers were killed at the same place"
    assert drive(path).finished
    assert check(path) == CONFIGS


def test_no_config_fails_because_workers_are_killed(
    path: Path, running: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes below the driver, workers and their supervisors, are killed as the kernel does."""
    monkeypatch.setenv("FAULTY_SLEEP", "50")
    kills, over = 0, threading.Event()
    dice = random.Random(KILLS)

    def kill_workers() -> None:
        nonlocal kills
        while not over.wait(dice.uniform(0.3, 1.0)):
            if below := running():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(dice.choice(below), signal.SIGKILL)
                    kills += 1

    killer = threading.Thread(target=kill_workers)
    killer.start()
    try:
        for number in range(100):
            outcome = drive(path.with_name(f"{number}.sqlite"))
            assert not outcome.failure
            assert {trial.status for trial in outcome.trials} <= {"ok"}
            assert len(outcome.trials) + len(outcome.unmeasured) == CONFIGS
            if kills >= KILLS / 4:
                break
    finally:
        over.set()
        killer.join()
    print(f"{kills} kills of workers")
    assert kills >= KILLS / 4
    assert drive(path.with_name("last.sqlite")).finished


@pytest.mark.usefixtures("running")
def test_two_drivers_share_a_store(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_SLEEP", "60")
    drivers = [forked(drive, path) for _ in range(2)]

    assert [ended(driver) for driver in drivers] == [0, 0]
    assert check(path) == CONFIGS
    measured = Counter(note.config for note in notes())
    assert set(measured.values()) == {1}, "a config was measured twice"
    assert len({note.process for note in notes()}) == 2, "one driver did all the work"


@pytest.mark.usefixtures("running")
def test_a_full_disk_ends_a_sweep_which_goes_on_when_there_is_room(path: Path) -> None:
    drive(path, trials=2)
    size = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))

    def drive_with_little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 8192, size + 8192))
        drive(path)

    assert ended(forked(drive_with_little_room)) == 7, "no StoreError"
    assert 2 <= check(path) < CONFIGS
    assert drive(path).finished
    assert check(path) == CONFIGS


def test_an_interrupt_ends_a_sweep_and_its_workers(
    path: Path, running: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C does to a program that goes on, and had opened the store itself."""
    monkeypatch.setattr(engine, "MeasureWorker", LeanWorker)

    def interrupt(progress: Progress) -> None:
        if progress.screened == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with Store(path) as store:
        with pytest.raises(KeyboardInterrupt):
            sweep(SUBJECT, 16, store=store, progress=interrupt, **OPTIONS)
        assert soon(lambda: not running())
        count = len(store.trials())
        assert 3 <= count < CONFIGS
        time.sleep(0.3)
        assert len(store.trials()) == count

"""Measuring and compiling under attack: what befalls a process is told apart from what a config
does.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from support import misbehaving
from support.drivers import Driver
from support.faulty_kernel import Config, notes
from support.misbehaving import RAISED
from support.sweeps import WORKLOAD, gone, soon

from outblas.autotune.measure import isolated
from outblas.autotune.measure.compile_pool import Compilers, Failure, outcome
from outblas.autotune.measure.isolated import MeasureWorker, WorkerDied
from outblas.autotune.measure.worker import Screened
from outblas.autotune.search.target import TuneTarget
from outblas.core.configs import to_text

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes"),
    pytest.mark.usefixtures("own_notes"),
]
MISBEHAVING = TuneTarget("misbehaving", "support.misbehaving")


@pytest.fixture(scope="module")
def notes_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the kernel takes its notes, in all processes that these tests start and share."""
    folder = tmp_path_factory.mktemp("supervision")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULTY_LOG", str(folder / "log"))
        yield folder


@pytest.fixture
def own_notes(notes_folder: Path) -> None:
    """Removes the notes that other tests have caused."""
    for file in notes_folder.iterdir():
        file.unlink()


@pytest.fixture(scope="module")
def bench(notes_folder: Path) -> Iterator[MeasureWorker]:
    """What measures on the CPU: its process is another one after a test that has it killed."""
    with MeasureWorker("cpu") as bench:
        yield bench


@pytest.fixture(scope="module")
def compilers(notes_folder: Path) -> Iterator[Compilers]:
    """One process that compiles, which is another one after a test that has it killed."""
    with Compilers(1) as compilers:
        yield compilers


def screened(bench: MeasureWorker, fault: str = "", sleep: int = 0) -> Screened:
    """What is found of a config that sleeps so many milliseconds. Raises WorkerDied."""
    return bench.screen(WORKLOAD, (MISBEHAVING, to_text(Config(sleep=sleep, fault=fault))), None)


def submitted(compilers: Compilers, fault: str = "", **config: int) -> Future[float]:
    """A compile that was asked for."""
    return compilers.submit(MISBEHAVING, WORKLOAD, to_text(Config(fault=fault, **config)), 90)


def compiled(compilers: Compilers, fault: str = "") -> tuple[Failure, str] | None:
    """What went wrong with a compile."""
    future = submitted(compilers, fault)
    future.exception(timeout=60)
    return outcome(future)


def measuring() -> list[int]:
    """The processes that have begun to measure a config in this test, in order."""
    return [note.process for note in notes()]


def compiling() -> list[int]:
    """The processes that have begun a compile in this test, in order."""
    return [note.process for note in notes(".compiled")]


# ---- what a config raises
@pytest.mark.parametrize("fault", RAISED)
def test_whatever_a_config_raises_costs_its_trial(bench: MeasureWorker, fault: str) -> None:
    found = screened(bench, fault)

    assert (found.status, type(found.reason)) == ("failed", str)


@pytest.mark.parametrize("fault", RAISED)
def test_whatever_a_config_raises_its_worker_goes_on(bench: MeasureWorker, fault: str) -> None:
    screened(bench, fault)

    assert screened(bench).status == "ok"
    first, second = measuring()
    assert first == second


@pytest.mark.parametrize("fault", RAISED)
def test_whatever_a_compile_raises_costs_its_trial(compilers: Compilers, fault: str) -> None:
    found = compiled(compilers, f"compile-{fault}")

    assert found is not None
    assert (found[0], type(found[1])) == ("failed", str)


@pytest.mark.parametrize("fault", RAISED)
def test_whatever_a_compile_raises_its_process_goes_on(compilers: Compilers, fault: str) -> None:
    compiled(compilers, f"compile-{fault}")

    assert compiled(compilers) is None
    first, second = compiling()
    assert first == second


def test_a_config_that_ends_python_costs_its_trial_and_not_the_worker(bench: MeasureWorker) -> None:
    found = screened(bench, "quit")

    assert (found.status, found.reason) == ("failed", "SystemExit: 3")
    assert not gone(measuring()[0])


def test_a_compile_whose_error_cannot_be_unpickled_is_told(compilers: Compilers) -> None:
    assert compiled(compilers, "compile-odd") == ("failed", "OddError: cannot be unpickled")


# ---- ends when nothing is asked
def test_a_worker_that_ends_after_a_trial_costs_no_trial(bench: MeasureWorker) -> None:
    before = screened(bench, "exit-idle")
    ended = soon(lambda: gone(measuring()[0]))
    after = screened(bench)

    assert ended
    assert (before.status, after.status) == ("ok", "ok")
    assert measuring()[0] != measuring()[1]


# ---- ends from outside
def test_a_compile_that_is_killed_is_tried_in_another_process(compilers: Compilers) -> None:
    assert compiled(compilers, "compile-sigkill-once") is None

    first, second = compiling()
    assert first != second


def test_a_compile_that_is_killed_again_is_given_up(compilers: Compilers) -> None:
    found = compiled(compilers, "compile-sigkill")

    assert found is not None
    assert found[0] == "killed"
    assert "2 times: signal SIGKILL" in found[1]
    first, second = compiling()
    assert first != second


def test_an_idle_compile_process_that_is_killed_is_replaced(compilers: Compilers) -> None:
    compiled(compilers)
    (killed,) = compiling()

    os.kill(killed, signal.SIGKILL)
    assert soon(lambda: gone(killed))
    futures = [submitted(compilers, number=number, sleep=300) for number in (1, 2)]

    assert all(future.result(60) > 0.2 for future in futures)
    assert killed not in compiling()[1:]


def test_a_worker_killed_from_outside_says_nothing_about_the_config(bench: MeasureWorker) -> None:
    with pytest.raises(WorkerDied, match="signal SIGTERM") as death:
        screened(bench, "sigterm")

    assert death.value.status == "killed"


# ---- clocks
@pytest.fixture
def jump_soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Has the wall clock of this process jump by so many seconds, in half a second from now."""
    honest = time.time
    jumps: list[float] = []
    timers: list[threading.Timer] = []
    monkeypatch.setattr(time, "time", lambda: honest() + sum(jumps))

    def jump_soon(seconds: float) -> None:
        timers.append(threading.Timer(0.5, jumps.append, [seconds]))
        timers[-1].start()

    yield jump_soon
    for timer in timers:
        timer.cancel()


def test_a_clock_that_jumps_on_makes_no_sound_config_hang(
    bench: MeasureWorker, jump_soon: Callable[[float], None]
) -> None:
    bench.open(WORKLOAD)

    jump_soon(3600.0)
    found = screened(bench, sleep=1000)

    assert found.status == "ok"


def test_a_clock_that_jumps_back_lets_no_config_hang_on(
    monkeypatch: pytest.MonkeyPatch, jump_soon: Callable[[float], None]
) -> None:
    monkeypatch.setattr(isolated, "TURNS", 0)  # a trial has one second, however slow torch is
    with MeasureWorker("cpu", trial_seconds=1.0) as bench, ThreadPoolExecutor(1) as thread:
        bench.open(WORKLOAD)
        jump_soon(-3600.0)
        hung = thread.submit(screened, bench, "hang")
        try:
            with pytest.raises(WorkerDied) as death:
                hung.result(20)
        finally:
            bench.cancel()

    assert death.value.status == "hang"


# ---- starts
def test_a_worker_that_hangs_at_its_start_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(isolated, "START_SECONDS", 0.5)
    bench = MeasureWorker("cpu")

    with ThreadPoolExecutor(1) as thread:
        described = thread.submit(bench.describe)
        try:
            with pytest.raises(WorkerDied, match="no worker process can be started"):
                described.result(20)
        finally:
            bench.cancel()


# ---- the driver's death
def compile_and_measure(say: Connection) -> None:
    """Has a compile leave children that ignore signals, and a worker hold Python's lock."""
    with MeasureWorker("cpu") as bench, Compilers(1) as compilers:
        submitted(compilers, "compile-children")
        screened(bench, "gil")


def test_nothing_survives_the_driver() -> None:
    with Driver(compile_and_measure) as driver:
        assert soon(lambda: len(measuring()) == 1 and len(misbehaving.children()) == 2, 60)
        time.sleep(0.3)  # for the worker to take the lock
        processes = {*measuring(), *compiling(), *misbehaving.children()}

        driver.send(signal.SIGKILL)
        driver.wait(10)
        ended = soon(lambda: all(map(gone, processes)), 5)

    for process in processes:
        if not gone(process):
            os.kill(process, signal.SIGKILL)
    assert len(processes) == 4
    assert ended

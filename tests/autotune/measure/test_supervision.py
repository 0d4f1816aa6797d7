"""Measuring and compiling under attack: what befalls a process is told apart from what a config
does.
"""

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import misbehaving
from support.faulty_kernel import Config, notes
from support.misbehaving import RAISED
from support.sweeps import WORKLOAD, gone, soon, start

from outblas.autotune.measure import isolated
from outblas.autotune.measure.compile_pool import Compilers, outcome
from outblas.autotune.measure.isolated import MeasureWorker, WorkerDied
from outblas.autotune.search.target import TuneTarget
from outblas.core.configs import to_text

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes"),
]
SUBJECT = TuneTarget("misbehaving", "support.misbehaving")


@pytest.fixture(scope="module", autouse=True)
def _log(tmp_path_factory: pytest.TempPathFactory):
    """Of all tests here: they share processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULTY_LOG", str(tmp_path_factory.mktemp("supervision") / "log"))
        yield


@pytest.fixture(scope="module")
def bench():
    with MeasureWorker("cpu") as bench:
        yield bench


@pytest.fixture(scope="module")
def compilers():
    with Compilers(1) as compilers:
        yield compilers


def screened(bench, fault="", **config):
    return bench.screen(WORKLOAD, (SUBJECT, to_text(Config(fault=fault, **config))), None)


def submitted(compilers, fault="", **config):
    return compilers.submit(SUBJECT, WORKLOAD, to_text(Config(fault=fault, **config)), 90)


def compiled(compilers, fault="", **config):
    """What went wrong with a compile."""
    future = submitted(compilers, fault, **config)
    future.exception(timeout=60)
    return outcome(future)


def compiling():
    """The processes that have begun a compile, in order."""
    return [note.process for note in notes(".compiled")]


# What a config raises.
@pytest.mark.parametrize("fault", RAISED)
def test_whatever_a_config_raises_costs_its_trial(bench, fault) -> None:
    assert screened(bench).status == "ok"
    process = notes()[-1].process

    found = screened(bench, fault)

    assert found.status == "failed"
    assert type(found.reason) is str
    assert screened(bench).status == "ok"
    assert notes()[-1].process == process


@pytest.mark.parametrize("fault", RAISED)
def test_whatever_a_compile_raises_costs_its_trial(compilers, fault) -> None:
    assert compiled(compilers) is None

    status, reason = compiled(compilers, f"compile-{fault}")

    assert (status, type(reason)) == ("failed", str)
    assert compiled(compilers) is None
    assert len(set(compiling()[-3:])) == 1, "the compile process is another one"


# Ends from outside.
def test_a_killed_compile_is_tried_once_more(compilers) -> None:
    assert compiled(compilers, "compile-sigkill-once") is None
    assert compiling()[-1] != compiling()[-2]
    status, reason = compiled(compilers, "compile-sigkill")
    assert status == "killed"
    assert "2 times: signal SIGKILL" in reason
    assert compiling()[-1] != compiling()[-2]


def test_an_idle_compile_process_that_is_killed_is_replaced(compilers) -> None:
    assert compiled(compilers) is None
    process = compiling()[-1]
    os.kill(process, signal.SIGKILL)
    assert soon(lambda: gone(process))
    futures = [submitted(compilers, number=number, sleep=300) for number in (1, 2)]
    assert all(future.result(60) > 0.2 for future in futures)
    assert process not in compiling()[-2:]


def test_a_worker_killed_from_outside_says_nothing_about_the_config(bench) -> None:
    with pytest.raises(WorkerDied, match="signal SIGTERM") as death:
        screened(bench, "sigterm")
    assert death.value.status == "killed"


# Clocks.
@pytest.mark.parametrize("hours", [1, -1])
def test_the_wall_clock_jumps(bench, hours, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour on makes no sound config hang, and an hour back lets no hanging one go on."""
    bench.open(WORKLOAD)
    honest, jumped = time.time, threading.Event()
    monkeypatch.setattr(time, "time", lambda: honest() + (3600 * hours if jumped.is_set() else 0))
    monkeypatch.setattr(isolated, "TURNS", 0)
    threading.Timer(0.5, jumped.set).start()
    if hours > 0:
        assert screened(bench, sleep=1500).status == "ok"
        return
    monkeypatch.setattr(bench, "_trial_seconds", 1.5)
    with ThreadPoolExecutor(1) as thread:
        hung = thread.submit(screened, bench, "hang")
        try:
            with pytest.raises(WorkerDied) as death:
                hung.result(20)
        finally:
            bench._process.kill() if bench._process else None
    assert death.value.status == "hang"


# Starts.
def test_a_worker_that_hangs_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(isolated, "START_SECONDS", 0.5)
    bench = MeasureWorker("cpu")
    with ThreadPoolExecutor(1) as thread:
        described = thread.submit(bench.describe)
        try:
            with pytest.raises(WorkerDied, match="no worker can be started"):
                described.result(20)
        finally:
            bench.cancel()


# The driver's death.
def test_nothing_survives_the_driver(path: Path) -> None:
    """Of a worker that holds Python's lock, and a compile with children that ignore signals."""
    code = f"""
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_supervision import submitted, screened, MeasureWorker, Compilers
with MeasureWorker("cpu") as bench, Compilers(1) as compilers:
    submitted(compilers, "compile-children")
    screened(bench, "gil")
"""
    log = len(notes()), len(notes(".compiled"))
    with start(code, path) as driver:
        assert soon(lambda: len(notes()) > log[0] and len(misbehaving.children()) == 2, 60)
        time.sleep(0.3)
        driver.kill()
        driver.wait(10)
        processes = {notes()[-1].process, *compiling()[log[1] :], *misbehaving.children()}
        ended = soon(lambda: all(map(gone, processes)), 5)
        for process in processes:
            if not gone(process):
                os.kill(process, signal.SIGKILL)
    assert len(processes) == 4
    assert ended

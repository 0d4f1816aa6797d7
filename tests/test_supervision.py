"""Supervision of measuring and compiling processes: what befalls them is told apart from what a config does."""

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import misbehaving
import pytest
from faulty_kernel import Config, notes
from misbehaving import RAISED, SIGNALS
from sweeps import WORKLOAD, gone, soon, start

from outblas.autotune import isolated
from outblas.autotune.compilers import Compilers, outcome
from outblas.autotune.isolated import Bench, Down
from outblas.autotune.subjects import Subject
from outblas.configs import to_text

pytestmark = [
    pytest.mark.usefixtures("faulty_log"),
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes"),
]
SUBJECT = Subject("misbehaving", "misbehaving")


def screened(bench, fault="", **config):
    return bench.screen(WORKLOAD, (SUBJECT, to_text(Config(fault=fault, **config))), None)


def submitted(compilers, fault="", **config):
    return compilers.submit(SUBJECT, WORKLOAD, to_text(Config(fault=fault, **config)), 90)


def compiled(compilers, fault="", **config):
    """What went wrong with a compile."""
    future = submitted(compilers, fault, **config)
    future.exception(timeout=60)
    return outcome(future)


def compiling_processes():
    return [note.process for note in notes(".compiled")]


@pytest.fixture(scope="module")
def bench():
    with Bench("cpu") as bench:
        yield bench


# What a config raises.
@pytest.mark.parametrize("fault", RAISED)
def test_whatever_a_config_raises_costs_its_trial(bench, fault):
    found = screened(bench, fault)
    assert found.status == "failed"
    assert type(found.reason) is str
    assert screened(bench).status == "ok"


def test_whatever_a_compile_raises_costs_its_trial():
    with Compilers(1) as compilers:
        for number, fault in enumerate(RAISED):
            status, reason = compiled(compilers, f"compile-{fault}", number=number)
            assert (status, type(reason)) == ("failed", str), fault
        assert compiled(compilers) is None
    assert len(set(compiling_processes())) == 1


# Signals from outside.
@pytest.mark.parametrize("fault", SIGNALS)
def test_a_worker_killed_from_outside_says_nothing_about_the_config(bench, fault):
    with pytest.raises(Down, match=f"signal {SIGNALS[fault].name}") as down:
        screened(bench, fault)
    assert down.value.status == "killed"


def test_a_killed_compile_is_tried_once_more():
    with Compilers(1) as compilers:
        assert compiled(compilers, "compile-sigkill-once") is None
        status, reason = compiled(compilers, "compile-sigkill")
        assert status == "killed"
        assert "SIGKILL" in reason
        assert compiled(compilers) is None
    configs = [note.config for note in notes(".compiled")]
    assert [configs.count(config) for config in dict.fromkeys(configs)] == [2, 2, 1]


def test_an_idle_compile_process_that_is_killed_is_replaced():
    with Compilers(1) as compilers:
        assert compiled(compilers) is None
        (process,) = compiling_processes()
        os.kill(process, signal.SIGKILL)
        assert soon(lambda: gone(process))
        time.sleep(0.5)
        for number in (1, 2):
            future = submitted(compilers, number=number, sleep=1)
            assert future.result(60) > 0
    assert len(notes(".compiled")) == 3


def test_one_compile_process_of_two_is_killed():
    with Compilers(2) as compilers:
        futures = [submitted(compilers, number=number, sleep=300) for number in range(2)]
        assert soon(lambda: len(compiling_processes()) == 2)
        os.kill(compiling_processes()[0], signal.SIGKILL)
        futures += [submitted(compilers, number=number, sleep=300) for number in range(2, 6)]
        assert [outcome(future) for future in futures if future.exception(60) is None] == [None] * 6
        assert all(future.result() > 0.2 for future in futures)
    assert len(set(compiling_processes())) == 3


# Clocks.
@pytest.mark.parametrize("hours", [1, -1])
def test_the_wall_clock_jumps(bench, hours, monkeypatch):
    """A config that takes two seconds of twenty is sound, and one that hangs is found to."""
    bench.open(WORKLOAD)
    honest, jumped = time.time, threading.Event()
    monkeypatch.setattr(time, "time", lambda: honest() + (3600 * hours if jumped.is_set() else 0))
    monkeypatch.setattr(isolated, "TURNS", 0)
    threading.Timer(1.0, jumped.set).start()
    assert screened(bench, sleep=2000).status == "ok"
    jumped.clear()
    threading.Timer(1.0, jumped.set).start()
    monkeypatch.setattr(bench, "_trial_seconds", 3.0)
    with ThreadPoolExecutor(1) as thread:
        hung = thread.submit(screened, bench, "hang")
        try:
            with pytest.raises(Down) as down:
                hung.result(20)
        finally:
            bench.abandon()
            bench._abandoned = False
    assert down.value.status == "hang"


# Starts.
@pytest.fixture
def stuck_start(tmp_path, monkeypatch):
    """Every Python that starts hangs while it starts."""
    folder = tmp_path / "stuck"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.usefixtures("stuck_start")
def test_a_worker_that_hangs_at_start(monkeypatch):
    monkeypatch.setattr(isolated, "START_SECONDS", 1.0)
    bench = Bench("cpu")
    with ThreadPoolExecutor(1) as thread:
        described = thread.submit(bench.describe)
        try:
            with pytest.raises(Down, match="no worker can be started"):
                described.result(20)
        finally:
            bench.abandon()


# The driver's own program.
def test_the_main_module_stays_where_it_is():
    main, seen, done = sys.modules["__main__"], [], threading.Event()

    def watch():
        while not done.is_set():
            if sys.modules["__main__"] is not main:
                seen.append(sys.modules["__main__"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    with Bench("cpu") as bench:
        bench.describe()
        done.set()
    watcher.join()
    assert seen == []


# The driver's death.
@pytest.mark.parametrize("fault", ["gil", "children", "compile-gil", "compile-children"])
def test_nothing_survives_the_driver(fault, path):
    code = f"""
from test_supervision import SUBJECT, compiled, screened, Bench, Compilers
with Bench("cpu") as bench, Compilers(1) as compilers:
    compiled(compilers, {fault!r}) if "compile" in {fault!r} else screened(bench, {fault!r})
"""
    log = ".compiled" if "compile" in fault else ""
    with start(code, path) as driver:
        assert soon(lambda: notes(log) and ("gil" in fault or len(misbehaving.children()) == 2), 60)
        time.sleep(0.3)
        driver.kill()
        driver.wait(10)
        processes = {note.process for note in notes(log)} | set(misbehaving.children())
        ended = soon(lambda: all(map(gone, processes)), 5)
        for process in processes:
            if not gone(process):
                os.kill(process, signal.SIGKILL)
    assert ended


def test_children_of_a_worker_end_with_it():
    with Bench("cpu", trial_seconds=3.0) as bench:
        bench.open(WORKLOAD)
        bench.cublas_us = 0.0
        with pytest.raises(Down) as down:
            screened(bench, "children")
        assert down.value.status == "hang"
        assert len(misbehaving.children()) == 2
        assert soon(lambda: all(map(gone, misbehaving.children())), 5)


# Memory.
def test_a_config_that_eats_memory_is_stopped_by_its_bound():
    with Bench("cpu", memory=2 << 30) as bench:
        with pytest.raises(Down, match=r"2\.0 GiB") as down:
            screened(bench, "eat")
        assert down.value.status == "out of memory"
        assert screened(bench).status == "ok"


def test_a_compile_that_eats_memory_is_stopped_by_its_bound():
    with Compilers(1, memory=2 << 30) as compilers:
        status, reason = compiled(compilers, "compile-eat")
        assert (status, reason.startswith("out of memory")) == ("compile crash", True)

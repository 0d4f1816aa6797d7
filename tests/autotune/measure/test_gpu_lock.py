"""The lock on a GPU: sweeps in several processes take turns, and nobody who is killed or stuck
holds up the others.
"""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

import filelock
import pytest
from support.sweeps import soon

from outblas.autotune.measure import gpu_lock, isolated
from outblas.autotune.measure.gpu_lock import GpuLock, LockCancelled
from outblas.autotune.measure.isolated import Cancelled, MeasureWorker
from outblas.core import cache

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes"),
]

# A driver without torch: it takes the lock again and again for a short trial each, as sweeps do,
# and notes who had it.
DRIVER = f"""
import importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("gpu_lock", {gpu_lock.__file__!r})
gpu_lock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu_lock)
from pathlib import Path
lock, log, go, what = gpu_lock.GpuLock(Path(sys.argv[1])), sys.argv[2], sys.argv[3], sys.argv[4]
print("ready", flush=True)
while not os.path.exists(go):
    time.sleep(0.01)
while True:
    with lock.hold(60) as reason, open(log, "a", buffering=1) as notes:
        assert not reason
        if len(Path(log).read_text().split()) >= int(sys.argv[5]):
            sys.exit()
        notes.write(f"{{os.getpid()}}\\n")
        if what == "keep":
            time.sleep(1000)
        time.sleep(0.005)
"""


@pytest.fixture
def driver(tmp_path: Path):
    """Starts drivers, which begin together."""
    drivers = []

    def start(what="", trials=60):
        arguments = [tmp_path / "gpu.lock", tmp_path / "log", tmp_path / "go", what, trials]
        command = [sys.executable, "-c", DRIVER, *map(str, arguments)]
        drivers.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        return drivers[-1]

    yield start
    for process in drivers:
        process.kill()
        process.wait()
        process.stdout.close()


def begin(folder, drivers) -> None:
    for process in drivers:
        assert process.stdout.readline() == b"ready\n"
    (folder / "go").touch()


def log(folder):
    file = folder / "log"
    return file.read_text().split() if file.exists() else []


def is_taken(lock: filelock.BaseFileLock) -> bool:
    """Whether another holds a lock; it is as free afterwards as before."""
    if not gpu_lock._try(lock):
        return True
    lock.release()
    return False


def test_ten_drivers_share_a_gpu(driver, tmp_path: Path) -> None:
    drivers = [driver(trials=120) for _ in range(10)]
    begin(tmp_path, drivers)
    for process in drivers:
        assert process.wait(50) == 0
    turns = log(tmp_path)
    assert len(turns) == 120
    assert len(Counter(turns)) == 10
    assert sum(one == other for one, other in itertools.pairwise(turns)) < 40


def test_a_driver_that_is_killed_frees_the_lock(driver, tmp_path: Path) -> None:
    """Whoever holds it, and whoever is next."""
    holder = driver("keep")
    begin(tmp_path, [holder])
    assert soon(lambda: log(tmp_path))
    following = driver()
    begin(tmp_path, [following])
    turnstile = filelock.FileLock(tmp_path / "gpu.lock.next")
    assert soon(lambda: is_taken(turnstile))
    following.kill()
    holder.kill()
    with GpuLock(tmp_path / "gpu.lock").hold(20) as reason:
        assert reason == ""


def test_a_driver_that_is_stuck_is_passed_by_and_that_is_said(driver, tmp_path: Path) -> None:
    holder = driver("keep")
    begin(tmp_path, [holder])
    assert soon(lambda: log(tmp_path))
    os.kill(holder.pid, signal.SIGSTOP)
    lock = GpuLock(tmp_path / "gpu.lock")
    with lock.hold(0.3) as reason:
        assert reason == "another process has held the lock of the GPU for 0.3 s"
    holder.kill()
    with lock.hold(20) as reason:
        assert reason == ""


def test_a_stuck_turnstile_does_not_keep_the_gpu(tmp_path: Path) -> None:
    with (
        filelock.FileLock(tmp_path / "gpu.lock.next"),
        GpuLock(tmp_path / "gpu.lock").hold(0.2) as reason,
    ):
        assert reason == ""


def test_threads_of_one_process_take_turns(tmp_path: Path) -> None:
    inside, most = [], []

    def run():
        lock = GpuLock(tmp_path / "gpu.lock")
        for _ in range(5):
            with lock.hold(30) as reason:
                assert reason == ""
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.002)
                inside.pop()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == [1] * 20


def test_the_lock_is_free_after_an_error(tmp_path: Path) -> None:
    lock = GpuLock(tmp_path / "gpu.lock")
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), lock.hold(5):
            raise error
    with GpuLock(tmp_path / "gpu.lock").hold(1) as reason:
        assert reason == ""


def test_waiting_can_be_cancelled(tmp_path: Path) -> None:
    holder, other = (GpuLock(tmp_path / "gpu.lock") for _ in range(2))
    with holder.hold(5), pytest.raises(LockCancelled), other.hold(900, lambda: True):
        pytest.fail("it has the lock")


# As a bench uses it.
@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_bench_that_measures_without_the_lock_says_so_once(
    folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "LOCK_SECONDS", 0.1)
    bench = MeasureWorker("0")
    with bench._locked():
        assert bench.unlocked == ""
        other = MeasureWorker("0")
        with (
            pytest.warns(RuntimeWarning, match="GPU 0 is measured without its lock"),
            other._locked(),
        ):
            pass
        with warnings.catch_warnings(record=True) as warned, other._locked():
            pass
    assert warned == []
    assert "another process has held" in other.unlocked


def test_a_bench_says_where_locks_cannot_be_had(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "unusable_reason", lambda path: f"{path} can be written by others")
    with (
        pytest.warns(RuntimeWarning, match="the lock cannot be used: .* can be written by others"),
        MeasureWorker("0")._locked(),
    ):
        pass
    monkeypatch.undo()
    monkeypatch.setattr(filelock.FileLock, "acquire", _no_locks)
    bench = MeasureWorker("0")
    with pytest.warns(RuntimeWarning, match="the lock cannot be used"), bench._locked():
        pass


def _no_locks(*_, **__) -> None:
    raise OSError(38, "Function not implemented")


@pytest.mark.usefixtures("folder")
def test_a_bench_that_is_abandoned_does_not_wait_for_the_lock() -> None:
    bench, other = MeasureWorker("0"), MeasureWorker("0")
    with bench._locked():
        threading.Timer(0.2, other.cancel).start()
        with pytest.raises(Cancelled), other._locked():
            pytest.fail("it has the lock")

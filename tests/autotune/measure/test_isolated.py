"""The driver's side of a measuring worker: what the end of its process says about a config, and
that nobody waits for what is gone.
"""

import itertools
import threading
import time
from pathlib import Path

import filelock
import pytest
from support.fake_process import FakeProcesses
from support.faulty_kernel import Config
from support.sweeps import H100, SUBJECT, WORKLOAD, run, soon

from outblas.autotune.measure import isolated, worker
from outblas.autotune.measure.isolated import Cancelled, MeasureWorker, WorkerDied
from outblas.autotune.measure.worker import Screened
from outblas.base import cache
from outblas.base.configs import to_text
from outblas.base.processes import START_SECONDS

pytest_plugins = ("support.fake_process",)

pytestmark = pytest.mark.usefixtures("faulty_log")


def screened(bench: MeasureWorker) -> Screened:
    """What a worker finds of a config. Raises WorkerDied."""
    return bench.screen(WORKLOAD, (SUBJECT, to_text(Config())), None)


# ---- the import of a kernel
def test_the_import_of_a_kernel_is_no_part_of_a_trial(processes: FakeProcesses) -> None:
    """The first trial of each worker would otherwise count as a hang where a DSL takes long to
    import.
    """
    bench = MeasureWorker("cpu", trial_seconds=3)
    assert screened(bench).status == "ok"
    assert processes.limits[worker.load] == START_SECONDS > processes.limits[worker.screen]

    bench.stop()
    processes.unloadable = True
    for _ in range(2):
        with pytest.raises(WorkerDied, match="faulty cannot be imported: a bad day") as death:
            screened(bench)
        assert death.value.status == "killed", "a config is called guilty"
    assert processes.started == 2, "a worker was started for a kernel that cannot be imported"


# ---- processes that are played
def test_a_worker_that_is_gone_before_a_trial_is_replaced(processes: FakeProcesses) -> None:
    bench = MeasureWorker("cpu")
    bench.open(WORKLOAD)
    processes.endings = ["idle"]

    assert screened(bench).status == "ok"
    assert processes.calls.count(worker.open_bench) == 2


@pytest.mark.parametrize("status", ["hang", "crash", "killed"])
def test_what_the_end_of_a_worker_says_about_its_config(
    processes: FakeProcesses, status: str
) -> None:
    bench = MeasureWorker("cpu")
    bench.open(WORKLOAD)
    processes.endings = [status]

    with pytest.raises(WorkerDied) as death:
        screened(bench)

    assert death.value.status == status
    assert screened(bench).status == "ok", "the next trial has a new worker"


def test_a_worker_in_which_a_finalist_raises_is_not_trusted(processes: FakeProcesses) -> None:
    bench = MeasureWorker("cpu")
    bench.open(WORKLOAD)
    processes.endings = ["raises"]

    with pytest.raises(WorkerDied, match="ValueError: no luck") as death:
        bench.race(WORKLOAD, [(SUBJECT, to_text(Config()))], 6)

    assert death.value.status == "crash"
    assert screened(bench).status == "ok"
    assert processes.started == 2


def test_operands_that_take_a_worker_down_are_no_configs_fault(processes: FakeProcesses) -> None:
    """As when another process has taken the GPU's memory meanwhile."""
    processes.endings = ["crash", "crash"]
    with pytest.raises(WorkerDied) as death:
        screened(MeasureWorker("cpu"))
    assert death.value.status == "killed"

    with pytest.raises(WorkerDied) as death:
        MeasureWorker("cpu").open(WORKLOAD)
    assert death.value.status == "crash"


def test_that_no_worker_can_be_started_is_no_configs_fault(
    processes: FakeProcesses, path: Path
) -> None:
    processes.unready = 100

    with pytest.raises(WorkerDied, match="no worker process can be started: no luck"):
        MeasureWorker("cpu").describe()
    with pytest.raises(WorkerDied) as death:
        screened(MeasureWorker("cpu"))
    assert death.value.status == "killed"
    (failure,) = run(path).failures
    assert failure.workload == WORKLOAD


def test_who_waits_for_a_worker_is_released_when_it_is_cancelled(processes: FakeProcesses) -> None:
    processes.stuck = True
    bench = MeasureWorker("cpu")
    released = threading.Event()

    def await_description() -> None:
        with pytest.raises(Cancelled):
            bench.describe()
        released.set()

    threading.Thread(target=await_description, daemon=True).start()
    assert soon(lambda: len(processes.calls) == 1)
    bench.cancel()

    assert released.wait(5)
    with pytest.raises(Cancelled):
        bench.describe()
    assert processes.started == 1


# ---- the lock of a GPU
def test_drivers_take_turns_on_a_gpu(processes: FakeProcesses) -> None:
    """Even one that asks again at once lets another have its turn."""
    benches = [MeasureWorker("0"), MeasureWorker("0")]
    turns: list[int] = []

    def measure(number: int) -> None:
        for _ in range(10):
            with benches[number]._locked():
                turns.append(number)
                time.sleep(0.01)

    threads = [threading.Thread(target=measure, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(turns) == 20
    assert sum(a != b for a, b in itertools.pairwise(turns)) >= 5


def test_who_waits_for_a_gpu_is_released_when_it_is_cancelled(processes: FakeProcesses) -> None:
    bench = MeasureWorker("0")
    with filelock.FileLock(cache.directory() / "gpu-0.lock"):
        threading.Timer(0.1, bench.cancel).start()
        with pytest.raises(Cancelled):
            bench.open(WORKLOAD)
    assert processes.started == 0


@pytest.mark.filterwarnings("ignore:outblas. GPU 0 is measured without its lock")
def test_a_gpu_is_measured_without_its_lock_where_it_cannot_be_had(
    processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(isolated, "LOCK_SECONDS", 0.1)
    with filelock.FileLock(cache.directory() / "gpu-0.lock"):
        bench = MeasureWorker("0")
        assert bench.describe() == H100
        bench.open(WORKLOAD)
    assert "has held the lock of the GPU" in bench.unlocked

    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(file / "cache"))
    bench = MeasureWorker("0")
    bench.open(WORKLOAD)
    assert "the lock cannot be used" in bench.unlocked

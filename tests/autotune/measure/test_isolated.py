"""The driver's side of a measuring worker: what the end of its process says about a config, and
that nobody waits for what is gone. test_supervision.py has real processes under attack.
"""

import threading
from pathlib import Path

import pytest
from support.fake_process import BEFORE, DURING, FakeProcesses
from support.faulty_kernel import Config
from support.sweeps import H100, SUBJECT, WORKLOAD, run, soon

from outblas.autotune.measure import isolated, worker
from outblas.autotune.measure.isolated import MeasureWorker, WorkerDied
from outblas.autotune.measure.worker import Screened
from outblas.autotune.search.target import TuneTarget
from outblas.core.configs import to_text

pytest_plugins = ("support.process_fixtures",)

pytestmark = pytest.mark.usefixtures("faulty_log")
SLOW_IMPORT = TuneTarget("slow", "support.slow_import")


def screened(bench: MeasureWorker, target: TuneTarget = SUBJECT, number: int = 0) -> Screened:
    """What a worker finds of a config. Raises WorkerDied."""
    return bench.screen(WORKLOAD, (target, to_text(Config(number=number))), None)


def death_in_screening(bench: MeasureWorker, target: TuneTarget = SUBJECT) -> WorkerDied:
    """How a worker ends that screens a config."""
    with pytest.raises(WorkerDied) as death:
        screened(bench, target)
    return death.value


# ---- the import of a kernel, in real processes
@pytest.mark.long
def test_the_import_of_a_kernel_is_no_part_of_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first trial of each worker would otherwise count as a hang where a DSL takes long to
    import.
    """
    monkeypatch.setenv("SLOW_IMPORT", "4")
    with MeasureWorker("cpu", trial_seconds=3) as bench:
        found = [screened(bench, SLOW_IMPORT, number) for number in range(2)]
        bench.stop()
        found.append(screened(bench, SLOW_IMPORT))

    assert [each.status for each in found] == ["ok"] * 3


@pytest.mark.long
def test_a_kernel_whose_import_ends_the_worker_brands_no_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLOW_IMPORT_CRASHES", "1")
    with MeasureWorker("cpu") as bench:
        deaths = [death_in_screening(bench, SLOW_IMPORT) for _ in range(2)]
        restarts = bench.restarts

    assert [death.status for death in deaths] == ["killed", "killed"]
    for death in deaths:
        assert "slow cannot be imported: the worker died: signal SIGABRT" in str(death)
    assert restarts == 1, "a worker was started for a kernel that cannot be imported"


# ---- workers that are gone before a call
@pytest.mark.parametrize("how", BEFORE)
def test_a_worker_that_is_gone_before_a_call_is_replaced(
    processes: FakeProcesses, how: str
) -> None:
    bench = MeasureWorker("cpu")
    processes.endings = [BEFORE[how]]

    assert bench.describe() == H100
    assert bench.restarts == 1


@pytest.mark.parametrize("how", BEFORE)
def test_the_operands_of_a_worker_that_is_gone_before_a_trial_are_made_anew(
    processes: FakeProcesses, how: str
) -> None:
    bench = MeasureWorker("cpu")
    bench.open(WORKLOAD)
    processes.endings = [BEFORE[how]]

    assert screened(bench).status == "ok"
    assert processes.calls.count(worker.open_bench) == 2
    assert bench.restarts == 1


# ---- workers that end in a call
STATUSES = {
    "late": "hang",
    "SIGSEGV": "crash",
    "SIGABRT": "crash",
    "status 3": "crash",
    "connection closed": "crash",
    "out of memory": "out of memory",
    "SIGKILL": "killed",
    "SIGTERM": "killed",
    "SIGINT": "killed",
    "SIGHUP": "killed",
}


@pytest.mark.parametrize("how", DURING)
def test_what_the_end_of_a_worker_says_about_its_config(processes: FakeProcesses, how: str) -> None:
    bench = MeasureWorker("cpu")
    bench.open(WORKLOAD)
    processes.endings = [DURING[how]]

    assert death_in_screening(bench).status == STATUSES[how]


@pytest.mark.parametrize("how", DURING)
def test_a_worker_that_ended_in_a_trial_is_replaced(processes: FakeProcesses, how: str) -> None:
    bench = MeasureWorker("cpu")
    bench.open(WORKLOAD)
    processes.endings = [DURING[how]]
    death_in_screening(bench)

    assert screened(bench).status == "ok"


def test_operands_that_take_a_worker_down_are_no_configs_fault(processes: FakeProcesses) -> None:
    """As when another process has taken the GPU's memory meanwhile."""
    processes.endings = [DURING["SIGSEGV"]]

    assert death_in_screening(MeasureWorker("cpu")).status == "killed"


def test_operands_that_take_a_worker_down_are_told_of_where_they_are_made(
    processes: FakeProcesses,
) -> None:
    processes.endings = [DURING["SIGSEGV"]]

    with pytest.raises(WorkerDied) as death:
        MeasureWorker("cpu").open(WORKLOAD)

    assert death.value.status == "crash"


# ---- workers that cannot be started
@pytest.fixture
def unready(processes: FakeProcesses) -> None:
    """No process can be started."""
    processes.unready = 100


@pytest.mark.usefixtures("unready")
def test_that_no_worker_can_be_started_is_told() -> None:
    with pytest.raises(WorkerDied, match="no worker process can be started: no luck"):
        MeasureWorker("cpu").describe()


@pytest.mark.usefixtures("unready")
def test_that_no_worker_can_be_started_is_no_configs_fault() -> None:
    assert death_in_screening(MeasureWorker("cpu")).status == "killed"


@pytest.mark.usefixtures("unready")
def test_a_sweep_fails_where_no_worker_can_be_started(path: Path) -> None:
    (failure,) = run(path).failures

    assert failure.workload == WORKLOAD


# ---- workers that nobody wants any more
def test_who_waits_for_a_worker_is_released_when_it_is_cancelled(processes: FakeProcesses) -> None:
    processes.stuck = True
    bench = MeasureWorker("cpu")
    released = threading.Event()

    def await_description() -> None:
        with pytest.raises(isolated.Cancelled):
            bench.describe()
        released.set()

    threading.Thread(target=await_description, daemon=True).start()
    assert soon(lambda: len(processes.calls) == 1)
    bench.cancel()

    assert released.wait(5)


def test_a_worker_that_was_cancelled_takes_no_calls(processes: FakeProcesses) -> None:
    bench = MeasureWorker("cpu")
    bench.cancel()

    with pytest.raises(isolated.Cancelled):
        bench.describe()
    assert processes.started == 0

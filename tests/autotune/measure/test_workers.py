"""The processes that measure and compile: what befalls one costs no other, and nobody waits for
what is gone.
"""

import signal
import threading
import time
import warnings
from concurrent.futures import wait
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.faulty_kernel import Config
from support.sweeps import H100, SUBJECT, WORKLOAD, run, soon

from outblas.autotune.measure import compile_pool as compilers
from outblas.autotune.measure import isolated, worker
from outblas.autotune.measure.compile_pool import STARTS, Compilers, outcome
from outblas.autotune.measure.isolated import MeasureWorker, WorkerDied
from outblas.autotune.measure.processes import (
    Exit,
    RemoteError,
    WorkerExited,
    WorkerStartError,
    WorkerTimeout,
)
from outblas.autotune.measure.worker import Screened
from outblas.autotune.search.target import TuneTarget
from outblas.core.configs import to_text

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("faulty_log"),
]


def screened(bench: MeasureWorker, fault: str = "") -> Screened:
    return bench.screen(WORKLOAD, (SUBJECT, to_text(Config(fault=fault))), None)


def compiled(compilers: Compilers, **config: Any) -> tuple[str, str] | None:
    """What went wrong."""
    future = compilers.submit(SUBJECT, WORKLOAD, to_text(Config(**config)), 90)
    future.exception(timeout=60)
    return outcome(future)


def test_compile_processes_are_tried_again_soon_and_then_ever_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A burst of kills from outside ends compiling ahead for a second; where none can be started,
    few are tried.
    """
    now, starts = [100.0], compilers._Starts()
    monkeypatch.setattr(compilers.time, "monotonic", lambda: now[0])
    for _ in range(STARTS - 1):
        starts.failed("killed")
        assert starts.possible()
    pauses = []
    for _ in range(9):
        with warnings.catch_warnings(record=True) as said:
            starts.failed("killed")
        assert len(said) == (not pauses)  # it is said once
        begun = now[0]
        while not starts.possible():
            now[0] += 0.5
        pauses.append(now[0] - begun)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    starts.succeeded()
    starts.failed("killed")
    assert starts.possible()


def test_what_else_befalls_a_worker() -> None:
    """A config that ends its process in Python's own way, and one whose end comes when nothing is
    asked.
    """
    with MeasureWorker("cpu") as bench:
        left = screened(bench, "quit")
        assert (left.status, left.reason) == ("failed", "SystemExit: 3")
        assert screened(bench, "exit-idle").status == "ok"
        assert bench.restarts == 0
        time.sleep(1.5)
        assert screened(bench).status == "ok"
        assert bench.restarts == 1


SLOW = TuneTarget("slow", "support.slow_import")


def test_the_import_of_a_kernel_is_no_part_of_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first trial of a worker would otherwise count as a hang where a DSL takes long
    to import.
    """
    monkeypatch.setenv("SLOW_IMPORT", "4")
    with MeasureWorker("cpu", trial_seconds=3) as bench:
        for number in range(2):
            assert (
                bench.screen(WORKLOAD, (SLOW, to_text(Config(number=number))), None).status == "ok"
            )
        bench.stop()
        assert bench.screen(WORKLOAD, (SLOW, to_text(Config())), None).status == "ok"


def test_a_kernel_whose_import_ends_the_worker_brands_no_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLOW_IMPORT_CRASHES", "1")
    with MeasureWorker("cpu") as bench:
        for _ in range(2):
            with pytest.raises(
                WorkerDied, match="slow cannot be imported: the worker died: signal SIGABRT"
            ) as death:
                bench.screen(WORKLOAD, (SLOW, to_text(Config())), None)
            assert death.value.status == "killed"
        assert bench.restarts == 1  # the second time nothing is started for it


def test_errors_that_cannot_be_pickled_cost_their_own_compile() -> None:
    with Compilers(1, timeout=60) as compilers:
        assert compiled(compilers, fault="compile-odd") == (
            "failed",
            "OddError: cannot be unpickled",
        )
        assert compiled(compilers) is None
        assert compiled(compilers, number=1) is None


def test_compilers_that_cannot_start_are_no_configs_fault() -> None:
    with Compilers(1, memory=1 << 20) as compilers:
        with pytest.warns(RuntimeWarning, match="no compile process can be started"):
            assert compiled(compilers) is None
        with warnings.catch_warnings(record=True) as warned:
            assert compiled(compilers) is None
        assert warned == []


def test_compilers_that_could_not_start_are_tried_again(
    process, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.unready += [True] * STARTS
    with Compilers(1) as several:
        with pytest.warns(RuntimeWarning, match="no compile process can be started"):
            assert several.submit(SUBJECT, WORKLOAD, "", 90).result(5) == 0.0
        assert several.submit(SUBJECT, WORKLOAD, "", 90).result(5) == 0.0
        assert process.calls == []
        monkeypatch.setattr(several.starts, "_until", 0.0)
        assert several.submit(SUBJECT, WORKLOAD, "", 90).result(5) == 1.5


class FakeProcess:
    """Stands for a worker process. `unready`: whether the next one cannot be started; `deaths`: how
    the next calls end without an answer, if they do; what is `stuck` never ends but when it is
    terminated.
    """

    unready: ClassVar[list[bool]]
    deaths: ClassVar[list[WorkerExited | WorkerTimeout | None]]
    calls: ClassVar[list[Any]]
    stuck: ClassVar[bool]

    def __init__(self, **_) -> None:
        self.opened = False
        self.exit = None
        self.ended = threading.Event()

    def await_ready(self, seconds) -> None:
        if self.unready and self.unready.pop(0):
            raise WorkerStartError("no luck")

    def call(self, seconds, function, *arguments):
        self.calls.append(function)
        if function is worker.load:
            return None
        if self.stuck:
            self.ended.wait()
            raise WorkerExited(Exit(signal=signal.SIGKILL), accepted=True)
        if self.deaths and (death := self.deaths.pop(0)) is not None:
            raise death
        if function is worker.describe:
            return H100
        if function is worker.open_bench:
            self.opened = True
            return 100.0
        if function is compilers._compile:
            return 1.5
        if not self.opened:
            raise RemoteError(f"{worker.NotOpen.__module__}.NotOpen", "")
        return Screened("ok")

    def terminate(self) -> None:
        self.ended.set()

    kill = close = terminate


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch):
    class Fresh(FakeProcess):
        unready: ClassVar[list[bool]] = []
        deaths: ClassVar[list[Any]] = []
        calls: ClassVar[list[Any]] = []
        stuck = False

    for module in (isolated, compilers):
        monkeypatch.setattr(module, "WorkerProcess", Fresh)
    return Fresh


UNNOTICED = WorkerExited(Exit(signal=signal.SIGKILL), accepted=False)
STUCK = WorkerTimeout(accepted=False)


@pytest.mark.parametrize("death", [UNNOTICED, STUCK])
def test_a_worker_that_is_gone_before_a_call(process, death) -> None:
    bench = MeasureWorker("cpu")
    process.deaths += [death, None, None, death]
    assert bench.describe() == H100
    assert screened(bench).status == "ok"
    assert bench.restarts == 2
    assert process.calls.count(worker.open_bench) == 2


@pytest.mark.parametrize(
    ("death", "status"),
    [
        (WorkerTimeout(accepted=True), "hang"),
        (WorkerExited(Exit(signal=signal.SIGSEGV), accepted=True), "crash"),
        (WorkerExited(Exit(signal=signal.SIGABRT), accepted=True), "crash"),
        (WorkerExited(Exit(status=3), accepted=True), "crash"),
        (WorkerExited(Exit(detail="it closed its connection"), accepted=True), "crash"),
        (WorkerExited(Exit(memory=1 << 30), accepted=True), "out of memory"),
        (WorkerExited(Exit(signal=signal.SIGKILL), accepted=True), "killed"),
        (WorkerExited(Exit(signal=signal.SIGTERM), accepted=True), "killed"),
        (WorkerExited(Exit(signal=signal.SIGINT), accepted=True), "killed"),
        (WorkerExited(Exit(signal=signal.SIGHUP), accepted=True), "killed"),
    ],
)
def test_what_the_end_of_a_process_says_about_a_config(process, death, status: str) -> None:
    bench = MeasureWorker("cpu")
    bench.open(WORKLOAD)
    process.deaths.append(death)
    with pytest.raises(WorkerDied) as raised:
        screened(bench)
    assert raised.value.status == status
    assert screened(bench).status == "ok"

    compile_status = {
        "hang": "compile timeout",
        "out of memory": "compile crash",
        "crash": "compile crash",
    }
    process.deaths += [death, death]
    with Compilers(1) as several:
        future = several.submit(SUBJECT, WORKLOAD, "", 90)
        future.exception(5)
        assert outcome(future)[0] == compile_status.get(status, status)
        assert ("out of memory" in outcome(future)[1]) == (status == "out of memory")


def test_operands_that_take_a_worker_down_are_no_configs_fault(process) -> None:
    """As when another process has taken the GPU's memory meanwhile."""
    process.deaths += [WorkerExited(Exit(signal=signal.SIGSEGV), accepted=True)] * 2
    bench = MeasureWorker("cpu")
    with pytest.raises(WorkerDied) as death:
        screened(bench)
    assert death.value.status == "killed"
    with pytest.raises(WorkerDied) as death:
        bench.open(WORKLOAD)
    assert death.value.status == "crash"


def test_a_worker_that_cannot_be_started(process, path: Path) -> None:
    process.unready += [True] * 100
    with pytest.raises(WorkerDied, match="no worker can be started: no luck"):
        MeasureWorker("cpu").describe()
    with pytest.raises(WorkerDied) as death:
        screened(MeasureWorker("cpu"))
    assert death.value.status == "killed"
    (failure,) = run(path).failures
    assert failure.workload == WORKLOAD


def test_who_waits_for_a_worker_is_released(process) -> None:
    process.stuck = True
    bench = MeasureWorker("cpu")
    released = threading.Event()

    def wait() -> None:
        with pytest.raises(isolated.Cancelled):
            bench.describe()
        released.set()

    threading.Thread(target=wait, daemon=True).start()
    assert soon(lambda: len(process.calls) == 1)
    bench.cancel()
    assert released.wait(5)
    with pytest.raises(isolated.Cancelled):
        bench.describe()


def test_who_waits_for_compilers_is_released(process) -> None:
    process.stuck = True
    with Compilers(1) as several:
        futures = [several.submit(SUBJECT, WORKLOAD, to_text(Config()), 90) for _ in range(3)]
        assert soon(lambda: len(process.calls) == 1)
        threading.Timer(0.2, several.close).start()
        assert wait(futures, 5).done == set(futures)
        assert all(future.cancelled() for future in futures)
    assert several.submit(SUBJECT, WORKLOAD, to_text(Config()), 90).cancelled()


def test_a_compile_can_be_cancelled_while_it_runs(process) -> None:
    """And costs no other: a process that is ended for it is not the next compile's."""
    process.stuck = True
    with Compilers(1) as several:
        futures = [several.submit(SUBJECT, WORKLOAD, to_text(Config()), 90) for _ in range(3)]
        assert soon(lambda: len(process.calls) == 1)
        process.stuck = False
        assert futures[1].cancel()
        assert futures[0].cancel()
        assert futures[2].result(5) == 1.5
        assert wait(futures, 5).done == set(futures)
    assert len(process.calls) == 2


def test_a_process_compiles_so_many_times(process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "TASKS", 3)
    made = []
    monkeypatch.setattr(
        process, "__init__", lambda self, **_: made.append(FakeProcess.__init__(self))
    )
    with Compilers(1) as several:
        futures = [several.submit(SUBJECT, WORKLOAD, "", 90) for _ in range(7)]
        assert [future.result(5) for future in futures] == [1.5] * 7
    assert len(made) == 3


def test_a_task_that_was_cancelled_is_settled_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The futures of the standard library log a critical error when they are asked twice."""
    task = compilers._Task(print, ())
    task.cancel()
    assert not task.wanted
    task.succeed(None)
    assert task.future.cancelled()
    assert caplog.records == []

"""The pool of processes that compile: what befalls one costs no other compile, and nobody waits
for what is gone. test_supervision.py has real processes under attack.
"""

import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait

import pytest
from support.fake_process import COMPILE_SECONDS, DURING, FakeProcesses
from support.faulty_kernel import Config
from support.sweeps import SUBJECT, WORKLOAD, soon

from outblas.autotune.measure import compile_pool
from outblas.autotune.measure.compile_pool import STARTS, Compilers, Failure, outcome
from outblas.core.configs import to_text

pytest_plugins = ("support.process_fixtures",)

pytestmark = pytest.mark.usefixtures("faulty_log")


@pytest.fixture
def compilers(processes: FakeProcesses) -> Iterator[Compilers]:
    """A pool of one process, which is played."""
    with Compilers(1) as compilers:
        yield compilers


def submitted(compilers: Compilers) -> Future[float]:
    """A compile that was asked for."""
    return compilers.submit(SUBJECT, WORKLOAD, to_text(Config()), 90)


def compiled(compilers: Compilers) -> tuple[Failure, str] | None:
    """What went wrong with a compile."""
    future = submitted(compilers)
    future.exception(timeout=60)
    return outcome(future)


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Has so many seconds pass on this process's own clock, which goes on only so."""
    now = 100.0

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now)
    return pass_time


# ---- processes that cannot be started
def fail_to_start(compilers: Compilers, times: int) -> None:
    for _ in range(times):
        compilers.starts.failed("killed")


@pytest.mark.filterwarnings("ignore:outblas. no compile process")
def test_processes_that_fail_in_a_row_are_started_no_more() -> None:
    compilers = Compilers(1)

    fail_to_start(compilers, STARTS - 1)
    possible_before = compilers.starts.possible()
    fail_to_start(compilers, 1)

    assert possible_before
    assert not compilers.starts.possible()


@pytest.mark.filterwarnings("ignore:outblas. no compile process")
def test_processes_are_tried_again_soon_and_then_ever_later(
    pass_time: Callable[[float], None],
) -> None:
    """A burst of kills from outside ends compiling ahead for a second; where none can be started,
    few are tried.
    """
    compilers = Compilers(1)
    fail_to_start(compilers, STARTS - 1)
    pauses = []

    for _ in range(9):
        fail_to_start(compilers, 1)
        pauses.append(0.0)
        while not compilers.starts.possible() and pauses[-1] < 100:
            pass_time(0.5)
            pauses[-1] += 0.5

    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


@pytest.mark.filterwarnings("ignore:outblas. no compile process")
def test_a_process_that_starts_has_failures_counted_anew() -> None:
    compilers = Compilers(1)
    fail_to_start(compilers, STARTS + 5)

    compilers.starts.succeeded()
    fail_to_start(compilers, 1)

    assert compilers.starts.possible()


def test_that_no_process_can_be_started_is_said_once() -> None:
    compilers = Compilers(1)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fail_to_start(compilers, STARTS - 1)
        too_early = len(said)
        fail_to_start(compilers, 9)

    assert (too_early, len(said)) == (0, 1)


def test_a_compile_is_no_failure_where_no_process_can_be_started() -> None:
    """Of real processes, which have too little memory to start."""
    with (
        Compilers(1, memory=1 << 20) as compilers,
        pytest.warns(RuntimeWarning, match="compile processes cannot be started"),
    ):
        assert compiled(compilers) is None


def test_a_second_compile_where_no_process_can_be_started_is_done_in_silence() -> None:
    with Compilers(1, memory=1 << 20) as compilers:
        with pytest.warns(RuntimeWarning):
            compiled(compilers)

        with warnings.catch_warnings(record=True) as said:
            assert compiled(compilers) is None

    assert said == []


@pytest.mark.filterwarnings("ignore:outblas. no compile process")
def test_processes_that_could_not_be_started_are_left_alone_for_a_while(
    processes: FakeProcesses, compilers: Compilers
) -> None:
    processes.unready = STARTS

    seconds = [submitted(compilers).result(5) for _ in range(2)]

    assert seconds == [0.0, 0.0]
    assert processes.started == STARTS
    assert processes.calls == []


@pytest.mark.filterwarnings("ignore:outblas. no compile process")
def test_processes_that_could_not_be_started_are_tried_again(
    processes: FakeProcesses, compilers: Compilers, pass_time: Callable[[float], None]
) -> None:
    processes.unready = STARTS
    submitted(compilers).result(5)

    pass_time(compile_pool.PAUSE_SECONDS)

    assert submitted(compilers).result(5) == COMPILE_SECONDS


# ---- processes that end in a compile
STATUSES = {
    "late": "compile timeout",
    "SIGSEGV": "compile crash",
    "SIGABRT": "compile crash",
    "status 3": "compile crash",
    "connection closed": "compile crash",
    "out of memory": "compile crash",
    "SIGKILL": "killed",
    "SIGTERM": "killed",
    "SIGINT": "killed",
    "SIGHUP": "killed",
}


@pytest.mark.parametrize("how", DURING)
def test_what_the_end_of_a_process_says_about_its_config(
    processes: FakeProcesses, compilers: Compilers, how: str
) -> None:
    processes.endings = [DURING[how]] * 2  # after a kill it is tried again

    status, reason = compiled(compilers) or ("", "")

    assert status == STATUSES[how]
    assert ("out of memory" in reason) == (how == "out of memory")


def test_a_process_compiles_so_many_times(
    processes: FakeProcesses, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compilers leak goes with it."""
    monkeypatch.setattr(compile_pool, "TASKS", 3)

    futures = [submitted(compilers) for _ in range(7)]

    assert [future.result(5) for future in futures] == [COMPILE_SECONDS] * 7
    assert processes.started == 3


# ---- compiles that nobody wants any more
@pytest.fixture
def stuck(processes: FakeProcesses, compilers: Compilers) -> list[Future[float]]:
    """Three compiles, of which the first has begun and never ends."""
    processes.stuck = True
    futures = [submitted(compilers) for _ in range(3)]
    assert soon(lambda: len(processes.calls) == 1)
    return futures


def test_who_waits_for_compiles_is_released_when_the_pool_closes(
    stuck: list[Future[float]], compilers: Compilers
) -> None:
    threading.Timer(0.2, compilers.close).start()

    assert wait(stuck, 5).done == set(stuck)
    assert all(future.cancelled() for future in stuck)


def test_a_pool_that_is_closed_takes_no_compiles(compilers: Compilers) -> None:
    compilers.close()

    assert submitted(compilers).cancelled()


def test_a_compile_can_be_cancelled_while_it_runs_and_costs_no_other(
    processes: FakeProcesses, stuck: list[Future[float]]
) -> None:
    """A process that is ended for it is not the next compile's."""
    running, waiting, wanted = stuck

    processes.stuck = False
    assert waiting.cancel()
    assert running.cancel()

    assert wanted.result(5) == COMPILE_SECONDS
    assert wait(stuck, 5).done == set(stuck)
    assert len(processes.calls) == 2, "a compile that was cancelled has begun"


def test_a_compile_that_is_cancelled_before_it_begins_leaves_its_process_to_the_next(
    processes: FakeProcesses, compilers: Compilers
) -> None:
    """A process imports the DSL for seconds. Sweeps of short budgets cancelled their compiles
    meanwhile, and each time the next shape had to start processes again.
    """
    processes.importing.clear()
    first = submitted(compilers)
    assert soon(lambda: processes.started == 1)

    first.cancel()
    processes.importing.set()

    assert submitted(compilers).result(5) == COMPILE_SECONDS
    assert processes.started == 1
    assert len(processes.calls) == 1, "the compile that was cancelled has begun"


def test_a_compile_that_was_cancelled_is_settled_in_silence(
    processes: FakeProcesses,
    stuck: list[Future[float]],
    compilers: Compilers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The futures of the standard library log a critical error when they are settled twice: here
    by the process that comes to one, and by the pool that closes.
    """
    running, waiting, wanted = stuck
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.Logger, "handle", lambda _, record: logged.append(record))
    processes.stuck = False
    waiting.cancel()
    running.cancel()
    wanted.result(5)

    compilers.close()

    assert running.cancelled()
    assert waiting.cancelled()
    assert logged == []

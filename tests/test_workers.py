"""The processes that measure and compile: what befalls one costs no other, and nobody waits for what is gone."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, ClassVar

import pytest
from faulty_kernel import Config
from pebble import ProcessFuture
from sweeps import H100, SUBJECT, WORKLOAD, run, soon

from outblas.autotune import compilers, isolated, worker
from outblas.autotune.compilers import Compilers, outcome
from outblas.autotune.isolated import Bench, Down
from outblas.autotune.worker import Screened
from outblas.configs import to_text

pytestmark = pytest.mark.usefixtures("faulty_log")


def screened(bench, fault=""):
    return bench.screen(WORKLOAD, (SUBJECT, to_text(Config(fault=fault))), None)


def compiled(compilers, **config):
    """What went wrong."""
    future = compilers.submit(SUBJECT, WORKLOAD, to_text(Config(**config)), 90)
    future.exception(timeout=60)
    return outcome(future)


def test_what_else_befalls_a_worker():
    """A config that ends its process in Python's own way, and one whose end comes when nothing is asked."""
    with Bench("cpu") as bench:
        left = screened(bench, "quit")
        assert (left.status, left.reason) == ("failed", "SystemExit: 3")
        assert screened(bench, "exit-idle").status == "ok"
        assert bench.restarts == 0
        time.sleep(1.5)
        assert screened(bench).status == "ok"
        assert bench.restarts == 1


def test_errors_that_cannot_be_pickled_cost_their_own_compile():
    with Compilers(1, timeout=60) as compilers:
        assert compiled(compilers, fault="compile-odd") == ("failed", "OddError: cannot be unpickled")
        assert compiled(compilers) is None
        assert compiled(compilers, number=1) is None


def test_compilers_that_cannot_start_are_no_configs_fault():
    with Compilers(1, memory=1 << 20) as compilers:
        assert compiled(compilers) is None
        assert compiled(compilers) is None  # where the pool is broken


class FakePool:
    """Stands for pebble's pool of one worker. `deaths`: whether its process dies before it takes up the next call; what
    is `stuck` never ends, and nobody hears of it when the pool does."""

    deaths: ClassVar[list[bool]]
    calls: ClassVar[list[Any]]
    stuck = False
    active = True

    def __init__(self, **_):
        self.opened = False

    def schedule(self, function, *, args, timeout):
        self.calls.append(function)
        if self.stuck:
            return StuckFuture()
        future = Future()
        if self.deaths and self.deaths.pop(0):
            future.set_exception(BrokenProcessPool("All workers expired"))
        elif function is worker.open_bench:
            self.opened = True
            future.set_result(100.0)
        elif function is worker.describe:
            future.set_result(H100)
        elif self.opened:
            future.set_result(Screened("ok"))
        else:
            future.set_exception(worker.NotOpen())
        return future

    def stop(self):
        """Whoever waits goes on waiting."""

    join = stop


class StuckFuture(ProcessFuture[Any]):
    """Running, and yet to be cancelled, as pebble's futures are."""

    def __init__(self):
        super().__init__()
        self.set_running_or_notify_cancel()


@pytest.fixture
def pool(monkeypatch):
    class Fresh(FakePool):
        deaths: ClassVar[list[bool]] = []
        calls: ClassVar[list[Any]] = []

    for module in (isolated, compilers):
        monkeypatch.setattr(module, "ProcessPool", Fresh)
    return Fresh


def test_a_worker_that_dies_unnoticed(pool):
    """Pebble says that all workers expired, of a call that none has taken up."""
    bench = Bench("0")
    pool.deaths += [True, False, False, True]
    assert bench.describe() == H100
    assert screened(bench).status == "ok"
    assert bench.restarts == 2
    assert pool.calls.count(worker.open_bench) == 2


def test_a_worker_that_cannot_be_started(pool, path):
    pool.deaths += [True] * 100
    with pytest.raises(Down):
        Bench("0").describe()
    (failure,) = run(path).failures
    assert failure.workload == WORKLOAD


def test_who_waits_for_a_worker_is_released(pool):
    pool.stuck = True
    bench = Bench("0")
    released = threading.Event()

    def wait():
        with pytest.raises(isolated.Abandoned):
            bench.describe()
        released.set()

    threading.Thread(target=wait, daemon=True).start()
    assert soon(lambda: len(pool.calls) == 1)
    bench.abandon()
    assert released.wait(5)


def test_two_threads_end_a_worker_once(pool, monkeypatch):
    """As an interrupt does, and the thread that has the worker: pebble closes its pipes in every `join`."""
    joined = []
    monkeypatch.setattr(pool, "join", lambda self: (time.sleep(0.2), joined.append(self)))
    bench = Bench("0")
    bench.describe()
    with ThreadPoolExecutor() as threads:
        for end in (bench.abandon, bench.stop, bench.abandon):
            threads.submit(end)
    assert len(joined) == 1


def test_who_waits_for_compilers_is_released(pool):
    pool.stuck = True
    with Compilers(1) as several:
        future = several.submit(SUBJECT, WORKLOAD, to_text(Config()), 90)
        threading.Timer(0.2, several.close).start()
        assert wait([future], 5).done == {future}

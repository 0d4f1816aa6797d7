"""The pool of processes that compile: what befalls one costs no other compile, and nobody waits
for what is gone.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from unittest.mock import Mock

import pytest
from support import faulty_kernel, fused_kernel
from support.fake_process import COMPILE_SECONDS, FakeProcesses
from support.faulty_kernel import Config
from support.sweeps import SUBJECT, WORKLOAD, soon

from outblas.autotune.measure import compile_pool
from outblas.autotune.measure.compile_pool import STARTS, Compiled, Compilers
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import Workload
from outblas.base.configs import to_text

pytest_plugins = ("support.fake_process",)

pytestmark = pytest.mark.usefixtures("faulty_log")


@pytest.fixture
def compilers(processes: FakeProcesses) -> Iterator[Compilers]:
    """A pool of one process, which is played."""
    with Compilers(1) as compilers:
        yield compilers


def submitted(compilers: Compilers) -> Future[Compiled]:
    return compilers.submit(SUBJECT, WORKLOAD, to_text(Config()), 90)


@pytest.mark.filterwarnings("ignore:outblas. compile processes cannot be started")
def test_a_compile_is_no_failure_where_no_process_can_be_started(
    processes: FakeProcesses, compilers: Compilers
) -> None:
    processes.unready = STARTS

    assert [submitted(compilers).result(5) for _ in range(2)] == [Compiled()] * 2
    assert (processes.started, processes.calls) == (0, [])


@pytest.mark.parametrize(
    ("endings", "status"),
    [
        (["hang"], "compile timeout"),
        (["crash"], "compile crash"),
        (["killed"], "killed"),
        (["idle", "idle"], "ok"),
        (["idle"] * STARTS, "killed"),
    ],
)
def test_what_the_end_of_a_process_says_about_its_config(
    processes: FakeProcesses, compilers: Compilers, endings: list[str | None], status: str
) -> None:
    processes.endings = endings

    assert submitted(compilers).result(5).status == status
    assert submitted(compilers).result(5).seconds == COMPILE_SECONDS, "the next one has a new one"


def test_a_process_compiles_so_many_times(
    processes: FakeProcesses, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compilers leak goes with it."""
    monkeypatch.setattr(compile_pool, "CALLS", 3)

    futures = [submitted(compilers) for _ in range(7)]

    assert [future.result(5).seconds for future in futures] == [COMPILE_SECONDS] * 7
    assert processes.started == 3


def test_who_waits_for_compiles_is_released_when_the_pool_closes(
    processes: FakeProcesses, compilers: Compilers
) -> None:
    processes.stuck = True
    futures = [submitted(compilers) for _ in range(3)]
    assert soon(lambda: len(processes.calls) == 1)
    threading.Timer(0.2, compilers.close).start()

    assert wait(futures, 10).done == set(futures)
    assert [future.result() for future in futures[1:]] == [Compiled()] * 2
    assert len(processes.calls) == 1


def test_a_config_is_compiled_with_its_epilogue_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bare GEMM is checked first, and nothing is left to compile in the worker."""
    log = tmp_path / "compiled"
    monkeypatch.setenv("FUSED_LOG", str(log))
    workload = Workload(24, 32, 16, "float32", layout="nn", epilogue="bias+gelu+residual")
    target = TuneTarget("fused", "support.fused_kernel")

    assert compile_pool._compile(target, workload, to_text(fused_kernel.Config()), 90).seconds

    assert log.read_text() == "bias, gelu, residual\n\n"


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (ValueError("no luck"), "failed", "ValueError: no luck"),
        (MemoryError(), "compile crash", "out of memory: the compile process reached its limit"),
        (OSError("disk"), "ok", ""),  # the measuring process compiles
    ],
    ids=["raises", "memory", "disk"],
)
def test_what_an_error_of_a_compile_says_about_its_config(
    error: Exception, status: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faulty_kernel, "precompile", Mock(side_effect=error))

    compiled = compile_pool._compile(SUBJECT, WORKLOAD, to_text(Config()), 90)

    assert (compiled.status, compiled.reason, compiled.seconds) == (status, reason, None)

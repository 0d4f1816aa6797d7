"""Fixtures for what measures and compiles in processes that are played."""

import pytest

from outblas.autotune.measure import compile_pool, isolated
from support.fake_process import FakeProcesses


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> FakeProcesses:
    """What starts processes meanwhile: none is a real one."""
    processes = FakeProcesses()
    for module in (isolated, compile_pool):
        monkeypatch.setattr(module, "WorkerProcess", processes)
    return processes

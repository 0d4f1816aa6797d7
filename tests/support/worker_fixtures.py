"""Fixtures of worker processes."""

from collections.abc import Iterator

import pytest

from outblas.autotune.measure.processes import WorkerProcess
from support.worker_processes import started


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    """A worker of the test's own, which it may end."""
    with started() as worker:
        yield worker


@pytest.fixture(scope="module")
def lasting_worker() -> Iterator[WorkerProcess]:
    """A worker that outlives each test of a module."""
    with started() as worker:
        yield worker

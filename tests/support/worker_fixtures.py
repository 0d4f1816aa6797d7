"""Whether the workers that tests start are forks of this process."""

from collections.abc import Iterator

import pytest

from support.forked_workers import forking


@pytest.fixture(scope="module")
def forked_workers_of_module() -> Iterator[None]:
    """Workers that a module starts are forks of this process: none imports torch anew."""
    with forking():
        yield


@pytest.fixture
def executed_workers() -> Iterator[None]:
    """Workers are started as for a user, also in a module where they are forks."""
    with forking(False):
        yield

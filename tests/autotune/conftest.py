"""Fixtures of the tests of autotune."""

from collections.abc import Iterator

import pytest
from support import forked_workers


@pytest.fixture(scope="module")
def forked_workers_of_module() -> Iterator[None]:
    """Workers that a module starts are forks of this process: none imports torch anew."""
    with forked_workers.forking():
        yield

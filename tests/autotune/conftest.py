"""The store of tests of the tuner."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from outblas.autotune.store.store import Store


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    """An empty store."""
    with Store(path) as store:
        yield store

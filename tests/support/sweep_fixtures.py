"""A store, and what tunes into it with a worker that is played."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outblas.autotune.store.store import Store
from outblas.autotune.sweeps.outcome import Outcome
from support.jobs import tuning


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    """The store of the sweeps."""
    with Store(path) as store:
        yield store


@pytest.fixture
def tune(store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Tunes the faulty kernel, which has so many sound configs, with a worker that is played."""
    return tuning(store, monkeypatch)

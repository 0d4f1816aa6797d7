"""Which sources a tuned kernel is made of, so that trials of other sources do not count."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import outblas
from outblas.autotune.search import target

FILES = ("__init__.py", "rung.py", "inner/__init__.py", "inner/part.py")


@pytest.fixture
def ladder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a package `outblas.mutable`, a ladder that the test may change."""
    folder = tmp_path / "mutable"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    monkeypatch.setattr(outblas, "__path__", [*outblas.__path__, str(tmp_path)])
    yield folder
    for name in [name for name in sys.modules if name.startswith("outblas.mutable")]:
        del sys.modules[name]


@pytest.fixture
def fingerprint() -> Callable[[], str]:
    """The fingerprint of the ladder's rung, as a new process sees it."""

    def compute() -> str:
        target.fingerprint.cache_clear()
        return target.TuneTarget("mutable.rung", "outblas.mutable.rung").fingerprint

    return compute


@pytest.mark.parametrize("name", FILES)
def test_any_file_of_a_ladder_counts(name: str, ladder: Path, fingerprint) -> None:
    before = fingerprint()

    (ladder / name).write_text("changed = True\n")

    assert fingerprint() != before

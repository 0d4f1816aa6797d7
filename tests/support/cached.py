"""A cache with results, for commands. A test module has its fixtures by `pytest_plugins`."""

import shutil
from pathlib import Path

import pytest

from outblas.autotune.store import tables
from outblas.autotune.store.store import Store
from outblas.base import cache
from support.stored import H200, OTHER, failed, trial, winner


@pytest.fixture(scope="session")
def cache_to_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with four trials of two kernels, a winner and two compiled kernels."""
    folder = tmp_path_factory.mktemp("cache_to_copy") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTBLAS_CACHE_DIR", str(folder))
        with Store() as store:
            store.add(trial(0))
            store.add(failed(1))
            store.add(trial(2, us=90.0))
            store.add(trial(3, workload=OTHER, gpu=H200, kernel="simt.naive"))
            store.record_best(winner(config="tile_m=128,sms=2"))
        for i in range(2):
            cache.fetch({"i": i}, build=lambda: "x", save=_save, load=Path.read_text)
    return folder


def _save(text: str, at: Path) -> None:
    at.write_text(text)


@pytest.fixture
def home(cache_to_copy: Path, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose `cache` has the results and the compiled kernels of `cache_to_copy`, and whose
    `tables` is to have the tables that ship; a store is at `path`.
    """
    shutil.copytree(cache_to_copy, path.parent)
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(path.parent))
    monkeypatch.setattr(tables, "TABLES", tmp_path / "tables")
    return tmp_path

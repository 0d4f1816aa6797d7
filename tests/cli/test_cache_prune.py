"""`outblas cache prune --dry-run` says how much would go, and removes nothing."""

from pathlib import Path

import pytest
from support import commands
from support.stored import trial, winner

from outblas.autotune.store.store import Store


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two old trials, a winner and one compiled kernel."""
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path))
    with Store() as store:
        store.add(trial(0))
        store.add(trial(1))
        store.record_best(winner())
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "0.o").write_bytes(b"x" * (1 << 20))
    return tmp_path


def test_results_are_counted_and_stay(cache_folder: Path) -> None:
    done = commands.invoke("cache", "prune", "--older-than", "30d", "--dry-run", code=0)

    assert done.stdout == "3 trials and winners would be removed\n"
    with Store(read_only=True) as store:
        assert len(store.trials()) == 2
        assert len(store.winners()) == 1


def test_compiled_kernels_are_counted_and_stay(cache_folder: Path) -> None:
    done = commands.invoke("cache", "prune", "--compiled", "--dry-run", code=0)

    assert done.stdout == "1 compiled kernels would be removed, 1.0 MiB\n"
    assert (cache_folder / "objects" / "0.o").exists()


@pytest.mark.parametrize(
    "options",
    [("--older-than", "30d"), ("--kernel", "hopper.hilbert"), ("--kernel", "portable")],
    ids=" ".join,
)
def test_what_was_counted_is_what_goes(cache_folder: Path, options: tuple[str, ...]) -> None:
    counted = commands.invoke("cache", "prune", *options, "--dry-run", code=0).stdout

    removed = commands.invoke("cache", "prune", *options, code=0).stdout

    assert counted.replace("would be removed", "removed") == removed

"""`outblas cache prune --dry-run` says how much would go, and removes nothing."""

from pathlib import Path

import pytest
from support.cache_command import shown

from outblas.autotune.store.store import Store
from outblas.core import cache

pytest_plugins = ("support.cached",)
pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def large_kernel(home: Path, path: Path) -> Path:
    """A compiled kernel of 1 MiB, beside the two of the cache."""
    kernel = path.parent / "objects" / "large.o"
    kernel.write_bytes(b"x" * (1 << 20))
    return kernel


def test_results_are_counted() -> None:
    assert shown("prune", "--older-than", "30d", "--dry-run") == (
        "5 trials and winners would be removed\n"
    )


def test_results_that_are_counted_stay() -> None:
    shown("prune", "--older-than", "30d", "--dry-run")

    with Store(read_only=True) as store:
        assert len(store.trials()) == 4
        assert len(store.winners()) == 1


def test_compiled_kernels_are_counted_and_stay(large_kernel: Path) -> None:
    counted = shown("prune", "--compiled", "--dry-run")

    assert counted == "3 compiled kernels would be removed, 1.0 MiB\n"
    assert len(list(large_kernel.parent.glob("*.o"))) == 3


@pytest.fixture
def inspection(home: Path) -> Path:
    """An inspection that `report roofline` has kept."""
    file = cache.inspections() / "0123.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    return file


def test_kept_inspections_go_with_compiled_kernels(inspection: Path) -> None:
    printed = shown("prune", "--compiled")

    assert printed.endswith("1 kept inspection removed\n")
    assert not inspection.exists()


def test_kept_inspections_that_are_counted_stay(inspection: Path) -> None:
    printed = shown("prune", "--compiled", "--dry-run")

    assert printed.endswith("1 kept inspection would be removed\n")
    assert inspection.exists()


@pytest.mark.parametrize(
    "options",
    [
        ("--older-than", "30d"),
        ("--kernel", "hopper.hilbert"),
        ("--kernel", "portable"),
        ("--compiled",),
    ],
    ids=" ".join,
)
def test_what_was_counted_is_what_goes(options: tuple[str, ...]) -> None:
    counted = shown("prune", *options, "--dry-run")

    removed = shown("prune", *options)

    assert counted.replace("would be removed", "removed") == removed

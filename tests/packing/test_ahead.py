"""`outblas.precompile`: kernels of a list of products, compiled into the cache."""

from pathlib import Path
from typing import Any

import pytest
import torch

import outblas
from outblas.base import cache
from outblas.packing import build

LINES = ("128x4096x4096", "8x4096x4096 bias")


def compiled(folder: Path) -> dict[str, int]:
    """The kernels in a cache, and when each was written."""
    return {entry.path.name: entry.path.stat().st_mtime_ns for entry in cache.objects(folder)}


def test_a_file_has_the_kernels_of_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[list[Any]] = []

    def compiled(variants: list[Any], *_: Any) -> list[Any]:
        wanted.append(variants)
        return [1]

    monkeypatch.setattr(build, "compiled", compiled)
    (tmp_path / "products.txt").write_text("\n".join(LINES), encoding="utf-8")

    assert outblas.precompile(LINES) == outblas.precompile(tmp_path / "products.txt", jobs=1) == 1

    assert wanted[0] == wanted[1]
    assert len(wanted[0]) > 5


def test_no_process_is_started_where_all_kernels_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*given: Any, **options: Any) -> Any:
        raise AssertionError("a process was started")

    monkeypatch.setattr(cache, "packed_object", lambda facts: b"")
    monkeypatch.setattr(build, "ProcessPoolExecutor", started)

    assert outblas.precompile(LINES) > 5


@pytest.mark.parametrize(
    ("products", "error", "message"),
    [
        (3, TypeError, "products is int, expected a path or lines of text"),
        ([b"8x8x8"], TypeError, "products is list, expected a path or lines of text"),
        (["8x8"], ValueError, "the line is '8x8'"),
        ([""], ValueError, "the line is '', expected M or FIRST-LAST"),
        (["# all"], ValueError, "the line is '# all', expected M or FIRST-LAST"),
        ("/nonexistent/products.txt", FileNotFoundError, "products.txt"),
    ],
)
def test_what_is_no_list_of_products_is_refused(
    products: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        outblas.precompile(products)


@pytest.mark.parametrize("jobs", [0, -1, "2", True])
def test_jobs_are_a_positive_number(jobs: Any) -> None:
    with pytest.raises(ValueError, match="expected a positive number"):
        outblas.precompile([], jobs=jobs)


def test_a_gpu_of_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))

    with pytest.raises(ValueError, match=r"NVIDIA A100-SXM4-80GB, of sm_80, expected sm_90"):
        outblas.precompile(LINES)

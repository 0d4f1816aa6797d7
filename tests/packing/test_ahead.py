"""`outblas.precompile`: kernels of a list of products, compiled into the cache."""

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import outblas
from outblas.base import cache, machines, registry
from outblas.packing import ahead, build

LINES = ("128x4096x4096", "8x4096x4096 bias")


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of objects of a cache that is not there yet."""
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "objects"


def compiled(folder: Path) -> dict[str, int]:
    """The kernels in a cache, and when each was written."""
    return {entry.path.name: entry.path.stat().st_mtime_ns for entry in cache.objects(folder)}


@pytest.mark.compile
def test_kernels_are_compiled_once_and_are_in_the_cache(empty: Path, tmp_path: Path) -> None:
    (tmp_path / "products.txt").write_text("\n".join(LINES), encoding="utf-8")

    from_lines = outblas.precompile(LINES, jobs=2)
    there = compiled(empty)
    from_file = outblas.precompile(tmp_path / "products.txt", jobs=1)

    assert from_lines == from_file == len(there) > 5
    assert compiled(empty) == there


def test_no_process_is_started_where_all_kernels_are_there(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*given: Any, **options: Any) -> Any:
        raise AssertionError("a process was started")

    monkeypatch.setattr(cache, "packed_object", lambda facts: b"")
    monkeypatch.setattr(build, "ProcessPoolExecutor", started)

    assert outblas.precompile(LINES) > 5


def _log_compiles(folder: str, log: str) -> None:
    """In a process of its own: compiles `LINES`, and logs what it built."""
    from outblas.core.products import parse_line
    from outblas.hopper.gemm import packed

    module = registry.load("hopper.gemm")
    of_gemm, of_probe = packed.compile_variant, packed.smid_probe.compile_variant

    def logged(make: Callable[..., Any]) -> Callable[..., Any]:
        def build_it(*given: Any) -> Any:
            with open(log, "a", encoding="utf-8") as file:
                file.write(f"{given[-1].name}\n")
            return make(*given)

        return build_it

    packed.compile_variant = logged(of_gemm)
    packed.smid_probe.compile_variant = logged(of_probe)
    wanted, _ = build._variants([parse_line(LINES[1])], ahead._machine(), lambda text: None)
    for variant in wanted:
        module.keep_variant(variant)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.long
def test_processes_that_start_together_compile_each_kernel_once(
    empty: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    spawned = multiprocessing.get_context("spawn")
    processes = [
        spawned.Process(target=_log_compiles, args=(str(empty), str(log))) for _ in range(3)
    ]

    for process in processes:
        process.start()
    for process in processes:
        process.join(120)

    built = log.read_text(encoding="utf-8").split()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted(built) == sorted(set(built))
    assert len(built) == len(compiled(empty))


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


def test_a_hopper_gpu_that_no_table_lists_counts_its_own_sms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H42")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=114)
    )

    assert ahead._machine() == replace(machines.find("H100"), sms=114)

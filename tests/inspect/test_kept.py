"""Inspections that are kept on disk for the next roofline."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.inspections import imagined

from outblas.inspect import kept

REQUEST = kept.Request("hopper.gemm", 90, "bfloat16", (4096, 4096, 4096))
FOUND = imagined("hopper.gemm")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where inspections are kept: a cache of this test's own."""
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    kept._toolchain.cache_clear()
    yield tmp_path / "cache" / "inspections"
    kept._toolchain.cache_clear()


def test_an_inspection_is_kept_without_its_code(folder: Path) -> None:
    assert kept.find(REQUEST) is None

    kept.keep(REQUEST, FOUND)

    assert kept.find(REQUEST) == replace(FOUND, sass="", ptx_text="")
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "change",
    [{"kernel": "hopper.hilbert"}, {"arch": 80}, {"dtype": "float16"}, {"shape": (8192, 1, 1)}],
    ids=["kernel", "arch", "dtype", "shape"],
)
def test_another_request_finds_nothing(folder: Path, change: dict[str, object]) -> None:
    kept.keep(REQUEST, FOUND)

    assert kept.find(replace(REQUEST, **change)) is None  # type: ignore[arg-type]


def test_other_compilers_and_other_sources_find_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.keep(REQUEST, FOUND)

    monkeypatch.setenv("TRITON_PTXAS_PATH", "/another/ptxas")
    kept._toolchain.cache_clear()
    with_another_ptxas = kept.find(REQUEST)
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    monkeypatch.setattr(kept, "_source", lambda: "changed")
    kept._toolchain.cache_clear()

    assert with_another_ptxas is None
    assert kept.find(REQUEST) is None


def test_a_variable_that_a_compiler_sets_meanwhile_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept.find(REQUEST) is None
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")

    kept.keep(REQUEST, FOUND)
    monkeypatch.delenv("CUTE_DSL_ARCH")
    kept._toolchain.cache_clear()

    assert kept.find(REQUEST) is not None


@pytest.mark.parametrize("content", ["", "{}", "[1, 2]", '{"kernel": "hopper.gemm"}', "\0"])
def test_a_damaged_file_is_as_good_as_none(folder: Path, content: str) -> None:
    kept.keep(REQUEST, FOUND)
    (file,) = folder.iterdir()
    file.write_text(content)

    assert kept.find(REQUEST) is None


def test_a_file_that_others_can_write_is_not_read(folder: Path) -> None:
    kept.keep(REQUEST, FOUND)
    (file,) = folder.iterdir()
    file.chmod(0o666)

    assert kept.find(REQUEST) is None


def test_where_nothing_can_be_kept_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "file"))

    kept.keep(REQUEST, FOUND)

    assert kept.find(REQUEST) is None


def test_the_oldest_inspections_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST", 2)
    requests = [replace(REQUEST, shape=(n, n, n)) for n in (1, 2, 3)]

    for request in requests:
        kept.keep(request, FOUND)
        for file in folder.iterdir():
            _make_older(file)

    assert [kept.find(request) is not None for request in requests] == [False, True, True]


def _make_older(file: Path) -> None:
    then = file.stat().st_mtime - 10
    os.utime(file, (then, then))

"""The store of compiled kernels: one builder at a time, whole files only, nothing that others can
write.
"""

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outblas.core import cache

pytestmark = pytest.mark.long

FACTS = {"kernel": "x", "arch": "sm_90a"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    cache._warn_once.cache_clear()
    return tmp_path / "cache"


def fetch(
    value: str = "built",
    facts: dict[str, Any] = FACTS,
    build: Callable[[], str] | None = None,
) -> str:
    """The object of these facts, which is the value where it has to be built."""
    return cache.fetch(
        facts,
        build=build or (lambda: value),
        save=lambda built, path: path.write_text(built) and None,
        load=Path.read_text,
    )


def test_built_once_then_loaded(folder: Path) -> None:
    assert fetch("first") == "first"
    assert fetch("second") == "first"
    assert fetch("third", {**FACTS, "arch": "sm_100a"}) == "third"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not list((folder / "objects").glob(".new-*"))


@pytest.mark.parametrize("damage", ["truncate", "flip", "no record", "bad record"])
def test_damaged_objects_are_built_anew(folder: Path, damage: str) -> None:
    fetch("first")
    (path,) = (folder / "objects").glob("*.o")
    match damage:
        case "truncate":
            path.write_text("fir")
        case "flip":
            path.write_text("fIrst")
        case "no record":
            path.with_suffix(".json").unlink()
        case "bad record":
            path.with_suffix(".json").write_text("{")
    assert fetch("second") == "second"
    assert fetch("third") == "second"


def test_directory_that_others_can_write_is_not_used(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match="can be written by others"):
        assert fetch("first") == "first"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fetch("second") == "second"
    assert not list(folder.iterdir())


def test_directory_of_another_user_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.warns(UserWarning, match="belongs to another user"):
        assert fetch() == "built"


def test_unwritable_place_costs_speed_only(folder: Path) -> None:
    folder.write_text("a file")
    with pytest.warns(UserWarning, match="outblas keeps no compiled kernels"):
        assert fetch() == "built"


def test_full_disk_costs_speed_only(folder: Path) -> None:
    def full(built: str, path: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.warns(UserWarning, match="No space left"):
        assert cache.fetch(FACTS, build=lambda: "built", save=full, load=Path.read_text) == "built"
    assert not list((folder / "objects").glob("*.o"))


def test_objects_that_cannot_be_loaded_are_built_anew(folder: Path) -> None:
    def unloadable(path: Path) -> str:
        raise RuntimeError("cannot map")

    fetch("first")
    with pytest.warns(UserWarning, match="cannot map"):
        got = cache.fetch(
            FACTS,
            build=lambda: "second",
            save=lambda b, p: p.write_text(b) and None,
            load=unloadable,
        )
    assert got == "second"


def test_folder_below_one_that_others_can_write_is_not_used(folder: Path) -> None:
    folder.parent.chmod(0o777)
    with pytest.warns(UserWarning, match="can be written by others"):
        assert fetch() == "built"


def test_prune_keeps_the_newest(folder: Path) -> None:
    for i in range(4):
        fetch("x" * 100, {"i": i})
        time.sleep(0.02)
    cache.prune(folder / "objects", limit=250)
    kept = [i for i in range(4) if (folder / "objects" / f"{cache.digest({'i': i})}.o").exists()]
    assert kept == [2, 3]


def test_eight_cold_processes_build_once(folder: Path) -> None:
    log = folder.parent / "log"

    def build() -> str:
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(0.2)
        return "object"

    found = in_processes(8, lambda: fetch(build=build))

    assert found == ["object"] * 8
    assert log.read_text() == "built\n"


def in_processes(count: int, function: Callable[[], str]) -> list[str]:
    """What so many forks of this process return that begin at the same moment."""
    context = multiprocessing.get_context("fork")
    begin, found = context.Barrier(count), context.SimpleQueue()

    def run() -> None:
        begin.wait(60)
        found.put(function())

    processes = [context.Process(target=run) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * count
    return [found.get() for _ in processes]

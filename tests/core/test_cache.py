"""The store of compiled kernels: one builder at a time, whole files only, nothing that others can
write.
"""

import multiprocessing
import os
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outblas.core import cache

pytestmark = pytest.mark.long

FACTS: dict[str, Any] = {"kernel": "x", "arch": "sm_90a"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder, which is not there yet."""
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def save(built: str, path: Path) -> None:
    path.write_text(built)


def fetch(
    value: str = "built",
    facts: dict[str, Any] = FACTS,
    build: Callable[[], str] | None = None,
) -> str:
    """The object of these facts, which is the value where it has to be built."""
    return cache.fetch(
        facts,
        build=build or (lambda: value),
        save=save,
        load=Path.read_text,
    )


def written(folder: Path) -> list[str]:
    """Names of all files of the cache."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


# ---- what is stored
def test_an_object_is_built_once_then_loaded(folder: Path) -> None:
    fetch("first")

    assert fetch("second") == "first"


def test_other_facts_have_an_object_of_their_own(folder: Path) -> None:
    fetch("first")

    assert fetch("other", {**FACTS, "arch": "sm_100a"}) == "other"


def test_the_folder_is_the_users_alone(folder: Path) -> None:
    fetch()

    assert folder.stat().st_mode & 0o777 == 0o700


def test_nothing_but_objects_and_records_is_left(folder: Path) -> None:
    fetch()

    name = cache.digest(FACTS)
    assert written(folder) == [f"{name}.json", f"{name}.o"]


# ---- what cannot be used
DAMAGES: dict[str, Callable[[Path], object]] = {
    "an object cut off": lambda path: path.write_text("fir"),
    "a flipped bit": lambda path: path.write_text("fIrst"),
    "no record": lambda path: path.with_suffix(".json").unlink(),
    "a record cut off": lambda path: path.with_suffix(".json").write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_object_is_built_anew_and_replaced(folder: Path, damage: str) -> None:
    fetch("first")
    (path,) = (folder / "objects").glob("*.o")
    DAMAGES[damage](path)

    assert fetch("second") == "second"
    assert fetch("third") == "second"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suffix", [".o", ".json"])
def test_every_single_byte_that_changes_is_refused(folder: Path, suffix: str) -> None:
    """Of the object and of its record."""
    fetch("first" * 100)
    (path,) = (folder / "objects").glob(f"*{suffix}")
    (code,) = (folder / "objects").glob("*.o")
    whole, facts = path.read_bytes(), FACTS
    generator = random.Random(0)

    accepted = []
    for position in generator.choices(range(len(whole)), k=1000):
        changed = bytearray(whole)
        changed[position] ^= 1 << generator.randrange(8)
        path.write_bytes(changed)
        if cache._checked(code, facts) is not None:
            accepted.append(position)

    assert accepted == []
    path.write_bytes(whole)
    assert cache._checked(code, facts) == code.read_bytes()


def test_an_object_that_cannot_be_loaded_is_built_anew(folder: Path) -> None:
    def unloadable(path: Path) -> str:
        raise RuntimeError("cannot map")

    fetch("first")

    with pytest.warns(UserWarning, match="cannot map"):
        found = cache.fetch(
            FACTS,
            build=lambda: "second",
            save=save,
            load=unloadable,
        )

    assert found == "second"


# ---- where nothing is stored
@pytest.fixture
def open_folder(folder: Path) -> Path:
    """The cache's folder, which everybody can write."""
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)
    return folder


def test_a_folder_that_others_can_write_is_not_used(open_folder: Path) -> None:
    with pytest.warns(UserWarning, match="can be written by others"):
        assert fetch() == "built"

    assert written(open_folder) == []


def test_a_folder_that_is_not_used_is_told_once(open_folder: Path) -> None:
    with pytest.warns(UserWarning, match="can be written by others"):
        fetch("first")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fetch("second") == "second"


def test_a_folder_below_one_that_others_can_write_is_not_used(folder: Path) -> None:
    folder.parent.chmod(0o777)

    with pytest.warns(UserWarning, match="can be written by others"):
        assert fetch() == "built"


def test_the_folder_of_another_user_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)

    with pytest.warns(UserWarning, match="belongs to another user"):
        assert fetch() == "built"


def test_a_place_that_is_no_folder_costs_speed_only(folder: Path) -> None:
    folder.write_text("a file")

    with pytest.warns(UserWarning, match="outblas keeps no compiled kernels"):
        assert fetch() == "built"


def test_a_full_disk_costs_speed_only(folder: Path) -> None:
    def full(built: str, path: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.warns(UserWarning, match="No space left"):
        found = cache.fetch(FACTS, build=lambda: "built", save=full, load=Path.read_text)

    assert found == "built"
    assert written(folder) == []


# ---- how much is stored
def test_pruning_keeps_the_newest(folder: Path) -> None:
    for number in range(4):
        fetch("x" * 100, {"number": number})
        path = folder / "objects" / f"{cache.digest({'number': number})}.o"
        os.utime(path, (number, number))

    cache.prune(folder / "objects", limit=250)

    newest = [f"{cache.digest({'number': number})}.o" for number in (2, 3)]
    assert [name for name in written(folder) if name.endswith(".o")] == sorted(newest)


# ---- several processes
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

"""The store of compiled kernels: whole objects only, one builder at a time, and what processes that
write, read, evict and are killed at once leave behind.
"""

import errno
import fcntl
import functools
import multiprocessing
import os
import random
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from support import children

from outblas.base import cache

pytestmark = pytest.mark.long

SIZE = 2000  # bytes of an object
OBJECTS = 12
FETCHES = 60  # by each of several processes
LIMIT = 4 * SIZE  # so that most of them are evicted again and again
PROCESSES = 4


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of compiled kernels, which is not there yet."""
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "objects"


def code_of(number: int) -> bytes:
    return b"%d " % number * (SIZE // 3)


def facts_of(number: int) -> dict[str, object]:
    return {"kernel": number}


def save(code: bytes, path: Path) -> None:
    path.write_bytes(code)


def fetch(
    number: int,
    *,
    build: Callable[[], bytes] | None = None,
    save: Callable[[bytes, Path], None] = save,
) -> bytes:
    """The object of this number; by default, `code_of` builds it."""
    if build is None:
        build = functools.partial(code_of, number)
    return cache.fetch(facts_of(number), build=build, save=save, load=bytes)


def is_kept(number: int) -> bool:
    """Whether the object of this number is loaded from the disk as it was built."""
    return fetch(number, build=lambda: b"built again") == code_of(number)


def scratch_of(folder: Path) -> list[str]:
    """The names of the folders in which objects are written."""
    return [path.name for path in folder.glob(".new-*")]


def objects_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.rglob("*.o"))


def name_of(number: int) -> str:
    return f"{cache.digest(facts_of(number))}.o"


# ---- what is stored
def test_an_object_is_built_once_and_is_one_file(folder: Path) -> None:
    fetch(0)

    assert is_kept(0)
    assert objects_in(folder) == [name_of(0)]
    assert scratch_of(folder) == []


@pytest.mark.filterwarnings("ignore")
def test_every_single_byte_that_changes_is_refused(folder: Path) -> None:
    fetch(0)
    (path,) = folder.glob("*.o")
    whole = path.read_bytes()
    generator = random.Random(0)
    positions = [*range(len(whole) - SIZE), *generator.choices(range(len(whole)), k=300)]

    accepted = []
    for position in positions:
        changed = bytearray(whole)
        changed[position] ^= 1 << generator.randrange(8)
        path.write_bytes(changed)
        if cache.object_problem(path) is None:
            accepted.append(position)

    assert accepted == []
    path.write_bytes(whole)
    assert cache.object_problem(path) is None


NO_OBJECTS = {
    "nothing": b"",
    "cut off": b'{"sha256": "',
    "list": b"[]\n",
    "null": b"null\n",
    "digest that is a number": b'{"sha256": 3}\n',
    "deep": b"[" * 100_000,
    "not UTF-8": b"\xff\n",
}


@pytest.mark.filterwarnings("ignore:outblas does not load")
@pytest.mark.parametrize("content", NO_OBJECTS.values(), ids=NO_OBJECTS)
def test_what_is_no_object_is_built_anew_and_replaced(folder: Path, content: bytes) -> None:
    fetch(0)
    (path,) = folder.glob("*.o")
    path.write_bytes(content)

    assert fetch(0, build=lambda: b"second") == b"second"
    assert fetch(0) == b"second"


def test_an_object_that_cannot_be_loaded_is_built_anew(folder: Path) -> None:
    def unloadable(code: bytes) -> bytes:
        raise RuntimeError("cannot map")

    fetch(0)

    with pytest.warns(UserWarning, match="cannot map"):
        code = cache.fetch(facts_of(0), build=lambda: b"second", save=save, load=unloadable)

    assert code == b"second"


def test_a_folder_that_is_not_used_is_told_once(folder: Path) -> None:
    folder.parent.mkdir()
    folder.parent.chmod(0o777)

    with pytest.warns(UserWarning, match="can be written by others: set OUTBLAS_CACHE_DIR"):
        fetch(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fetch(0, build=lambda: b"second") == b"second"

    assert list(folder.parent.iterdir()) == []


def test_a_full_disk_costs_speed_only(folder: Path) -> None:
    def full(code: bytes, path: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.warns(UserWarning, match="No space left"):
        assert fetch(0, save=full) == code_of(0)

    assert objects_in(folder) == scratch_of(folder) == []


def test_pruning_keeps_the_newest(folder: Path) -> None:
    for number in range(4):
        fetch(number)
        os.utime(folder / name_of(number), (number, number))

    cache.prune(folder, limit=5 * (folder / name_of(0)).stat().st_size // 2)

    assert objects_in(folder) == sorted(name_of(number) for number in (2, 3))


# ---- eviction
def storm(fetches: int, seed: int) -> list[str]:
    """Fetches and evicts objects at random, so many times; returns what went wrong."""
    draw = random.Random(seed)
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(fetches):
            number = draw.randrange(OBJECTS)
            try:
                if fetch(number) != code_of(number):
                    wrong.append(f"{number} is another object")
                if draw.random() < 0.5:
                    cache.prune(cache.objects_folder(), limit=draw.randrange(LIMIT))
                if draw.random() < 0.2:
                    build = functools.partial(code_of, number)
                    cache.warm(facts_of(number), build=build, save=save)
            except Exception as error:
                wrong.append(f"{type(error).__name__}: {error}")
    return wrong


def test_eviction_beside_other_processes_neither_warns_nor_raises(folder: Path) -> None:
    pool = multiprocessing.get_context("fork").Pool(3)
    wrong = pool.starmap(storm, [(FETCHES, seed) for seed in range(3)])
    pool.close()
    pool.join()

    assert wrong == [[], [], []]
    assert scratch_of(folder) == []


# ---- what killed processes leave
def write_and(stay: Callable[[], None]) -> None:
    """Writes object 1, and stays where the scratch folder has its code."""

    def save_and_stay(code: bytes, path: Path) -> None:
        save(code, path)
        stay()

    fetch(1, save=save_and_stay)


def build_and(stay: Callable[[], None]) -> None:
    """Builds object 1, and stays there."""

    def build() -> bytes:
        stay()
        return code_of(1)

    fetch(1, build=build)


def test_the_scratch_folder_of_a_killed_process_goes_when_it_is_old(folder: Path) -> None:
    with children.staying(write_and):
        pass
    fetch(2)
    assert len(scratch_of(folder)) == 1

    then = time.time() - 2 * cache.LEFTOVER_SECONDS
    os.utime(folder / scratch_of(folder)[0], (then, then))
    fetch(3)

    assert scratch_of(folder) == []


# ---- cold starts: processes that want the same kernels of an empty cache
KERNELS = (0, 1)


def logged_build(number: int, log: Path) -> bytes:
    """Builds an object, and appends its number to a file that processes share."""
    with open(log, "a") as file:
        file.write(f"{number}\n")
    time.sleep(0.1)  # by when all others wait
    return code_of(number)


def no_flock(*_: object) -> None:
    """As on a file system without it."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.mark.parametrize("has_flock", [True, False])
@pytest.mark.filterwarnings("ignore:flock not supported")
def test_processes_on_an_empty_cache_build_each_kernel_once(
    has_flock: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They begin together, and half of them with the second kernel."""
    log, begin = tmp_path / "log", multiprocessing.get_context("fork").Barrier(PROCESSES)
    if not has_flock:
        monkeypatch.setattr(fcntl, "flock", no_flock)

    def fetch_all(numbers: Iterable[int]) -> bool:
        begin.wait(children.SECONDS)
        objects = {
            number: fetch(number, build=functools.partial(logged_build, number, log))
            for number in numbers
        }
        return objects == {number: code_of(number) for number in KERNELS}

    orders = [KERNELS, tuple(reversed(KERNELS))] * (PROCESSES // 2)
    started = [children.start(functools.partial(fetch_all, order)) for order in orders]
    statuses = [children.wait(child) for child in started]

    assert statuses == [0] * PROCESSES
    assert sorted(log.read_text().split()) == ["0", "1"]
    assert [cache.object_problem(path) for path in folder.glob("*.o")] == [None, None]


@pytest.mark.parametrize("killed", [build_and, write_and])
def test_one_of_those_that_wait_goes_on_for_a_process_that_is_killed(
    folder: Path, tmp_path: Path, killed: Callable[[Callable[[], None]], None]
) -> None:
    log = tmp_path / "log"

    def fetch_it() -> bool:
        return fetch(1, build=functools.partial(logged_build, 1, log)) == code_of(1)

    with children.staying(killed):
        started = [children.start(fetch_it) for _ in range(PROCESSES - 1)]
        time.sleep(0.2)
        built_beside_the_first = log.exists()
    statuses = [children.wait(child) for child in started]

    assert not built_beside_the_first
    assert statuses == [0] * (PROCESSES - 1)
    assert log.read_text() == "1\n"
    assert is_kept(1)


def test_who_waits_too_long_builds_for_himself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that hangs in a compile does not keep the others from their kernel for good."""
    monkeypatch.setattr(cache, "LOCK_TIMEOUT", 0.2)

    with children.staying(build_and):
        assert fetch(1) == code_of(1)

    assert is_kept(1)

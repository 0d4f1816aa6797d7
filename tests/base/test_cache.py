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

import filelock
import pytest
from support import children

from outblas.base import cache

pytestmark = pytest.mark.long

SIZE = 2000  # bytes of an object
OBJECTS = 12
FETCHES = 200  # by each of several processes
LIMIT = 4 * SIZE  # so that most of them are evicted again and again


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of compiled kernels, which is not there yet."""
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "objects"


@pytest.fixture
def some_lock(tmp_path: Path) -> Path:
    """A lock file for `cache.locked`, which is not there yet."""
    return tmp_path / "some.lock"


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
    return cache.fetch(facts_of(number), build=build, save=save, load=Path.read_bytes)


def kept(number: int) -> bool:
    """Whether the object of this number is loaded from the disk as it was built."""
    return fetch(number, build=lambda: b"built again") == code_of(number)


def scratch_of(folder: Path) -> list[str]:
    """The names of the folders in which objects are written."""
    return [path.name for path in folder.glob(".new-*")]


def age(paths: Iterable[Path], seconds: float = 2 * cache.LEFTOVER_SECONDS) -> None:
    """As if these had been written so long ago, or the clock had jumped."""
    then = time.time() - seconds
    for path in paths:
        os.utime(path, (then, then), follow_symlinks=False)


def age_all(folder: Path, seconds: float = 2 * cache.LEFTOVER_SECONDS) -> None:
    """As if everything in a folder had been written so long ago."""
    age([*folder.iterdir(), *folder.glob("*/*")], seconds)


# ---- what is stored
def names_in(folder: Path) -> list[str]:
    """The names of all files of the cache."""
    return sorted(path.name for path in folder.parent.rglob("*") if path.is_file())


def test_an_object_is_built_once_and_leaves_its_record_alone_beside_it(folder: Path) -> None:
    fetch(0)

    assert kept(0)
    name = cache.digest(facts_of(0))
    assert names_in(folder) == [f"{name}.json", f"{name}.o"]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "an object cut off": lambda path: path.write_text("fir"),
    "no record": lambda path: path.with_suffix(".json").unlink(),
    "a record cut off": lambda path: path.with_suffix(".json").write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_object_is_built_anew_and_replaced(folder: Path, damage: str) -> None:
    fetch(0)
    (path,) = folder.glob("*.o")
    DAMAGES[damage](path)

    assert fetch(0, build=lambda: b"second") == b"second"
    assert fetch(0) == b"second"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suffix", [".o", ".json"])
def test_every_single_byte_that_changes_is_refused(folder: Path, suffix: str) -> None:
    """Of the object and of its record."""
    fetch(0)
    (path,), (code,) = folder.glob(f"*{suffix}"), folder.glob("*.o")
    whole = path.read_bytes()
    generator = random.Random(0)

    accepted = []
    for position in generator.choices(range(len(whole)), k=1000):
        changed = bytearray(whole)
        changed[position] ^= 1 << generator.randrange(8)
        path.write_bytes(changed)
        if cache._checked(code, facts_of(0)) is not None:
            accepted.append(position)

    assert accepted == []
    path.write_bytes(whole)
    assert cache._checked(code, facts_of(0)) == code.read_bytes()


def test_an_object_that_cannot_be_loaded_is_built_anew(folder: Path) -> None:
    def unloadable(path: Path) -> bytes:
        raise RuntimeError("cannot map")

    fetch(0)

    with pytest.warns(UserWarning, match="cannot map"):
        code = cache.fetch(facts_of(0), build=lambda: b"second", save=save, load=unloadable)

    assert code == b"second"


def test_a_folder_that_is_not_used_is_told_once(folder: Path) -> None:
    folder.parent.mkdir()
    folder.parent.chmod(0o777)

    with pytest.warns(UserWarning, match="can be written by others"):
        fetch(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fetch(0, build=lambda: b"second") == b"second"

    assert names_in(folder) == []


def test_a_full_disk_costs_speed_only(folder: Path) -> None:
    def full(code: bytes, path: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.warns(UserWarning, match="No space left"):
        assert fetch(0, save=full) == code_of(0)

    assert names_in(folder) == []


def test_pruning_keeps_the_newest(folder: Path) -> None:
    for number in range(4):
        fetch(number)
        os.utime(folder / f"{cache.digest(facts_of(number))}.o", (number, number))

    cache.prune(folder, limit=5 * len(code_of(0)) // 2)

    newest = [f"{cache.digest(facts_of(number))}.o" for number in (2, 3)]
    assert [name for name in names_in(folder) if name.endswith(".o")] == sorted(newest)


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
    """Writes object 1, and stays where the scratch folder has the code and no record."""

    def save_and_stay(code: bytes, path: Path) -> None:
        save(code, path)
        stay()

    fetch(1, save=save_and_stay)


def kill_one_that_writes() -> None:
    """Leaves what a process leaves that is killed while it writes object 1."""
    with children.staying(write_and):
        pass


def test_an_old_scratch_folder_of_a_killed_process_goes(folder: Path) -> None:
    kill_one_that_writes()
    age_all(folder)

    fetch(2)

    assert scratch_of(folder) == []


@pytest.mark.parametrize("jump", [1, -1], ids=["to the future", "to the past"])
def test_scratch_folders_of_live_processes_stay_whatever_the_clock_says(
    folder: Path, jump: int
) -> None:
    with children.staying(write_and):
        before = scratch_of(folder)
        age_all(folder, jump * 10 * cache.LEFTOVER_SECONDS)

        fetch(2)

        assert scratch_of(folder) == before != []


def test_a_record_without_an_object_goes(folder: Path) -> None:
    fetch(0)
    left = folder / f"{'3' * 32}.json"
    left.write_text("{}")
    age_all(folder)

    fetch(1)

    assert not left.exists()


# ---- lock files


@pytest.fixture
def old_lock_file(folder: Path) -> Path:
    """A lock file beside an object, from long ago."""
    fetch(0)
    lock_file = folder / f"{'1' * 32}.lock"
    lock_file.touch()
    age_all(folder)
    return lock_file


def test_a_lock_file_that_is_held_stays(old_lock_file: Path) -> None:
    with filelock.FileLock(old_lock_file):
        age([old_lock_file])
        fetch(1)

        assert old_lock_file.exists()


def test_who_waits_for_a_lock_that_is_removed_waits_on(folder: Path, tmp_path: Path) -> None:
    """The lock file goes while others wait for it: still only one builds at a time."""
    log = tmp_path / "log"

    def build() -> bytes:
        with open(log, "a") as file:
            file.write("begin\n")
            file.flush()
            time.sleep(0.02)
            file.write("end\n")
        return code_of(0)

    def fetch_and_remove() -> bool:
        for _ in range(8):
            fetch(0, build=build)
            for suffix in (".o", ".json"):
                (folder / f"{cache.digest(facts_of(0))}{suffix}").unlink(missing_ok=True)
        return True

    started = [children.start(fetch_and_remove) for _ in range(3)]
    statuses = [children.wait(child) for child in started]

    lines = log.read_text().split()
    assert statuses == [0, 0, 0]
    assert len(lines) >= 16
    assert lines == ["begin", "end"] * (len(lines) // 2)


# ---- cold starts: processes that want the same kernels of an empty cache
KERNELS = (0, 1)


def logged_build(number: int, log: Path) -> bytes:
    """Builds an object, and appends its number to a file that processes share."""
    with open(log, "a") as file:
        file.write(f"{number}\n")
    time.sleep(0.1)  # by when all others wait
    return code_of(number)


def test_ten_processes_on_an_empty_cache_build_each_kernel_once(
    folder: Path, tmp_path: Path
) -> None:
    """They begin together, and half of them with the second kernel."""
    log, begin = tmp_path / "log", multiprocessing.get_context("fork").Barrier(10)

    def fetch_all(numbers: Iterable[int]) -> bool:
        begin.wait(children.SECONDS)
        found = {
            number: fetch(number, build=functools.partial(logged_build, number, log))
            for number in numbers
        }
        return found == {number: code_of(number) for number in KERNELS}

    orders = [KERNELS, tuple(reversed(KERNELS))] * 5
    started = [children.start(functools.partial(fetch_all, order)) for order in orders]
    statuses = [children.wait(child) for child in started]

    assert statuses == [0] * 10
    assert sorted(log.read_text().split()) == ["0", "1"]
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".json", ".o", ".o"]
    assert [cache.object_problem(path) for path in folder.glob("*.o")] == [None, None]


def build_and(stay: Callable[[], None]) -> None:
    """Builds object 1, and stays there."""

    def build() -> bytes:
        stay()
        return code_of(1)

    fetch(1, build=build)


def replace_and(stay: Callable[[], None]) -> None:
    """Writes object 1, and stays where the cache has the code and no record."""
    replace = os.replace

    def replace_code_and_stay(source: Path, target: Path) -> None:
        if Path(target).suffix == ".json":
            stay()
        replace(source, target)

    os.replace = replace_code_and_stay  # type: ignore[assignment]  # in a forked child alone
    fetch(1)


@pytest.mark.parametrize("killed", [build_and, write_and, replace_and])
def test_one_of_those_that_wait_goes_on_for_a_process_that_is_killed(
    folder: Path, tmp_path: Path, killed: Callable[[Callable[[], None]], None]
) -> None:
    log = tmp_path / "log"
    reading, writing = os.pipe()

    def fetch_it() -> bool:
        os.write(writing, b"x")
        return fetch(1, build=functools.partial(logged_build, 1, log)) == code_of(1)

    with children.staying(killed):
        started = [children.start(fetch_it) for _ in range(9)]
        begun = 0
        while begun < len(started):
            begun += len(os.read(reading, len(started)))
        time.sleep(0.2)
        built_beside_the_first = log.exists()
    statuses = [children.wait(child) for child in started]
    os.close(reading)
    os.close(writing)

    assert not built_beside_the_first
    assert statuses == [0] * 9
    assert log.read_text() == "1\n"
    assert kept(1)
    assert not list(folder.glob("*.lock"))


def test_who_waits_too_long_builds_for_himself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that hangs in a compile does not keep the others from their kernel for good."""
    monkeypatch.setattr(cache, "LOCK_TIMEOUT", 0.2)

    with children.staying(build_and):
        assert fetch(1) == code_of(1)

    assert kept(1)


# ---- file systems without flock


@pytest.fixture(params=[errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK], ids=os.strerror)
def without_flock(
    request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache lies on a file system without flock, which says so with an error of its own."""

    def flock(*_: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


one_error = pytest.mark.parametrize("without_flock", [errno.ENOSYS], indirect=True)


@pytest.mark.usefixtures("without_flock")
@pytest.mark.filterwarnings("ignore:flock not supported")
def test_a_file_system_without_flock_costs_no_result() -> None:
    assert fetch(0) == code_of(0)
    assert kept(0)


@one_error
@pytest.mark.usefixtures("without_flock")
@pytest.mark.filterwarnings("ignore:flock not supported")
def test_without_flock_processes_still_keep_apart(some_lock: Path) -> None:
    """filelock 3.24 to 4.0 let both in: the second removed the mark of the first."""

    def is_kept_out() -> bool:
        try:
            with cache.locked(some_lock, 0.3, required=True):
                return False
        except TimeoutError:
            return True

    with cache.locked(some_lock):
        assert children.succeeds(is_kept_out)


@one_error
@pytest.mark.usefixtures("without_flock")
@pytest.mark.filterwarnings("ignore:flock not supported")
def test_without_flock_a_killed_holder_is_not_waited_for(some_lock: Path) -> None:
    def hold_and(stay: Callable[[], None]) -> None:
        with cache.locked(some_lock):
            stay()

    with children.staying(hold_and):
        pass  # until it is killed

    with cache.locked(some_lock, 30.0, required=True):  # TimeoutError, if it waited
        assert some_lock.exists()

"""Processes that write, read and evict compiled kernels at once, and what killed ones
leave behind.
"""

import errno
import fcntl
import multiprocessing
import os
import random
import signal
import time
import warnings
from pathlib import Path

import filelock
import pytest

from outblas.core import cache

pytestmark = pytest.mark.long

SIZE = 2000  # bytes of an object
OBJECTS = 12
FETCHES = 200  # by each of several processes
LIMIT = 4 * SIZE  # so that most of them are evicted again and again


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "objects"


def code_of(number):
    return b"%d " % number * (SIZE // 3)


def fetch(number, build=None, save=None):
    return cache.fetch(
        {"kernel": number},
        build=build or (lambda: code_of(number)),
        save=save or (lambda built, path: path.write_bytes(built) and None),
        load=Path.read_bytes,
    )


def storm(fetches, seed):
    """Fetches and evicts objects at random, so many times; returns what went wrong."""
    draw, wrong = random.Random(seed), []
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
                    cache.warm({"kernel": number}, build=lambda n=number: code_of(n), save=_save)
            except Exception as error:
                wrong.append(f"{type(error).__name__}: {error}")
    return wrong


def _save(built, path) -> None:
    path.write_bytes(built)


def evict_beside_others(fetches, processes):
    """Lets processes fetch and evict at once, each so many times; returns what went wrong."""
    context = multiprocessing.get_context("fork")
    with context.Pool(processes) as pool:
        found = pool.starmap(storm, [(fetches, seed) for seed in range(processes)])
    return [line for wrong in found for line in wrong]


def test_eviction_beside_other_processes_neither_warns_nor_raises(folder) -> None:
    wrong = evict_beside_others(FETCHES, 3)

    assert wrong == []
    assert not list(folder.glob(".new-*"))


def leave_behind(folder, number):
    """A child that is killed while it writes an object."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:

        def save(built, path):
            path.write_bytes(built)
            os.write(writing, b"x")
            time.sleep(60)

        fetch(number, save=save)
        os._exit(1)
    os.read(reading, 1)
    return child


def age(folder, seconds=2 * cache.LEFTOVER_SECONDS) -> None:
    """As if everything had been written earlier, or the clock had jumped."""
    then = time.time() - seconds
    for path in [*folder.iterdir(), *folder.glob("*/*")]:
        os.utime(path, (then, then))


def scratch_of(folder):
    return [path.name for path in folder.glob(".new-*")]


def test_scratch_folders_of_killed_processes_are_removed(folder) -> None:
    fetch(0)
    child = leave_behind(folder, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert scratch_of(folder)
    cache.prune(folder)
    assert scratch_of(folder)  # it is too young: its owner might not have locked it yet

    age(folder)
    fetch(2)
    assert not scratch_of(folder)
    assert fetch(1) == code_of(1)


@pytest.mark.parametrize("jump", [1, -1], ids=["to the future", "to the past"])
def test_scratch_folders_of_live_processes_stay_whatever_the_clock_says(folder, jump) -> None:
    fetch(0)
    child = leave_behind(folder, 1)
    try:
        before = scratch_of(folder)
        age(folder, jump * 10 * cache.LEFTOVER_SECONDS)
        fetch(2)
        assert scratch_of(folder) == before != []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_scratch_of_earlier_versions_and_what_is_no_folder_go(folder) -> None:
    fetch(0)
    (folder / ".new-old").mkdir()
    (folder / ".new-old" / "x.o").write_bytes(b"half")
    (folder / ".new-link").symlink_to(folder.parent)
    (folder / ".new-file").write_bytes(b"")
    then = time.time() - 2 * cache.LEFTOVER_SECONDS
    for path in folder.glob(".new-*"):
        os.utime(path, (then, then), follow_symlinks=False)
    fetch(1)
    assert not scratch_of(folder)
    assert fetch(0, build=lambda: b"lost") == code_of(0)


def test_lock_files_do_not_pile_up(folder) -> None:
    for number in range(5):
        fetch(number)
    assert not list(folder.glob("*.lock"))


def test_lock_files_that_were_left_go_and_held_ones_stay(folder) -> None:
    fetch(0)
    left, held = folder / f"{'1' * 32}.lock", folder / f"{'2' * 32}.lock"
    left.touch()
    with filelock.FileLock(held):
        age(folder)
        fetch(1)
        assert not left.exists()
        assert held.exists()


def test_records_without_an_object_go(folder) -> None:
    fetch(0)
    (folder / f"{'3' * 32}.json").write_text("{}")
    age(folder)
    fetch(1)
    assert not (folder / f"{'3' * 32}.json").exists()
    assert len(list(folder.glob("*.json"))) == 2


def test_who_waits_for_a_lock_that_is_removed_waits_on(folder) -> None:
    """The lock file goes while others wait for it: still only one builds at a time."""
    log = folder.parent.parent / "log"

    def build():
        with open(log, "a") as file:
            file.write("begin\n")
            file.flush()
            time.sleep(0.02)
            file.write("end\n")
        return code_of(0)

    def remove_and_fetch(seed):
        for _ in range(8):
            fetch(0, build=build)
            for suffix in (".o", ".json"):
                (folder / f"{cache.digest({'kernel': 0})}{suffix}").unlink(missing_ok=True)

    children = []
    for seed in range(3):
        child = os.fork()
        if child == 0:
            try:
                remove_and_fetch(seed)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    lines = log.read_text().split()
    assert len(lines) >= 16
    assert lines == ["begin", "end"] * (len(lines) // 2)


def without_flock(monkeypatch: pytest.MonkeyPatch, number) -> None:
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_flock_costs_no_result(
    folder, monkeypatch: pytest.MonkeyPatch, number
) -> None:
    without_flock(monkeypatch, number)
    assert fetch(0) == code_of(0)
    assert fetch(0, build=lambda: b"again") == code_of(0)
    assert not list(folder.glob("*.lock"))
    assert not scratch_of(folder)


def test_a_file_system_without_flock_where_warnings_are_errors(
    folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_flock(monkeypatch, errno.ENOSYS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fetch(0) == code_of(0)
        assert fetch(0, build=lambda: b"again") == code_of(0)


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_without_flock_processes_still_keep_apart(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """filelock 3.24 to 4.0 let both in: the second removed the mark of the first."""
    without_flock(monkeypatch, errno.ENOSYS)
    path = folder.parent.parent / "some.lock"
    with cache.locked(path):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with cache.locked(path, 0.3, required=True):
                    status = 2
            except TimeoutError:
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not path.exists()


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_without_flock_a_killed_holder_is_not_waited_for(
    folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_flock(monkeypatch, errno.ENOSYS)
    path = folder.parent.parent / "some.lock"
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with cache.locked(path):
            os.write(writing, b"x")
            time.sleep(60)
        os._exit(0)
    os.read(reading, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)

    with cache.locked(path, 30.0, required=True):  # TimeoutError, if it waited
        held = path.exists()

    assert held

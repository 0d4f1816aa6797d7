"""What the compile worker promises of each job, whatever becomes of its processes, of this one and
of the disk.
"""

import contextlib
import functools
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import children
from support.noted_compiles import NotedKey
from support.sweeps import gone, soon

from outblas.base import compile_worker, compiling
from outblas.base.compile_worker import CompileWorker, described, remade
from outblas.base.compiling import CompileFailed, CompilePending
from outblas.base.processes import WorkerProcess

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

Key = Callable[..., NotedKey]


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Key:
    """Makes keys of kernels that are compiled into a cache of the test's own."""
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OUTBLAS_COMPILE", "background")
    return lambda kernel, act="": NotedKey(kernel, str(tmp_path / "notes"), act)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileWorker]:
    """The worker of this process, with one process at a time."""
    lean = functools.partial(WorkerProcess, [NotedKey.__module__])
    monkeypatch.setattr(compile_worker, "WorkerProcess", lean)
    worker = CompileWorker()
    worker._most = 1
    monkeypatch.setattr(compile_worker, "_worker", worker)
    yield worker
    worker.close()


def go(key: NotedKey) -> None:
    Path(f"{key.notes}.go").touch()


def fetch(key: NotedKey) -> bytes | None:
    """The kernel as a call gets it; None while it is compiled."""
    try:
        with compiling.deferred():
            return key.fetch()
    except CompilePending:
        return None


def fetched(key: NotedKey) -> bytes | None:
    """The kernel after all jobs have ended."""
    assert fetch(key) is None
    compile_worker.await_all(lambda left: None)
    return fetch(key)


def began(key: NotedKey, times: int = 1) -> int:
    """Waits until a process has begun a compile, and returns it."""
    assert soon(lambda: len(key.processes) == times)
    return key.processes[-1]


# ---- jobs
def test_another_process_compiles(worker: CompileWorker, key: Key) -> None:
    quick, generation = key("quick"), compiling.generation

    assert fetched(quick) == b"quick"

    assert compiling.generation == generation + 1
    assert len(quick.processes) == 1
    assert quick.processes != [os.getpid()]


def test_who_waits_compiles_itself(worker: CompileWorker, key: Key) -> None:
    quick = key("quick")
    with compiling.deferred(), compiling.waiting():
        assert quick.fetch() == b"quick"
    other = key("other")
    assert other.fetch() == b"other"

    assert quick.processes == other.processes == [os.getpid()]


def test_a_job_is_begun_once(worker: CompileWorker, key: Key) -> None:
    slow = key("slow", "wait")
    assert [fetch(slow) for _ in range(3)] == [None] * 3
    began(slow)
    assert fetch(slow) is None
    go(slow)
    compile_worker.await_all(lambda left: None)

    assert fetch(slow) == b"slow"
    assert len(slow.processes) == 1


def test_what_calls_want_comes_before_what_none_has_asked_for(
    worker: CompileWorker, key: Key, tmp_path: Path
) -> None:
    first, *ahead = key("first", "wait"), *(key(f"ahead{i}") for i in range(3))
    fetch(first)
    began(first)
    for each in ahead:
        path = tmp_path / "cache" / "objects" / each.kernel
        with pytest.raises(CompilePending):
            worker.request(each, path, ahead=True)
    with pytest.raises(CompilePending):
        worker.request(ahead[2], path)
    wanted = key("wanted")
    fetch(wanted)
    left: list[int] = []
    go(first)
    compile_worker.await_all(left.append)

    order = [line.split()[0] for line in Path(first.notes).read_text().splitlines()]
    assert order == ["first", "ahead2", "wanted", "ahead0", "ahead1"]
    assert left[0] == 5
    assert left == sorted(left, reverse=True)


@pytest.mark.parametrize(
    ("act", "reason"),
    [("raise", "no such tile"), ("abort", "SIGABRT"), ("exit", "exit status 3")],
)
def test_what_cannot_be_compiled_is_not_tried_again(
    act: str, reason: str, worker: CompileWorker, key: Key
) -> None:
    bad, good = key("bad", act), key("good")

    with pytest.raises(CompileFailed, match=reason):
        fetched(bad)
    with pytest.raises(CompileFailed, match="bad could not be compiled"):
        fetch(bad)

    assert len(bad.processes) == 1
    assert [*compile_worker.failures()] == ["bad"]
    assert fetched(good) == b"good"


def test_a_compile_that_hangs_is_ended(
    worker: CompileWorker, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched(key("quick"))  # by when a process is there
    monkeypatch.setattr(compile_worker, "SECONDS", 0.5)
    hanging = key("hanging", "wait")

    with pytest.raises(CompileFailed, match="not done"):
        fetched(hanging)

    assert soon(lambda: gone(hanging.processes[0]))


def test_a_process_that_is_killed_is_replaced(worker: CompileWorker, key: Key) -> None:
    slow = key("slow", "wait")
    fetch(slow)
    os.kill(began(slow), signal.SIGKILL)
    began(slow, 2)
    go(slow)
    compile_worker.await_all(lambda left: None)

    assert fetch(slow) == b"slow"


def test_a_process_that_is_killed_twice_is_not(worker: CompileWorker, key: Key) -> None:
    slow = key("slow", "wait")
    fetch(slow)
    for times in (1, 2):
        os.kill(began(slow, times), signal.SIGKILL)
    compile_worker.await_all(lambda left: None)

    with pytest.raises(CompileFailed, match="SIGKILL"):
        fetch(slow)
    assert len(slow.processes) == 2


# ---- where the caller compiles after all
@pytest.mark.parametrize("act", ["unsaved", "other"])
def test_what_the_disk_does_not_keep_is_compiled_by_the_call(
    act: str, worker: CompileWorker, key: Key
) -> None:
    """And what the worker finds other facts of."""
    assert fetched(key("kernel", act)) == b"kernel"
    assert key("kernel", act).processes[-1] == os.getpid()


def test_what_the_disk_loses_is_compiled_by_the_call(
    worker: CompileWorker, key: Key, tmp_path: Path
) -> None:
    quick = key("quick")
    fetched(quick)
    for path in (tmp_path / "cache" / "objects").glob("*.o"):
        path.unlink()

    assert fetch(quick) == b"quick"
    assert quick.processes[1:] == [os.getpid()]


@pytest.mark.filterwarnings("ignore:outblas keeps no compiled kernels")
def test_where_the_cache_is_lost_meanwhile_the_call_compiles(
    worker: CompileWorker, key: Key, tmp_path: Path
) -> None:
    slow, folder = key("slow", "wait"), tmp_path / "cache" / "objects"
    fetch(slow)
    began(slow)
    shutil.rmtree(folder)
    folder.write_text("no folder")
    go(slow)
    compile_worker.await_all(lambda left: None)

    assert compile_worker.failures() == {}
    assert fetch(slow) == b"slow"
    assert slow.processes[-1] == os.getpid()


@pytest.mark.filterwarnings("ignore:outblas keeps no compiled kernels")
def test_without_a_cache_the_call_compiles(
    worker: CompileWorker, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", "/proc/nowhere")
    quick = key("quick")

    assert fetch(quick) == b"quick"
    assert quick.processes == [os.getpid()]


@pytest.mark.parametrize(
    ("attribute", "value"), [("platform", "darwin"), ("frozen", True), ("executable", "/nowhere")]
)
def test_without_processes_the_call_compiles(
    attribute: str, value: Any, worker: CompileWorker, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, attribute, value, raising=False)
    quick = key("quick")

    assert fetched(quick) == b"quick"
    assert quick.processes == [os.getpid()]


def test_a_key_that_is_not_data_is_compiled_by_the_call(
    worker: CompileWorker, key: Key, tmp_path: Path
) -> None:
    odd = NotedKey("odd", str(tmp_path / "notes"), Text())

    assert fetch(odd) == b"odd"


class Text(str):
    """A string with more than its characters."""


# ---- processes
def test_a_process_that_has_nothing_to_do_ends(
    worker: CompileWorker, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_worker, "IDLE_SECONDS", 0.2)
    quick, later = key("quick"), key("later")
    fetched(quick)

    assert soon(lambda: gone(quick.processes[0]))
    assert soon(lambda: worker._threads == 0)
    assert fetched(later) == b"later"
    assert later.processes != quick.processes


@pytest.mark.parametrize("fate", ["killed", "ends", "raises"])
def test_no_process_outlives_this_one(fate: str, key: Key, tmp_path: Path) -> None:
    slow = key("slow", "wait")
    program = PROGRAM.format(path=sys.path, slow=slow)
    driver = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, text=True)
    process = began(slow)
    if fate == "killed":
        driver.kill()
    else:
        driver.communicate("1 / 0\n" if fate == "raises" else "pass\n")
    status = driver.wait(20)

    assert status == {"killed": -signal.SIGKILL, "ends": 0, "raises": 1}[fate]
    assert soon(lambda: gone(process))
    assert fetch_here(key("slow")) == b"slow"  # the lock is free


PROGRAM = """
import sys
sys.path[:] = {path!r}
from support.noted_compiles import NotedKey
from outblas.base import compile_worker, compiling, processes
lean = [NotedKey.__module__]
compile_worker.WorkerProcess = lambda **given: processes.WorkerProcess(lean, **given)
compiling.must_wait = lambda: False  # it would import torch
with compiling.deferred():
    try:
        {slow!r}.fetch()
    except compiling.CompilePending:
        exec(sys.stdin.readline())
"""


def fetch_here(key: NotedKey) -> bytes:
    with compiling.waiting():
        return key.fetch()


def test_two_processes_that_want_one_kernel_compile_it_once(
    worker: CompileWorker, key: Key
) -> None:
    slow = key("slow", "wait")
    driver = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(path=sys.path, slow=slow)],
        stdin=subprocess.PIPE,
        text=True,
    )
    began(slow)
    assert fetch(slow) is None
    time.sleep(0.5)  # by when this process's worker waits for the lock
    go(slow)
    compile_worker.await_all(lambda left: None)
    driver.communicate("pass\n")

    assert fetch(slow) == b"slow"
    assert len(slow.processes) == 1


def test_another_goes_on_for_a_process_that_is_killed(worker: CompileWorker, key: Key) -> None:
    slow = key("slow", "wait")
    driver = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(path=sys.path, slow=slow)], stdin=subprocess.PIPE
    )
    began(slow)
    assert fetch(slow) is None
    driver.kill()
    driver.wait()
    began(slow, 2)
    go(slow)
    compile_worker.await_all(lambda left: None)

    assert fetch(slow) == b"slow"


def test_a_forked_child_has_a_worker_of_its_own(worker: CompileWorker, key: Key) -> None:
    slow, generation = key("slow", "wait"), compiling.generation
    fetch(slow)
    process = began(slow)

    def of_child() -> bool:
        its = key("its")
        assert compiling.generation > generation, "plans would wait for the parent's worker"
        return fetched(its) == b"its" and process not in its.processes

    assert children.wait(children.start(of_child)) == 0
    assert not gone(process)
    go(slow)
    compile_worker.await_all(lambda left: None)
    assert fetch(slow) == b"slow"
    assert slow.processes == [process]


def test_a_daemonic_process_compiles_beside_itself(key: Key) -> None:
    quick = key("quick")
    started = multiprocessing.get_context("spawn").Process(
        target=fetch_and_wait, args=(quick,), daemon=True
    )
    started.start()
    started.join(100)

    assert started.exitcode == 0
    assert len(quick.processes) == 1
    assert quick.processes != [started.pid]


def fetch_and_wait(key: NotedKey) -> None:
    assert fetched(key) is not None


def test_a_folder_that_is_gone_is_no_obstacle(
    worker: CompileWorker, key: Key, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    monkeypatch.syspath_prepend("")  # where Python looks for modules in the folder that is gone
    quick = key("quick")

    assert fetched(quick) == b"quick"
    assert quick.processes != [os.getpid()]


def test_every_job_ends_whichever_processes_are_killed(
    worker: CompileWorker, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads want kernels in orders of their own, while somebody kills processes."""
    worker._most, dice = 2, random.Random(7)
    keys = [key(f"kernel{i}", "nap") for i in range(24)]
    done, killed = threading.Event(), set()

    def want() -> None:
        for each in random.Random(threading.get_ident()).sample(keys, len(keys)):
            with contextlib.suppress(CompileFailed):
                fetch(each)

    def kill() -> None:
        while not done.wait(dice.random()):
            notes = Path(keys[0].notes)
            lines = notes.read_text().splitlines() if notes.exists() else []
            process = int(lines[-1].split()[1]) if lines else os.getpid()
            if process != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
                    killed.add(process)

    threads = [threading.Thread(target=want) for _ in range(3)]
    killer = threading.Thread(target=kill)
    for thread in (*threads, killer):
        thread.start()
    for thread in threads:
        thread.join()
    compile_worker.await_all(lambda left: None)
    done.set()
    killer.join()

    failed = compile_worker.failures()
    assert killed
    assert all("SIGKILL" in reason for reason in failed.values()), failed
    assert compiling.unfinished == set()
    for each in keys:
        if each.kernel not in failed:
            assert fetch(each) == each.kernel.encode()


# ---- keys as data
class Pair(NamedTuple):
    first: object
    second: object


@dataclass(frozen=True)
class Record:
    dtype: torch.dtype
    inner: object


@pytest.mark.parametrize(
    "value",
    [
        Record(torch.bfloat16, Pair((1, (2.5, "x")), None)),
        (True, 1, 1.0, "1", ()),
        Pair(("dtype", "bfloat16"), Record(torch.float8_e4m3fn, ())),
    ],
    ids=["nested", "types", "tagged"],
)
def test_a_key_is_made_again_from_its_description(value: Any) -> None:
    again = remade(described(value))

    assert again == value
    assert repr(again) == repr(value)


@pytest.mark.parametrize(
    "value", [[1], {1: 2}, object(), Text("x"), print], ids=lambda value: type(value).__name__
)
def test_what_is_not_data_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="is not data"):
        described((1, value))

"""Worker processes: every message boundary at which one may die, late answers, stuck ones, and what
they leave.
"""

import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import chores
from support.paths import TESTS
from support.sweeps import gone, soon

from outblas.autotune.measure import processes, serve, supervisor
from outblas.autotune.measure.processes import (
    Deadline,
    RemoteError,
    WorkerExited,
    WorkerProcess,
    WorkerStartError,
    WorkerTimeout,
)
from outblas.autotune.measure.serve import ACCEPTED, CALL, ERROR, READY, RESULT, Frame, Reader

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes"),
]
SCRIPTED = str(TESTS / "support" / "scripted_worker.py")
SECONDS = 20.0  # for what takes milliseconds

YES = bytes([128, 4, 136, 46])  # True, pickled
NO = bytes([128, 4, 137, 46])
ANSWER = [(ACCEPTED, 0, b""), (RESULT, 0, YES)]


def started(**arguments):
    worker = WorkerProcess(**arguments)
    worker.await_ready(SECONDS)
    return worker


@pytest.fixture
def worker():
    with started() as worker:
        yield worker


def scripted(worker, frames, cut=None, end="", seconds=SECONDS):
    return worker.call(seconds, print, frames, cut, end)


# Frames.
def test_frames_arrive_in_pieces_of_any_length() -> None:
    frames = [
        Frame(READY, 0),
        Frame(CALL, 1, b"call"),
        Frame(ACCEPTED, 1),
        Frame(RESULT, 1, b"x" * 40),
    ]
    stream = b"".join(map(bytes, frames))
    for first, second in itertools.combinations_with_replacement(range(len(stream) + 1), 2):
        reader = Reader()
        pieces = stream[:first], stream[first:second], stream[second:]
        assert [frame for piece in pieces for frame in reader.feed(piece)] == frames


@pytest.mark.parametrize("damaged", [b"\0" * 17, b"\x06" + b"\0" * 16, b"\x04" + b"\xff" * 16])
def test_a_damaged_frame_is_refused(damaged) -> None:
    reader, sound = Reader(), Frame(RESULT, 1, b"x")
    assert reader.feed(bytes(sound) + damaged) == [sound]
    assert reader.damaged
    assert reader.feed(bytes(sound)) == []


# Every boundary.
@pytest.mark.parametrize("end", ["kill", "exit", "close", "hang", "garbage"])
def test_a_worker_ends_at_any_byte_of_its_answer(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before ACCEPTED is whole the call was not begun; after the answer is whole it counts,
    whatever comes then.
    """
    # A worker that ends is heard of at once. One that lives on is waited for, so that its bytes
    # arrive on a busy machine, too.
    patience = 3.0 if end in ("hang", "garbage") else 30.0
    monkeypatch.setattr(processes, "END_SECONDS", 0.2)
    monkeypatch.setattr(processes, "ACCEPT_SECONDS", patience)
    accepted, whole = (
        len(bytes(Frame(ACCEPTED, 1))),
        sum(len(bytes(Frame(k, 1, body))) for k, _, body in ANSWER),
    )
    every = (
        range(whole + 1)
        if end == "kill"
        else (0, 1, accepted - 1, accepted, accepted + 1, whole - 1, whole)
    )

    endings: tuple[type[WorkerExited | WorkerTimeout], ...] = (WorkerExited, WorkerTimeout)

    def run(cut):
        with started(program=SCRIPTED) as worker:
            if cut == whole:
                assert scripted(worker, ANSWER, cut, end) is True
                assert soon(lambda: worker.exit is not None or end in ("hang", "garbage", "close"))
                with pytest.raises(endings) as ended:
                    scripted(worker, ANSWER, seconds=0.2)
                assert not ended.value.accepted
                return
            with pytest.raises(endings) as ended:
                scripted(worker, ANSWER, cut, end, seconds=patience)
            assert ended.value.accepted is (cut >= accepted)
            if end != "garbage":  # which may look like the rest of a frame
                assert isinstance(ended.value, WorkerTimeout) is (end == "hang")
            if end == "kill":
                assert isinstance(ended.value, WorkerExited)
                assert ended.value.exit.from_outside
            if end == "exit":
                assert isinstance(ended.value, WorkerExited)
                assert ended.value.exit.status == 3

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(run, every))


def test_late_answers_are_never_taken_for_those_of_the_call() -> None:
    """All runs of two frames that belong to another call, before and between those of the call
    itself.
    """
    late = [
        (READY, -9, b""),
        (ACCEPTED, -1, b""),
        (RESULT, -1, NO),
        (ERROR, -1, NO),
        (RESULT, 1, NO),
    ]
    with started(program=SCRIPTED) as worker:
        for strays in itertools.product(late, repeat=2):
            assert scripted(worker, [*strays, *ANSWER]) is True
            assert scripted(worker, [ANSWER[0], *strays, ANSWER[1]]) is True
            assert scripted(worker, [*ANSWER, *strays]) is True
        with pytest.raises(WorkerExited) as died:
            scripted(worker, late[:3], None, "kill")
        assert not died.value.accepted


@pytest.mark.parametrize("step", range(4))
def test_an_interrupt_of_the_driver_ends_the_worker(
    worker, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its late answer would be on the line when the next call is made."""
    steps, wait = itertools.count(), worker._wait

    def interrupted(*arguments):
        if next(steps) == step:
            raise KeyboardInterrupt
        return wait(*arguments)

    monkeypatch.setattr(worker, "_wait", interrupted)
    process = worker.call(SECONDS, os.getpid) if step > 2 else None
    with pytest.raises(KeyboardInterrupt):
        worker.call(SECONDS, time.sleep, 1000)
    monkeypatch.undo()
    with pytest.raises(WorkerExited):
        worker.call(SECONDS, os.getpid)
    assert process is None or gone(process)


# What functions do.
@pytest.mark.parametrize(
    "name", ["str", "spite", "surrogate", "name", "interrupt", "exit", "generator"]
)
def test_whatever_a_function_raises_is_told_in_plain_text(worker, name: str) -> None:
    process = worker.call(SECONDS, os.getpid)
    with pytest.raises(RemoteError) as told:
        worker.call(SECONDS, chores.raises, name)
    assert type(told.value.name) is type(told.value.text) is str
    told.value.text.encode()
    assert worker.call(SECONDS, os.getpid) == process


def test_a_result_that_cannot_be_sent_is_an_error(worker) -> None:
    with pytest.raises(RemoteError, match="stays here"):
        worker.call(SECONDS, chores.returns_spite)


def test_a_call_that_cannot_be_sent_is_an_error_here(worker) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError)):  # by the version of Python
        worker.call(SECONDS, lambda: None)


def test_a_large_result_comes_whole(worker) -> None:
    large = b"x" * (8 << 20)

    assert worker.call(SECONDS, chores.returns, large) == large


@pytest.mark.parametrize(
    "how", ["SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGSEGV", "SIGABRT", "SIGBUS", 0, 3]
)
def test_how_a_worker_ended(worker, how) -> None:
    how = how if isinstance(how, int) else signal.Signals[how]
    with pytest.raises(WorkerExited) as died:
        worker.call(SECONDS, chores.end, how)
    assert died.value.accepted
    outside = how in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    assert died.value.exit.from_outside is outside
    assert str(died.value) == (
        f"signal {how.name}" if isinstance(how, signal.Signals) else f"exit status {how}"
    )


def test_a_worker_that_dies_when_nothing_is_asked(worker) -> None:
    worker.call(SECONDS, chores.end_soon, 0.1)
    assert soon(lambda: worker.exit is not None)
    with pytest.raises(WorkerExited) as died:
        worker.call(SECONDS, os.getpid)
    assert not died.value.accepted


def test_a_worker_that_is_stuck_when_nothing_is_asked(
    worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not read a long call, of which the sending must not wait for it either."""
    monkeypatch.setattr(processes, "ACCEPT_SECONDS", 0.5)
    process = worker.call(SECONDS, os.getpid)
    os.kill(process, signal.SIGSTOP)
    with pytest.raises(WorkerTimeout) as late:
        worker.call(SECONDS, chores.returns, b"x" * (8 << 20))
    assert not late.value.accepted
    assert gone(process)


# What a worker is given.
def test_a_worker_is_a_fresh_process_in_a_session_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C does not reach it, and it has none of the driver's ways with signals."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
    try:
        with started(environment={"MARKER": "x"}) as worker:
            facts = worker.call(SECONDS, chores.facts)
    finally:
        signal.signal(signal.SIGINT, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert facts["session"] == facts["process"]
    assert facts["interrupt"]
    assert facts["blocked"] == set()
    assert (facts["main"], facts["input"], facts["marker"]) == ("serve.py", "/dev/null", "x")
    assert facts["path"] == processes._search_path()


def test_the_drivers_main_module_stays_where_it_is() -> None:
    """Other threads pickle what is defined there, while workers start."""
    main, seen, done = sys.modules["__main__"], [], threading.Event()

    def watch():
        while not done.is_set():
            seen.append(sys.modules["__main__"] is main)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started().close()
    done.set()
    watcher.join()
    assert all(seen)


def test_a_worker_outlives_the_thread_that_started_it() -> None:
    with ThreadPoolExecutor(1) as thread:
        worker = thread.submit(started).result()
    with worker:
        time.sleep(0.3)
        assert worker.call(SECONDS, os.getpid) > 0


def test_workers_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerStartError, match="exit status 1"):
        started(modules=["no_such_module"])
    with pytest.raises(WorkerStartError):
        started(data_limit=1 << 20)
    with pytest.raises(WorkerStartError, match=r"not ready in 0\.3 s"):
        WorkerProcess(
            modules=["this"], program=_script(tmp_path, "import time; time.sleep(100)")
        ).await_ready(0.3)
    monkeypatch.setattr(processes.spawn, "get_executable", lambda: str(tmp_path / "python"))
    with pytest.raises(WorkerStartError, match="No such file"):
        started()


def _script(folder, code):
    path = folder / "script.py"
    path.write_text(code)
    return str(path)


# Memory.
def test_a_worker_that_eats_memory_is_ended() -> None:
    with (
        started(memory=200 << 20) as worker,
        pytest.raises(WorkerExited, match=r"out of memory: it held 0\.\d GiB") as died,
    ):
        worker.call(SECONDS, chores.eat, 400)
    assert not died.value.exit.from_outside


def test_what_a_worker_starts_counts_too() -> None:
    code = "import time; x = b'x' * (400 << 20); time.sleep(1000)"
    with started(memory=200 << 20) as worker, pytest.raises(WorkerExited, match="out of memory"):
        worker.call(SECONDS, subprocess.run, [sys.executable, "-S", "-c", code])


# Ends.
def test_nothing_of_a_worker_is_left_when_it_ends(worker) -> None:
    family = worker.call(SECONDS, chores.family)
    worker.close()
    assert all(map(gone, family))


def test_nothing_of_a_worker_is_left_when_it_dies(worker) -> None:
    family = worker.call(SECONDS, chores.family)
    os.kill(family[0], signal.SIGKILL)
    assert soon(lambda: all(map(gone, family)), 5)


@pytest.mark.parametrize("which", ["guard", "supervisor", "both"])
def test_nothing_is_left_where_a_supervising_process_is_killed(worker, which: str) -> None:
    """It looks like the kernel's killer, not like a config's doing. Where both are killed only the
    worker is sure.
    """
    family = worker.call(SECONDS, chores.family)
    (supervising,) = supervisor._listed_children(worker._guard.pid)
    killed = {
        "guard": [worker._guard.pid],
        "supervisor": [supervising],
        "both": [worker._guard.pid, supervising],
    }

    def kill():
        for process in killed[which]:
            os.kill(process, signal.SIGKILL)

    threading.Timer(0.2, kill).start()
    with pytest.raises(WorkerExited) as died:
        worker.call(SECONDS, time.sleep, 1000)
    assert died.value.exit.from_outside
    ended = soon(lambda: all(map(gone, family[: 1 if which == "both" else None])), 5)
    for process in family:
        if not gone(process):
            os.kill(process, signal.SIGKILL)
    assert ended


@pytest.mark.parametrize("phase", ["start", "call", "idle"])
def test_another_thread_ends_a_worker(phase: str) -> None:
    with WorkerProcess(modules=["json"]) as worker, ThreadPoolExecutor(3) as threads:
        if phase != "start":
            worker.await_ready(SECONDS)
        waiting = (
            threads.submit(worker.call, SECONDS, time.sleep, 1000) if phase == "call" else None
        )
        time.sleep(0.1 if waiting else 0)
        for killed in [threads.submit(worker.kill) for _ in range(2)]:
            killed.result(SECONDS)
        if waiting:
            with pytest.raises(WorkerExited):
                waiting.result(SECONDS)
        with pytest.raises(WorkerStartError if phase == "start" else WorkerExited):
            worker.await_ready(SECONDS) if phase == "start" else worker.call(SECONDS, os.getpid)


DRIVER = f"""
import signal, sys, threading, types
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has its children ignore it
lean = types.ModuleType("lean")
lean.__path__ = [{str(Path(processes.__file__).parent)!r}]
sys.modules["lean"] = lean
sys.path.insert(0, {str(TESTS)!r})
from lean.processes import WorkerProcess
from support import chores
worker = WorkerProcess()
worker.await_ready(60)
print(*worker.call(60, chores.family), worker._guard.pid, flush=True)
if "gil" in sys.argv:
    worker.call(60, chores.hold_gil, 1000)
sys.stdin.read()
"""


@pytest.mark.parametrize("busy", ["gil", "idle"])
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, signal.SIGTERM, None], ids=["killed", "terminated", "ended"]
)
def test_nothing_of_a_worker_is_left_when_its_driver_goes(busy: str, how) -> None:
    if busy == "gil" and how is None:
        how = signal.SIGHUP
    command = [sys.executable, "-S", "-c", DRIVER, busy]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as driver:
        family = [int(process) for process in driver.stdout.readline().split()]
        assert len(family) == 5
        time.sleep(0.2)
        if how is None:
            driver.stdin.close()
        else:
            driver.send_signal(how)
        driver.wait(10)
        assert soon(lambda: all(map(gone, family)), 5)


# Deadlines.
def test_a_deadline_is_not_moved_by_what_this_process_does_not_see(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock[0])
    deadline = Deadline(20.0)
    clock[0] += 3
    assert deadline.left == 17
    clock[0] += 3600  # stopped for an hour
    assert deadline.left == 12
    for _ in range(5):
        clock[0] += 4
        left = deadline.left
    assert left == 0


def test_a_driver_that_was_stopped_takes_the_answer_that_came_meanwhile(
    worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is over when it looks again, and the answer is there."""
    wait = worker._wait

    def stopped(seconds, *arguments):
        found = wait(seconds, *arguments)
        time.sleep(0.4)
        return found

    monkeypatch.setattr(worker, "_wait", stopped)
    assert worker.call(0.3, chores.returns, 7) == 7


# The supervisor's own parts.
def test_children_are_found_with_and_without_the_kernels_lists() -> None:
    child = chores.start_child()
    try:
        assert child in supervisor._listed_children(os.getpid())
        assert child in supervisor._searched_children()(os.getpid())
        assert child in supervisor._descendants(os.getpid())
        assert supervisor._memory(child) > 0
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_scripts_import_nothing_of_the_package() -> None:
    """They start in milliseconds, and where the package itself cannot be imported."""
    for module in (serve, supervisor):
        code = (
            f"import runpy, sys; runpy.run_path({module.__file__!r}); print('outblas' in "
            "sys.modules)"
        )
        said = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
        )
        assert said.stdout == "False\n"

"""The answers of worker processes: every byte of one at which its worker may end, and late ones."""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.paths import TESTS
from support.sweeps import soon
from support.worker_processes import SECONDS, started

from outblas.autotune.measure import processes
from outblas.autotune.measure.processes import WorkerExited, WorkerProcess, WorkerTimeout
from outblas.autotune.measure.serve import ACCEPTED, ERROR, READY, RESULT, Frame

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes"),
]
SCRIPTED = str(TESTS / "support" / "scripted_worker.py")

# What a scripted worker sends: a kind, the number of a call from that of its own, and a body.
Sent = tuple[int, int, bytes]
YES = bytes([128, 4, 136, 46])  # True, pickled
NO = bytes([128, 4, 137, 46])
TAKEN_UP: Sent = (ACCEPTED, 0, b"")
ANSWERED: Sent = (RESULT, 0, YES)
ANSWER = [TAKEN_UP, ANSWERED]
ACCEPTED_BYTES = len(bytes(Frame(ACCEPTED, 1)))
ANSWER_BYTES = ACCEPTED_BYTES + len(bytes(Frame(RESULT, 1, YES)))


def scripted(
    worker: WorkerProcess,
    frames: Iterable[Sent],
    cut: int | None = None,
    end: str = "",
    seconds: float = SECONDS,
) -> Any:
    """The result of a call to a scripted worker, which sends these frames up to a byte and ends
    as `end` says.
    """
    return worker.call(seconds, print, frames, cut, end)


# ---- ends within an answer
NO_ANSWER: tuple[type[WorkerExited | WorkerTimeout], ...] = (WorkerExited, WorkerTimeout)
# What is told of a worker that ends so: bytes that are no answer may look like the rest of a frame.
ENDS = {
    "kill": "signal SIGKILL",
    "exit": "exit status 3",
    "close": "it closed its connection",
    "hang": "not done in time",
    "garbage": "",
}


@pytest.fixture
def patience(end: str, monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds for a worker to accept a call, and to answer it.

    A worker that ends is heard of at once. One that lives on is waited for, so that its bytes
    arrive on a busy machine, too.
    """
    seconds = 3.0 if end in ("hang", "garbage") else 30.0
    monkeypatch.setattr(processes, "END_SECONDS", 0.2)
    monkeypatch.setattr(processes, "ACCEPT_SECONDS", seconds)
    return seconds


def endings(end: str, cuts: Iterable[int], patience: float) -> dict[int, tuple[bool, bool]]:
    """What is told of calls whose worker ends at these bytes of its answer: whether they were
    accepted, and whether the reason is that of the end.
    """

    def told(cut: int) -> tuple[bool, bool]:
        with started(program=SCRIPTED) as worker, pytest.raises(NO_ANSWER) as ended:
            scripted(worker, ANSWER, cut, end, seconds=patience)
        return ended.value.accepted, ENDS[end] in str(ended.value)

    cuts = list(cuts)
    with ThreadPoolExecutor(4) as threads:
        return dict(zip(cuts, threads.map(told, cuts), strict=True))


@pytest.mark.parametrize("end", ENDS)
def test_a_call_was_not_begun_until_its_acceptance_is_whole(end: str, patience: float) -> None:
    cuts = range(ACCEPTED_BYTES) if end == "kill" else (0, 1, ACCEPTED_BYTES - 1)

    assert endings(end, cuts, patience) == dict.fromkeys(cuts, (False, True))


@pytest.mark.parametrize("end", ENDS)
def test_a_call_was_begun_once_its_acceptance_is_whole(end: str, patience: float) -> None:
    every = range(ACCEPTED_BYTES, ANSWER_BYTES)
    cuts = every if end == "kill" else (every[0], every[1], every[-1])

    assert endings(end, cuts, patience) == dict.fromkeys(cuts, (True, True))


@pytest.mark.parametrize("end", ENDS)
def test_an_answer_that_is_whole_counts_however_its_worker_ends(end: str, patience: float) -> None:
    with started(program=SCRIPTED) as worker:
        assert scripted(worker, ANSWER, ANSWER_BYTES, end, seconds=patience) is True


@pytest.mark.parametrize("end", ENDS)
def test_a_call_to_a_worker_that_has_answered_and_ended_is_not_begun(
    end: str, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(program=SCRIPTED) as worker:
        scripted(worker, ANSWER, ANSWER_BYTES, end, seconds=patience)

        monkeypatch.setattr(processes, "ACCEPT_SECONDS", 0.3)
        with pytest.raises(NO_ANSWER) as ended:
            scripted(worker, ANSWER)

    assert not ended.value.accepted


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_the_end_of_a_worker_that_has_answered_is_heard_of(end: str) -> None:
    with started(program=SCRIPTED) as worker:
        scripted(worker, ANSWER, ANSWER_BYTES, end)

        assert soon(lambda: worker.exit is not None)
        assert str(worker.exit) == ENDS[end]


def test_a_worker_that_is_killed_as_it_answers_was_ended_from_outside() -> None:
    with started(program=SCRIPTED) as worker, pytest.raises(WorkerExited) as died:
        scripted(worker, ANSWER, ACCEPTED_BYTES, "kill")

    assert died.value.exit.from_outside


# ---- late answers
LATE: list[Sent] = [
    (READY, -9, b""),
    (ACCEPTED, -1, b""),
    (RESULT, -1, NO),
    (ERROR, -1, NO),
    (RESULT, 1, NO),
]


@pytest.fixture(scope="module")
def scripted_worker() -> Iterator[WorkerProcess]:
    """A worker that sends what each call says, and outlives each test."""
    with started(program=SCRIPTED) as worker:
        yield worker


def before(late: tuple[Sent, ...]) -> list[Sent]:
    return [*late, *ANSWER]


def between(late: tuple[Sent, ...]) -> list[Sent]:
    return [TAKEN_UP, *late, ANSWERED]


def after(late: tuple[Sent, ...]) -> list[Sent]:
    return [*ANSWER, *late]


@pytest.mark.parametrize("place", [before, between, after], ids=lambda place: place.__name__)
def test_late_answers_are_never_taken_for_that_of_the_call(
    scripted_worker: WorkerProcess, place: Callable[[tuple[Sent, ...]], list[Sent]]
) -> None:
    """All runs of two frames that belong to another call, at a place among the call's own."""
    for late in itertools.product(LATE, repeat=2):
        assert scripted(scripted_worker, place(late)) is True, late


def test_late_frames_accept_no_call() -> None:
    with started(program=SCRIPTED) as worker, pytest.raises(WorkerExited) as died:
        scripted(worker, LATE[:3], None, "kill")

    assert not died.value.accepted

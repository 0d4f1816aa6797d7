"""The answers of worker processes: every byte of one at which its worker may end, and late ones."""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
    pytest.mark.timeout(180),
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


# Seconds for a worker to accept a call, and as many to answer it. A worker that ends is heard of at
# once. Of one that lives on, nothing tells that it has sent all its bytes: where the outcome is not
# the expected one yet, a busy machine may only have been slow, and the next patience is tried.
HEARD_OF = (30.0,)
LIVES_ON = (0.5, 5.0, 40.0)
PATIENCE = {"kill": HEARD_OF, "exit": HEARD_OF, "close": HEARD_OF, "hang": LIVES_ON}
PATIENCE["garbage"] = LIVES_ON


@pytest.fixture(autouse=True)
def ends_workers_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard of a worker that lives on is not waited for."""
    monkeypatch.setattr(processes, "END_SECONDS", 0.2)


def told(end: str, seconds: float, cut: int) -> tuple[bool, bool]:
    """What is told of a call whose worker ends at a byte of its answer: whether it was accepted,
    and whether the reason is that of the end.
    """
    with started(program=SCRIPTED) as worker, pytest.raises(NO_ANSWER) as ended:
        scripted(worker, ANSWER, cut, end, seconds=seconds)
    return ended.value.accepted, ENDS[end] in str(ended.value)


def others(
    end: str, cuts: Iterable[int], expected: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> dict[int, tuple[bool, bool]]:
    """The cuts at which something else is told than expected, however long the worker is given."""
    found = dict.fromkeys(cuts, (not expected[0], False))
    for seconds in PATIENCE[end]:
        monkeypatch.setattr(processes, "ACCEPT_SECONDS", seconds)
        with ThreadPoolExecutor(4) as threads:
            said = threads.map(partial(told, end, seconds), found)
            found = {
                cut: each for cut, each in zip(list(found), said, strict=True) if each != expected
            }
        if not found:
            break
    return found


def answered(end: str, monkeypatch: pytest.MonkeyPatch) -> WorkerProcess:
    """A worker that has answered a call with True and ended so. Its answer was taken."""
    for seconds in PATIENCE[end]:
        monkeypatch.setattr(processes, "ACCEPT_SECONDS", seconds)
        worker = started(program=SCRIPTED)
        try:
            assert scripted(worker, ANSWER, ANSWER_BYTES, end, seconds=seconds) is True
            return worker
        except WorkerTimeout:
            worker.close()
    raise AssertionError(f"no answer in {seconds} s")


# Bytes of a frame at which a worker ends: every end at the first two and the last one; a kill at
# every byte, of which CI takes one of four.
AT_ENDS, AT_EVERY_FOURTH, AT_EVERY = "its ends", "every fourth byte", "every byte"
CUTS = [
    *((end, AT_ENDS) for end in ENDS),
    ("kill", AT_EVERY_FOURTH),
    pytest.param("kill", AT_EVERY, marks=pytest.mark.slow),
]


def cuts_of(frame: range, where: str) -> Iterable[int]:
    """The bytes of a frame at which a worker ends."""
    if where == AT_ENDS:
        return frame[0], frame[1], frame[-1]
    return frame[2:-1:4] if where == AT_EVERY_FOURTH else frame


@pytest.mark.parametrize(("end", "where"), CUTS)
def test_a_call_was_not_begun_until_its_acceptance_is_whole(
    end: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = cuts_of(range(ACCEPTED_BYTES), where)

    assert not others(end, cuts, (False, True), monkeypatch)


@pytest.mark.parametrize(("end", "where"), CUTS)
def test_a_call_was_begun_once_its_acceptance_is_whole(
    end: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = cuts_of(range(ACCEPTED_BYTES, ANSWER_BYTES), where)

    assert not others(end, cuts, (True, True), monkeypatch)


@pytest.mark.parametrize("end", ENDS)
def test_an_answer_that_is_whole_counts_however_its_worker_ends(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answered(end, monkeypatch):
        pass  # the answer was taken


@pytest.mark.parametrize("end", ENDS)
def test_a_call_to_a_worker_that_has_answered_and_ended_is_not_begun(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answered(end, monkeypatch) as worker:
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

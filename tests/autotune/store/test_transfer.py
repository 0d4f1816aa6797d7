"""Exports: what is written is read again, and a file with any error is refused as a whole."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.stored import H200, OTHER, failed, fill, trial, winner

from outblas.autotune.store import fields, transfer
from outblas.autotune.store.records import BestConfig, Gpu, Trial, Workload
from outblas.autotune.store.store import Store

TRIALS = [trial(0), failed(1), trial(2, gpu=H200, workload=OTHER, kernel="simt.naive")]

# What is hard to write or to read again: figures without a short decimal, text that is no ASCII,
# control characters that end lines elsewhere, fields that are empty, sizes beyond 32 bits.
ODD = Gpu("é\u2028\x00\x1c", 0, 0, power_limit_w=0.1 + 0.2)
RECORDS: list[tuple[Trial, BestConfig]] = [
    (trial(), winner()),
    (
        failed(status="out of memory", reason="\U0001f600\r\n\x85", gpu=ODD, source=""),
        winner(lead=None, lead_low=None, lead_high=None, confidence=None, finalists=(), gpu=ODD),
    ),
    (
        trial(us=1e-9, ratio=None, workload=Workload(1 << 48, 1, 1, "tf32"), config=""),
        winner(us=1e15, workload=Workload(8, 64, 64, weights="cold", grouping="8:zipf")),
    ),
]


@pytest.mark.parametrize(("trial", "winner"), RECORDS)
def test_any_record_is_read_as_it_was_written(path: Path, trial: Trial, winner: BestConfig) -> None:
    path.parent.mkdir()
    transfer.write(path, [trial], [winner])
    assert transfer.read(path) == ([trial], [winner])

    with Store(path.with_name("store")) as store:
        assert store.merge(*transfer.read(path)) == (1, 1)
        assert (store.trials(), store.winners()) == ([trial], [winner])


@pytest.fixture
def lines(path: Path) -> list[Any]:
    """The lines of an export of two trials and a winner."""
    path.parent.mkdir()
    transfer.write(path, TRIALS[:2], [winner()])
    return [json.loads(line) for line in path.read_text().splitlines()]


REMOVED = object()


def put(*place: object, to: object) -> Callable[[list[Any]], None]:
    """Changes what is at a place, or removes it."""

    def change(lines: list[Any]) -> None:
        inside: Any = lines
        for step in place[:-1]:
            inside = inside[step]
        if to is REMOVED:
            del inside[place[-1]]
        else:
            inside[place[-1]] = to

    return change


remove = functools.partial(put, to=REMOVED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove(0), "line 1 is .*expected .*outblas-tuning"),
        (remove(-1), "the file was changed or is incomplete"),
        (remove(2), "line 4 is .*the file was changed or is incomplete"),
        (put(1, to={"note": 1}), "line 2 is {'note': 1}, expected a trial or a winner"),
        (put(1, to=[]), r"line 2 is \[\], expected a trial or a winner"),
        (put(1, "trial", to=7), "line 2: trial is 7, expected an object"),
        (remove(1, "trial", "us"), "line 2: trial has no us"),
        (put(1, "trial", "speed", to=1), "line 2: trial has 'speed', expected only gpu, workload"),
        (put(1, "trial", "workload", "M", to=0), "trial.workload: M is 0, expected an integer"),
        (put(3, "winner", "finalists", to={}), "line 4: winner.finalists is {}, expected a list"),
        (put(3, "winner", "finalists", 1, "us", to=0), r"line 4: winner.finalists\[1\].us is 0"),
    ],
)
def test_a_file_with_an_error_is_refused_as_a_whole(
    path: Path, lines: list[Any], change: Callable[[list[Any]], None], message: str
) -> None:
    change(lines)
    path.write_text("\n".join(map(json.dumps, lines)))

    with pytest.raises(ValueError, match=message):
        transfer.read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"line 1 is \[\], expected"),
        (b"{", "line 1 is not JSON"),
        (b"[" * 100_000, "line 1 is not JSON"),
        (b"\xff", "is not UTF-8"),
    ],
)
def test_a_file_of_something_else_is_refused(path: Path, content: bytes, message: str) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        transfer.read(path)


def test_a_file_that_cannot_be_read_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"No such file"):
        transfer.read(path)
    fill(path)
    monkeypatch.setattr(fields, "SIZE_LIMIT", 10)
    with pytest.raises(ValueError, match="has more than"):
        transfer.read(path)


def test_a_write_that_fails_leaves_the_old_file(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("old")

    with pytest.raises(ValueError, match="us is -1"):
        transfer.write(path, [trial(us=-1.0)], [])

    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert path.read_text() == "old"

"""Exports: what is written is read again, and a file with any error is refused as a whole."""

import datetime
import functools
import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.stored import H200, OTHER, failed, fill, trial, winner

from outblas.autotune.store import fields, transfer
from outblas.autotune.store.records import (
    PRECISIONS,
    WEIGHTS,
    BestConfig,
    Finalist,
    Gpu,
    Status,
    Trial,
    Workload,
)
from outblas.autotune.store.store import Store
from outblas.base.shapes import LAYOUTS

TRIALS = [trial(0), failed(1), trial(2, gpu=H200, workload=OTHER, kernel="simt.naive")]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = st.text(string.ascii_letters + string.digits + "_", min_size=1, max_size=8)
configs = st.lists(st.tuples(names, names), max_size=4).map(lambda x: ",".join(map("=".join, x)))
kernels = st.text(string.ascii_lowercase + string.digits + "_.", min_size=1, max_size=12)
positive = st.floats(min_value=1e-9, max_value=1e15)
counts = st.integers(min_value=0, max_value=1 << 48)
dates = st.datetimes(datetime.datetime(2000, 1, 1), datetime.datetime(2020, 1, 1)).map(
    lambda date: f"{date.isoformat()}+00:00"
)
power = st.none() | st.integers(0, 1000) | st.floats(min_value=0, max_value=1e15)
gpus = st.builds(Gpu, texts.filter(bool), counts, counts, power, *[st.none() | texts] * 5)
kinds = st.sampled_from(PRECISIONS), st.sampled_from(("", "float32")), st.sampled_from(LAYOUTS)
sizes = [st.integers(min_value=1, max_value=1 << 48)] * 3
workloads = st.builds(Workload, *sizes, *kinds, st.sampled_from(WEIGHTS))
places = {
    "gpu": gpus,
    "workload": workloads,
    "kernel": kernels,
    "source": texts,
    "config": configs,
    "when": dates,
}
figures = dict.fromkeys(("us", "ratio", "ratio_low", "ratio_high"), positive)
winners = st.builds(
    BestConfig,
    **places,
    **figures,
    cublas_us=positive,
    rounds=st.integers(min_value=1, max_value=1000),
    **dict.fromkeys(("lead", "lead_low", "lead_high"), st.none() | positive),
    separated=st.booleans(),
    finalists=st.lists(
        st.builds(Finalist, kernel=kernels, config=configs, **figures), max_size=3
    ).map(tuple),
)
trials = st.builds(Trial, **places, status=st.just("ok"), us=positive) | st.builds(
    Trial, **places, status=st.sampled_from(get_args(Status)[1:]), reason=texts
)


@given(trial=trials, winner=winners)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_record_is_read_as_it_was_written(path: Path, trial: Trial, winner: BestConfig) -> None:
    path.parent.mkdir(exist_ok=True)
    transfer.write(path, [trial], [winner])
    assert transfer.read(path) == ([trial], [winner])

    with Store(path.with_name("store")) as store:
        assert store.merge(*transfer.read(path)) == (1, 1)
        assert (store.trials(), store.winners()) == ([trial], [winner])
        store.prune(older_than_days=0)


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
        (put(0, to={"format": "outblas-table"}), "line 1 is .*expected .*outblas-tuning"),
        (remove(-1), "the file was changed or is incomplete"),
        (remove(2), "line 4 is .*the file was changed or is incomplete"),
        (put(1, to={"note": 1}), "line 2 is {'note': 1}, expected a trial or a winner"),
        (put(1, to=[]), r"line 2 is \[\], expected a trial or a winner"),
        (put(1, "trial", to=7), "line 2: trial is 7, expected an object"),
        (remove(1, "trial", "us"), "line 2: trial has no us"),
        (put(1, "trial", "speed", to=1), "line 2: trial has 'speed', expected only gpu, workload"),
        (put(1, "trial", "workload", "M", to=0), "trial.workload: M is 0, expected an integer"),
        (remove(1, "trial", "workload", "grouping"), "line 2: trial.workload has no grouping"),
        (put(1, "trial", "gpu", "sms", to=True), "trial.gpu.sms is True, expected a value of type"),
        (put(3, "winner", "separated", to=1), "line 4: winner.separated is 1, expected a value"),
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

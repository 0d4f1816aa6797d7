"""Exports and imports: what was written comes back, through files and stores of any size."""

import dataclasses
import json
import math
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import stored
from support.stored import H100
from support.tables import (
    FAILED,
    TRIAL,
    examples,
    figures,
    first_version,
    numbers,
    places,
    texts,
    winner,
    winners,
)

from outblas.autotune.store import exports, transfer
from outblas.autotune.store.records import CIRCUMSTANTIAL, STATUSES, BestConfig, Trial, Workload
from outblas.autotune.store.store import Store


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of two trials and a winner."""
    transfer.export([TRIAL, FAILED], [winner()], tmp_path / "found.json")
    return tmp_path / "found.json"


@pytest.fixture
def content() -> dict[str, Any]:
    """The same in an export of the first version, which was one JSON object."""
    return first_version()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store, to import into."""
    with Store(tmp_path / "tuning.sqlite") as found:
        yield found


# Files.


def test_what_was_exported_is_read_again(file: Path) -> None:
    assert transfer.read(file) == ([TRIAL, FAILED], [winner()])


def test_nothing_can_be_exported_and_read(file: Path) -> None:
    transfer.export([], [], file)

    assert transfer.read(file) == ([], [])
    transfer.check(file)


def test_an_export_has_a_line_for_each_record_and_gpu(file: Path) -> None:
    lines = [json.loads(line) for line in file.read_text().splitlines()]

    kinds = [next(iter(line)) for line in lines]
    assert kinds == ["format", "gpu", "trial", "trial", "winner", "end"]
    assert lines[1]["gpu"] == {"key": H100.key, **dataclasses.asdict(H100)}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="as it was written"),
        pytest.param({"indent": 3, "sort_keys": True}, id="in other white space and order"),
    ],
)
def test_exports_of_the_first_version_can_be_read(
    file: Path, content: dict[str, Any], options: dict[str, Any]
) -> None:
    file.write_text(json.dumps(content, **options))

    assert transfer.read(file) == ([TRIAL, FAILED], [winner()])
    transfer.check(file)


def test_exports_of_the_first_version_can_be_imported(
    file: Path, content: dict[str, Any], store: Store
) -> None:
    file.write_text(json.dumps(content))

    assert transfer.import_into(store, file) == (2, 1)


@pytest.mark.parametrize(
    ("trials", "folder", "error"),
    [
        pytest.param(
            [TRIAL, dataclasses.replace(TRIAL, us=math.nan)],
            "",
            (ValueError, r"trials\[1\]\.us is nan"),
            id="a record that could not be read again",
        ),
        pytest.param([TRIAL], "x", (OSError, "x"), id="a folder that is not there"),
    ],
)
def test_an_export_that_fails_leaves_what_was_there(
    file: Path, trials: list[Trial], folder: str, error: tuple[type[Exception], str]
) -> None:
    before = file.read_bytes()
    kind, message = error

    with pytest.raises(kind, match=message):
        transfer.export(trials, [], file.parent / folder / file.name)

    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


COLD = dataclasses.replace(TRIAL.workload, weights="cold")
FUSED = dataclasses.replace(TRIAL.workload, out_dtype="float16", epilogue="bias+gelu")
GROUPED = dataclasses.replace(TRIAL.workload, grouping="8:zipf")


@pytest.mark.parametrize("workload", [COLD, FUSED, GROUPED], ids=str)
def test_weights_epilogues_and_groups_are_exported_and_read_again(
    file: Path, workload: Workload
) -> None:
    trials = [TRIAL, dataclasses.replace(TRIAL, workload=workload)]
    winners_of_both = [winner(), winner(workload=workload)]

    transfer.export(trials, winners_of_both, file)

    assert transfer.read(file) == (trials, winners_of_both)


def test_the_workload_of_a_plain_product_is_exported_as_in_older_versions(file: Path) -> None:
    lines = [json.loads(line) for line in file.read_text().splitlines()]

    (trial, *_) = [line["trial"] for line in lines if "trial" in line]
    assert list(trial["workload"]) == ["M", "N", "K", "dtype", "out_dtype", "layout"]


# Stores.


@pytest.mark.parametrize("workload", [COLD, FUSED, GROUPED], ids=str)
def test_weights_epilogues_and_groups_are_imported_beside_plain_results(
    file: Path, store: Store, workload: Workload
) -> None:
    other = dataclasses.replace(TRIAL, workload=workload)
    transfer.export([TRIAL, other], [winner(), winner(workload=workload)], file)

    assert transfer.import_into(store, file) == (2, 2)

    assert store.trials(workload=workload) == [other]
    assert store.winners(workload=workload) == [winner(workload=workload)]
    assert store.trials(workload=TRIAL.workload) == [TRIAL]


def test_a_store_goes_through_a_file(file: Path, path: Path, store: Store) -> None:
    trials = [stored.trial(i) for i in range(2500)]  # more than are stored at once
    with Store(path) as source:
        source.merge(trials, [winner()])

        assert transfer.export_store(source, file) == (2500, 1)

    assert transfer.import_into(store, file) == (2500, 1)
    assert store.trials() == trials
    assert store.winners() == [winner()]


def test_what_was_imported_is_not_new_again(file: Path, store: Store) -> None:
    transfer.import_into(store, file)

    assert transfer.import_into(store, file) == (0, 0)


def test_an_import_keeps_what_is_there(file: Path, store: Store) -> None:
    own = dataclasses.replace(TRIAL, us=1.0)
    newer = winner(when="2026-03-01T00:00:00+00:00", ratio=1.2)
    store.add(own)
    store.record_best(newer)

    assert transfer.import_into(store, file) == (1, 0)

    assert store.trials() == [own, FAILED]
    assert store.winners() == [newer]


ADD_ONE = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
names = [row[1] for row in connection.execute("PRAGMA table_info(trials)")]
listed = ", ".join(f'"{name}"' for name in names if name not in ("id", "config", "digest"))
copied = f"SELECT {listed}, 'a=1' FROM trials LIMIT 1"
connection.execute(f"INSERT INTO trials ({listed}, config) {copied}")
connection.commit()
connection.close()
"""


@pytest.fixture
def disturbed(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What each attempt to write an export of the store at `path` wrote; after the first, another
    process adds a trial to the store, as between two looks at a file that nobody had open.
    """
    write = exports.write
    written: list[tuple[int, int]] = []

    def write_and_disturb(*arguments: Any, **options: Any) -> tuple[int, int]:
        found = write(*arguments, **options)
        if not written:
            subprocess.run([sys.executable, "-c", ADD_ONE, str(path)], timeout=60, check=True)
        written.append(found)
        return found

    monkeypatch.setattr(exports, "write", write_and_disturb)
    return written


def test_a_store_that_changes_while_it_is_exported_is_exported_anew(
    file: Path, path: Path, disturbed: list[tuple[int, int]]
) -> None:
    stored.fill(path, 5)

    with Store(path, read_only=True) as source:
        assert transfer.export_store(source, file) == (6, 1)

    trials, _ = transfer.read(file)
    assert len(trials) == 6
    assert disturbed == [(5, 1), (6, 1)]


def test_an_export_that_the_disk_refuses_is_not_the_stores_fault(
    path: Path, tmp_path: Path
) -> None:
    stored.fill(path)
    with Store(path, read_only=True) as source:
        with pytest.raises(OSError, match="x"):
            transfer.export_store(source, tmp_path / "x" / "found.json")

        assert source.warning is None
        assert len(source.trials()) == 3


def test_a_file_that_changes_while_it_is_imported_is_refused(
    file: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its check and the moment at which it is stored: what is stored is as it was
    checked. The file is larger than what Python reads at once.
    """
    trials = [stored.trial(i, reason="before") for i in range(1000)]
    transfer.export(trials, [], file)
    monkeypatch.setattr(exports, "BATCH", 1)
    merge = store.merge

    def merge_and_disturb(*records: Any) -> tuple[int, int]:
        text = file.read_text()
        file.write_text(text.replace("before", "behind"))
        return merge(*records)

    monkeypatch.setattr(store, "merge", merge_and_disturb)

    with pytest.raises(ValueError, match="was changed while it was read"):
        transfer.import_into(store, file)

    left = store.trials()
    assert 0 < len(left) < 1000
    assert left == trials[: len(left)]


others = dict.fromkeys(("clock_mhz", "predicted_us", "compile_s"), numbers)
failed = st.sampled_from([status for status in STATUSES if status != "ok"])
right_trials = st.builds(Trial, **places, **figures, **others, status=st.just("ok"), reason=texts)
failed_trials = st.builds(Trial, **places, **others, status=failed, reason=texts)
trial_lists = st.lists(right_trials | failed_trials, max_size=4)
winner_lists = st.lists(winners, max_size=3)


@examples
@given(trial_lists, winner_lists)
def test_whatever_is_valid_goes_through_a_file(
    tmp_path_factory: pytest.TempPathFactory, tried: list[Trial], won: list[BestConfig]
) -> None:
    file = tmp_path_factory.mktemp("found") / "found.json"

    transfer.export(tried, won, file)

    assert transfer.read(file) == (tried, won)


def stored_by(trials: list[Trial]) -> tuple[int, list[Trial]]:
    """How often a store that was empty takes one of these trials, and those that it has then: the
    first of an identity, and a result in the place of a failure for a reason outside the config.
    """
    count, kept = 0, dict[tuple[Any, ...], Trial]()
    for trial in trials:
        known = kept.get(trial.identity)
        result = trial.status in ("ok", "wrong")
        if known is None or (known.status in CIRCUMSTANTIAL and result):
            count, kept[trial.identity] = count + 1, trial
    return count, list(kept.values())


def test_a_result_that_takes_the_place_of_a_failure_is_new(store: Store, file: Path) -> None:
    failed = dataclasses.replace(FAILED, status="crash")
    result = dataclasses.replace(TRIAL, workload=FAILED.workload, config=FAILED.config)
    transfer.export([failed, result], [], file)

    assert transfer.import_into(store, file) == (2, 0)
    assert store.trials() == [result]


@examples
@given(trial_lists, winner_lists)
def test_whatever_is_valid_goes_into_a_store(
    tmp_path_factory: pytest.TempPathFactory, tried: list[Trial], won: list[BestConfig]
) -> None:
    file = tmp_path_factory.mktemp("found") / "found.json"
    transfer.export(tried, won, file)
    count, kept = stored_by(tried)
    with Store(file.with_name("tuning.sqlite")) as store:
        new, _ = transfer.import_into(store, file)

        found = store.trials()
        assert new == count
        assert sorted(found, key=repr) == sorted(kept, key=repr)
        assert [each for each in store.winners() if each not in won] == []
        assert store.verify() == []
        assert transfer.import_into(store, file) == (0, 0)


# Memory.

COUNT = 1200


def peak_of(work: Callable[[], object]) -> float:
    """MiB that Python allocates while it works."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


@pytest.fixture
def many(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store of many trials, of which 50 are in memory at a time."""
    monkeypatch.setattr(exports, "BATCH", 50)
    with Store(path) as source:
        source.merge([stored.trial(i) for i in range(COUNT)], [])
    with Store(path, read_only=True) as found:
        yield found


def test_memory_does_not_grow_with_what_is_exported(many: Store, file: Path) -> None:
    assert peak_of(lambda: transfer.export_store(many, file)) < 0.5


def test_memory_does_not_grow_with_what_is_checked(many: Store, file: Path) -> None:
    transfer.export_store(many, file)

    assert peak_of(lambda: transfer.check(file)) < 0.5
    assert peak_of(lambda: transfer.read(file)) > 1  # which keeps them all


def test_memory_does_not_grow_with_what_is_imported(many: Store, file: Path, store: Store) -> None:
    transfer.export_store(many, file)

    assert peak_of(lambda: transfer.import_into(store, file)) < 0.5

    assert len(store.trials()) == COUNT

"""The store of trials: what comes back, which result stays, what is listed and removed."""

from pathlib import Path
from typing import Any, cast

import pytest
from support.stored import H100, H200, OTHER, WORKLOAD, failed, trial, winner

from outblas.autotune.store.records import CIRCUMSTANTIAL, Gpu, Trial, Workload
from outblas.autotune.store.store import Store, StoreError

TRIALS = [
    trial(0),
    failed(1),
    trial(2, gpu=H200, workload=OTHER, kernel="simt.naive", compile_s=0.0, us=3),
]
NEWER = winner(when="2026-03-01T00:00:00+00:00", ratio=1.2)


@pytest.fixture
def filled(store: Store) -> Store:
    """A store with `TRIALS`, the last of which was added first, and a winner."""
    for each in reversed(TRIALS):
        assert store.add(each)
    store.record_best(winner())
    return store


def test_a_store_is_in_the_cache_directory_by_default(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(path.parent))

    with Store() as store:
        assert store.path == path
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("wanted", "listed"),
    [
        pytest.param({}, TRIALS, id="all, by date"),
        pytest.param({"kernel": "simt.naive"}, TRIALS[2:], id="kernel"),
        pytest.param({"workload": OTHER}, TRIALS[2:], id="workload"),
        pytest.param({"gpu": H200.key}, TRIALS[2:], id="GPU"),
        pytest.param({"kernel": "simt.naive", "workload": WORKLOAD}, [], id="kernel and workload"),
    ],
)
def test_trials_come_back(filled: Store, wanted: dict[str, Any], listed: list[Trial]) -> None:
    assert filled.trials(**wanted) == listed
    filled.close()

    with Store(filled.path, read_only=True) as again:
        assert again.trials(**wanted) == listed
        again.verify()


def test_winners_come_back(filled: Store) -> None:
    wanted: dict[str, Any] = {"kernel": "hopper.hilbert", "workload": WORKLOAD}

    assert filled.winners(gpu_name=H100.name, **wanted) == [winner()]
    assert filled.winners(gpu_name="nothing") == filled.winners(kernel="portable") == []


@pytest.mark.parametrize(
    ("there", "new", "stays"),
    [
        pytest.param(trial(us=1.0), trial(us=2.0), "there", id="the first"),
        pytest.param(trial(), trial(source="def"), "both", id="another source"),
        pytest.param(failed(status="refused"), trial(), "there", id="a refusal is the config's"),
        pytest.param(failed(), failed(status="crash"), "there", id="two failures"),
        *(
            pytest.param(failed(status=status), result, "new", id=f"{status}, then {result.status}")
            for status in sorted(CIRCUMSTANTIAL)
            for result in (trial(), failed(status="wrong"))
        ),
    ],
)
def test_of_two_trials_one_stays(store: Store, there: Trial, new: Trial, stays: str) -> None:
    store.add(there)

    assert store.add(new) == (stays != "there")

    assert store.trials() == {"there": [there], "new": [new], "both": [there, new]}[stays]


def test_the_result_that_was_recorded_last_stays(store: Store) -> None:
    for result in (trial(us=1.0), failed()):
        store.add(result, replace=True)

        assert store.trials() == [result]
    for each in (winner(), NEWER, winner()):
        store.record_best(each)

        assert store.winners() == [each]


def test_merging_takes_new_trials_and_newer_winners(filled: Store) -> None:
    assert filled.merge([trial(0, us=9.0), trial(3)], [NEWER, winner(source="def")]) == (1, 2)
    assert filled.merge([], [winner()]) == (0, 0)
    with pytest.raises(ValueError, match="expected a number above 0"):
        filled.merge([trial(4)], [winner(us=0.0)])

    assert filled.trials() == [*TRIALS, trial(3)]
    assert filled.winners() == [winner(source="def"), NEWER]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"us": float("nan")}, "Trial.us is nan, expected a finite number"),
        ({"us": -1.0}, "Trial.us is -1.0, expected a number above 0"),
        ({"us": 1e99}, r"Trial.us is 1e\+99, expected a number above 0"),
        ({"us": None}, "Trial.us is None, expected a number where status is 'ok'"),
        ({"us": "1"}, "Trial.us is '1', expected a finite number"),
        ({"status": "great"}, "Trial.status is 'great', expected one of ok, wrong"),
        ({"status": "hang"}, "Trial.us is 100.0, expected null where status is 'hang'"),
        ({"config": "drop table"}, "Trial.config is 'drop table', expected name=value"),
        ({"kernel": "No Kernel"}, "Trial.kernel is 'No Kernel', expected a kernel's name"),
        ({"when": "yesterday"}, "Trial.when is 'yesterday', expected a time such as"),
        ({"when": "2026-01-01T00:00:00"}, "Trial.when is '2026-01-01T00:00:00', expected a time"),
        (
            {"gpu": Gpu("H100", cast(int, 9.0), 132)},
            "Trial.gpu.arch is 9.0, expected a value of type int",
        ),
        ({"workload": Workload(1 << 60, 1, 1)}, "Trial.workload.M is 1152921504606846976"),
        ({"source": "x" * 5000}, "Trial.source has 5000 characters, expected 4096 at most"),
    ],
    ids=str,
)
def test_what_could_not_be_read_again_is_refused(
    store: Store, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        store.add(trial(**changes))
    assert store.trials() == []


@pytest.mark.parametrize(
    ("conditions", "left"),
    [
        pytest.param({"older_than_days": 0}, [], id="all that is old"),
        pytest.param({"older_than_days": 365_000}, TRIALS, id="nothing is that old"),
        pytest.param({"kernel": "simt.naive"}, TRIALS[:2], id="a kernel"),
        pytest.param({"sources": {"hopper.hilbert": "new"}}, TRIALS[2:], id="another source"),
        pytest.param({"sources": {}}, TRIALS, id="no source"),
        pytest.param({"kernel": "simt.naive", "sources": {"simt.naive": "abc"}}, TRIALS, id="both"),
    ],
)
def test_pruning_removes_what_meets_every_condition(
    filled: Store, conditions: dict[str, Any], left: list[Trial]
) -> None:
    before = len(filled.trials()) + len(filled.winners())

    count = filled.prune(**conditions, dry_run=True)

    assert filled.trials() == TRIALS
    assert filled.prune(**conditions) == count
    assert filled.trials() == left
    assert before - count == len(left) + len(filled.winners())


def test_pruning_needs_a_condition(filled: Store) -> None:
    with pytest.raises(ValueError, match="prune needs at least one of older_than_days"):
        filled.prune()
    with pytest.raises(ValueError, match="older_than_days is -1, expected a number from 0"):
        filled.prune(older_than_days=-1)


def test_a_store_that_is_closed_is_neither_read_nor_written(filled: Store) -> None:
    filled.close()
    for call in (filled.trials, lambda: filled.prune(kernel="x"), lambda: filled.add(trial())):
        with pytest.raises(StoreError, match="is closed"):
            call()

"""Stores that other programs, or people, have altered."""

from pathlib import Path

import pytest
from support.old_versions import VERSIONS, write_version
from support.stored import H100, fill, set_aside, sql, trial, warned, winner

from outblas.autotune.store.migrations import VERSION
from outblas.autotune.store.store import Store

TRIALS = [trial(i) for i in range(100)]


def write_newest(path: Path) -> None:
    with Store(path) as store:
        store.merge(TRIALS, [winner()])


# Changes that cost nothing.

HARMLESS = {
    "an added column": [
        "ALTER TABLE trials ADD COLUMN note TEXT",
        "ALTER TABLE gpus ADD COLUMN note TEXT DEFAULT 'x'",
    ],
    "an added table": ["CREATE TABLE notes (id, text)"],
    "an added index": ["CREATE INDEX mine ON trials (us)"],
    "other white space": [
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_master SET sql = replace(sql, ',', ' ,  ') WHERE type = 'table'",
        "PRAGMA writable_schema = OFF",
    ],
    "another case": [
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_master SET sql = replace(sql, 'TEXT NOT NULL', 'text not null') WHERE type "
        "= 'table'",
        "PRAGMA writable_schema = OFF",
    ],
    "statistics": ["ANALYZE"],
}
LOST_INDEX = ["DROP INDEX trials_by_workload"]  # which version 1 has not


@pytest.fixture(
    params=[
        *(
            pytest.param((version, change), id=f"version {version}: {name}")
            for version in (VERSION, 3, 2, 1)
            for name, change in HARMLESS.items()
        ),
        *(
            pytest.param((version, LOST_INDEX), id=f"version {version}: a lost index")
            for version in (VERSION, 3, 2)
        ),
    ]
)
def harmless(path: Path, request: pytest.FixtureRequest) -> Path:
    """The path of a store of `TRIALS` and a winner that was altered and is as good as before."""
    version, statements = request.param
    if version == VERSION:
        write_newest(path)
    else:
        write_version(version, path, TRIALS, [winner()])
    sql(path, *statements)
    return path


def test_a_store_with_harmless_changes_is_read(harmless: Path) -> None:
    with Store(harmless, read_only=True) as store:
        assert store.warning is None
        assert (store.trials(), store.winners()) == (TRIALS, [winner()])


def test_a_store_with_harmless_changes_is_written(harmless: Path) -> None:
    with Store(harmless) as store:
        assert store.trials() == TRIALS
        assert store.add(trial(100))
        assert store.add(trial(0, us=1.0), replace=True)
        store.record_best(winner(ratio=1.2))

        assert len(store.trials()) == 101
        assert (store.warning, store.verify()) == (None, [])
    assert not set_aside(harmless)


# Changes after which the file is damaged.


@pytest.mark.parametrize(
    ("statements", "trials"),
    [
        pytest.param(["ALTER TABLE trials DROP COLUMN compile_s"], [], id="a lost column"),
        pytest.param(
            ["ALTER TABLE trials RENAME COLUMN compile_s TO compile_seconds"],
            [],
            id="a renamed column",
        ),
        pytest.param(["DROP TABLE leases"], TRIALS, id="a lost table"),
        pytest.param(
            [
                "CREATE TABLE copy AS SELECT * FROM trials",
                "DROP TABLE trials",
                "ALTER TABLE copy RENAME TO trials",
            ],
            TRIALS,
            id="a lost key, so that two rows can have one identity",
        ),
    ],
)
def test_what_others_take_away_is_made_good(
    path: Path, statements: list[str], trials: list[object]
) -> None:
    write_newest(path)
    sql(path, *statements)

    with warned(
        "a new store was started with the .* 1 winners that can still be read", path
    ) as store:
        assert store.trials() == trials
        assert store.winners() == [winner()]
        assert store.add(trial(100))
    assert len(set_aside(path)) == 1


@pytest.mark.parametrize("version", VERSIONS)
def test_what_others_take_away_of_an_older_version_is_made_good(path: Path, version: int) -> None:
    write_version(version, path, TRIALS, [winner()])
    sql(path, "ALTER TABLE winners DROP COLUMN rounds")

    with warned("a new store was started with the 100 trials and 0 winners", path) as store:
        assert (store.trials(), store.winners()) == (TRIALS, [])


# Rows that are not what was stored, though all their fields are valid.


@pytest.fixture(
    params=[
        pytest.param("us = us * 2", id="a figure"),
        pytest.param("config = replace(config, 'sms=2', 'sms=29')", id="a config"),
        pytest.param(
            "status = 'wrong', us = NULL, ratio = NULL, ratio_low = NULL, ratio_high = NULL",
            id="a status",
        ),
        pytest.param("weights = 'cold'", id="the state of the weights"),
        pytest.param("epilogue = 'bias'", id="an epilogue"),
    ]
)
def altered(path: Path, request: pytest.FixtureRequest) -> Path:
    """The path of a store of five trials, of which the third was altered."""
    fill(path, 5)
    sql(path, f"UPDATE trials SET {request.param} WHERE id = 3")
    return path


def test_an_altered_row_counts_as_not_measured(altered: Path) -> None:
    with Store(altered) as store:
        assert store.trials() == [trial(i) for i in (0, 1, 3, 4)]


def test_a_full_check_names_an_altered_row(altered: Path) -> None:
    with Store(altered) as store:
        problems = store.verify()

    assert any("trials[3] was changed after it was stored" in problem for problem in problems), (
        problems
    )


def test_a_new_result_takes_the_place_of_an_altered_row(altered: Path) -> None:
    again = trial(2)
    with Store(altered) as store:
        assert store.add(again)

        assert store.find(again.gpu, again.workload, again.kernel, again.source, again.config)


def test_a_winner_is_looked_up(path: Path) -> None:
    with Store(path) as store:
        store.record_best(winner())

        assert [each.config for each in store.tuned(H100)] == [winner().config]


def test_an_altered_winner_is_not_looked_up(path: Path) -> None:
    fill(path, 1)
    sql(path, "UPDATE winners SET us = us / 2")

    with Store(path, read_only=True) as store:
        assert store.tuned(H100) == []
        assert store.winners() == []

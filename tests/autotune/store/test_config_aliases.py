"""Stored configs after a field was renamed: found, claimed, exported, shipped by the new name."""

import contextlib
import dataclasses
import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import stored
from support.stored import BARE, H100, WORKLOAD, sql
from support.tables import signed

from outblas.autotune.store import config_aliases, queries, tables, transfer, validation
from outblas.autotune.store.records import BestConfig, Trial
from outblas.autotune.store.store import Store
from outblas.core import registry

KERNEL = "stub.renamed"
MODULE = """
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import a_dsl_that_is_not_installed


@dataclass(frozen=True)
class Config:
    ALIASES: ClassVar[Mapping[str, str]] = {"ring": "depth", "rings": "depth", "swap": "swap_ab"}

    tile: int = 64
    depth: int = 4
    swap_ab: bool = False
"""
OLD, NEW = "tile=64,ring=5,swap=True", "tile=64,depth=5,swap_ab=True"
MIDDLE = "tile=64,rings=5,swap=True"


# What tells a trial of `KERNEL` apart, but for its config.
IDENTITY = (H100, WORKLOAD, KERNEL, "abc")


@pytest.fixture(autouse=True)
def _renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel whose module cannot be imported here, and two of whose fields were renamed."""
    (tmp_path / "a_renamed_config.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    module_name = registry.module_name
    monkeypatch.setattr(
        registry,
        "module_name",
        lambda kernel: "a_renamed_config" if kernel == KERNEL else module_name(kernel),
    )
    config_aliases.renamed_fields.cache_clear()
    yield
    config_aliases.renamed_fields.cache_clear()


def trial(config: str, **changes: Any) -> Trial:
    return stored.trial(kernel=KERNEL, config=config, **changes)


def winner(config: str, **changes: Any) -> BestConfig:
    finalists = tuple(
        dataclasses.replace(stored.FINALIST, kernel=kernel, config=config)
        for kernel in (KERNEL, "no.such_kernel")
    )
    return stored.winner(
        kernel=KERNEL, config=config, runner_up=config, finalists=finalists, **changes
    )


def current(record: BestConfig) -> BestConfig:
    """The winner of an old text with current names; another kernel's finalist keeps its text."""
    first, second = record.finalists
    return dataclasses.replace(
        record,
        config=NEW,
        runner_up=NEW,
        finalists=(dataclasses.replace(first, config=NEW), second),
    )


@contextlib.contextmanager
def knowing_the_old_names_alone() -> Iterator[None]:
    """What is written meanwhile is as a version wrote it that did not know the current names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_aliases, "renamed_fields", lambda kernel: {})
        yield


def as_an_older_version(path: Path, *records: Trial | BestConfig) -> None:
    """Puts records into a store's file as a version did that knew the old names alone."""
    Store(path).close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.row_factory = sqlite3.Row
        with knowing_the_old_names_alone():
            for record in records:
                table = "winners" if isinstance(record, BestConfig) else "trials"
                queries._put(connection, table, queries._row(record), record.gpu)


def stored_configs(path: Path) -> list[str]:
    """The configs of the trials in a store's file, as it has them."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return sorted(row[0] for row in connection.execute("SELECT config FROM trials"))


# Texts.


@pytest.mark.parametrize("text", [OLD, MIDDLE, NEW])
def test_a_text_gets_the_current_names(text: str) -> None:
    assert config_aliases.current_text(KERNEL, text) == NEW


def test_a_text_of_an_unknown_kernel_is_left_as_it_is() -> None:
    assert config_aliases.current_text("no.such_kernel", OLD) == OLD


def test_a_text_that_names_a_field_twice_is_left_as_it_is() -> None:
    contradicting = "ring=5,depth=6"

    assert config_aliases.current_text(KERNEL, contradicting) == contradicting


@pytest.mark.parametrize("text", [OLD, MIDDLE, NEW])
def test_a_config_has_a_spelling_by_each_name(text: str) -> None:
    assert config_aliases.spellings(KERNEL, text) == (NEW, OLD, MIDDLE)


@pytest.mark.parametrize(
    ("kernel", "text"), [(KERNEL, "tile=64"), ("no.such_kernel", OLD)], ids=["no alias", "unknown"]
)
def test_a_config_without_renamed_fields_has_one_spelling(kernel: str, text: str) -> None:
    assert config_aliases.spellings(kernel, text) == (text,)


# Stores.


@pytest.fixture
def old(path: Path) -> Path:
    """A store with a trial and a winner of an older version."""
    as_an_older_version(path, trial(OLD), winner(OLD))
    return path


@pytest.mark.parametrize("read_only", [True, False], ids=["to read", "to write"])
class TestAnOldStore:
    def test_is_read_with_current_names(self, old: Path, read_only: bool) -> None:
        with Store(old, read_only=read_only) as store:
            assert store.trials() == [trial(NEW)]
            assert store.winners() == [current(winner(OLD))]
            assert [each.config for each in store.tuned(H100)] == [NEW]

    def test_is_listed_with_current_names(self, old: Path, read_only: bool) -> None:
        with Store(old, read_only=read_only) as store:
            assert store.browse() == ([trial(NEW)], 1)
            assert [each.winner["config"] for each in store.summaries()] == [NEW]
            assert store.stream(lambda trials, winners: [t.config for t in trials]) == [NEW]

    def test_is_sound(self, old: Path, read_only: bool) -> None:
        with Store(old, read_only=read_only) as store:
            assert store.verify() == []

    def test_keeps_its_text_for_an_older_outblas(self, old: Path, read_only: bool) -> None:
        with Store(old, read_only=read_only) as store:
            store.trials()

        assert stored_configs(old) == [OLD]


def test_reading_an_old_store_does_not_change_its_file(old: Path) -> None:
    before = old.read_bytes()

    with Store(old, read_only=True) as store:
        store.trials()

    assert old.read_bytes() == before


@pytest.mark.parametrize("text", [OLD, MIDDLE, NEW])
@pytest.mark.parametrize("there", [OLD, MIDDLE, NEW])
class TestAConfigIsOneTrialByAnyName:
    def test_when_it_is_looked_for(self, path: Path, there: str, text: str) -> None:
        as_an_older_version(path, trial(there))

        with Store(path) as store:
            assert store.find(*IDENTITY, text) == trial(NEW)
            assert store.claim(*IDENTITY, text).known == trial(NEW)

    def test_when_it_is_added(self, path: Path, there: str, text: str) -> None:
        as_an_older_version(path, trial(there))

        with Store(path) as store:
            assert not store.add(trial(text, us=1.0))
            assert store.merge([trial(text, us=1.0)], []) == (0, 0)
            assert store.trials() == [trial(NEW)]

    def test_when_it_is_replaced(self, path: Path, there: str, text: str) -> None:
        as_an_older_version(path, trial(there))

        with Store(path) as store:
            assert store.add(trial(text, us=2.0), replace=True)
            assert store.trials() == [trial(NEW, us=2.0)]

        assert stored_configs(path) == [NEW]


def test_what_may_have_been_circumstance_gives_way_under_any_name(path: Path) -> None:
    none = dict.fromkeys(("us", "ratio", "ratio_low", "ratio_high", "clock_mhz"))
    as_an_older_version(path, trial(OLD, status="hang", **none))

    with Store(path) as store:
        assert store.add(trial(NEW))

        assert store.trials() == [trial(NEW)]
    assert stored_configs(path) == [NEW]


def test_a_lease_is_of_the_config_and_not_of_its_text(path: Path) -> None:
    with Store(path) as store, Store(path) as other:
        assert store.claim(*IDENTITY, OLD).granted

        assert other.claim(*IDENTITY, NEW).held


def test_a_lease_is_released_by_any_name(path: Path) -> None:
    with Store(path) as store, Store(path) as other:
        assert store.claim(*IDENTITY, OLD).granted

        store.release(*IDENTITY, MIDDLE)

        assert other.claim(*IDENTITY, OLD).granted


def test_a_claim_finds_what_another_added_by_an_older_name(path: Path) -> None:
    with Store(path) as store, Store(path) as other:
        assert other.claim(*IDENTITY, OLD).granted
        assert other.add(trial(OLD))

        assert store.claim(*IDENTITY, NEW).known == trial(NEW)


def test_what_an_older_version_adds_beside_a_trial_is_read_once(path: Path) -> None:
    with Store(path) as store:
        store.add(trial(NEW))
    as_an_older_version(path, trial(OLD, us=1.0), trial("tile=32,ring=5,swap=True"))
    other = trial("tile=32,depth=5,swap_ab=True")

    with Store(path) as store:
        assert store.trials() == [trial(NEW), other]
        assert {each.config for each in store.browse()[0]} == {NEW, other.config}
        assert store.stream(lambda trials, winners: list(trials)) == [trial(NEW), other]


def test_a_row_that_was_altered_is_not_taken_for_another_spelling(path: Path) -> None:
    """Checksums are of what the file has, and not of the current names."""
    as_an_older_version(path, trial(OLD))
    sql(path, f"UPDATE trials SET config = '{NEW}'")

    with Store(path, read_only=True) as store:
        assert store.trials() == []
        (problem,) = store.verify()
        assert "was changed after it was stored" in problem


# Exports and tables.


@pytest.fixture(params=["lines", "an object"])
def export(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An export of a trial and a winner by an older version, of either format."""
    file = tmp_path / "export.json"
    with knowing_the_old_names_alone():
        if request.param == "lines":
            transfer.export([trial(OLD)], [winner(OLD)], file)
        else:
            content = {
                "format": "outblas-tuning",
                "version": 1,
                "gpus": {H100.key: {**vars(H100)}},
                "trials": [validation.fields_of(trial(OLD))],
                "winners": [validation.fields_of(winner(OLD))],
            }
            file.write_text(signed(json.loads(json.dumps(content))))
    return file


def test_an_old_export_is_read_with_current_names(export: Path) -> None:
    assert transfer.read(export) == ([trial(NEW)], [current(winner(OLD))])


def test_an_old_export_is_imported_once_by_any_name(export: Path, path: Path) -> None:
    with Store(path) as store:
        store.add(trial(NEW))

        assert transfer.import_into(store, export) == (0, 1)

        assert store.trials() == [trial(NEW)]


def test_an_export_has_the_current_names(tmp_path: Path) -> None:
    file = tmp_path / "export.json"

    transfer.export([trial(OLD)], [winner(OLD)], file)

    assert '"ring=' not in file.read_text()


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table that an older version shipped."""
    with knowing_the_old_names_alone():
        (found,) = tables.ship([winner(OLD)], tmp_path)
    assert OLD in found.read_text()
    return found


def test_an_old_table_is_read_with_current_names(table: Path) -> None:
    (entry,) = tables.read_table(table).entries

    assert entry.config == NEW


def test_a_winner_replaces_its_older_name_in_a_table(table: Path) -> None:
    assert tables.ship([winner(MIDDLE, ratio=2.0)], table.parent) == [table]

    assert [each.config for each in tables.read_table(table).entries] == [NEW]
    assert NEW in table.read_text()


# Names without the module.

KERNELS = ("simt.pipelined", "turing.wmma", "hopper.gemm")


def test_the_names_of_a_kernel_s_fields_are_read_without_its_dsl() -> None:
    program = f"""{BARE}from outblas.core import config_source, registry
for kernel in {KERNELS!r}:
    assert config_source.source(registry.module_name(kernel), "Config").defaults, kernel
    found = sorted({{"cutlass", "triton", "torch"}} & set(sys.modules))
    assert not found, (kernel, found)
"""

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr

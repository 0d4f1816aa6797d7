"""Stored configs after a field was renamed: found, claimed, exported, shipped by the new name."""

import contextlib
import dataclasses
import json
import sqlite3
import subprocess
import sys

import pytest
from support import stored
from support.stored import BARE, H100, WORKLOAD, sql
from support.tables import signed

from outblas.autotune.store import config_aliases, queries, tables, transfer, validation
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


@pytest.fixture(autouse=True)
def _renamed(tmp_path, monkeypatch):
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


def trial(config, **changes):
    return stored.trial(kernel=KERNEL, config=config, **changes)


def winner(config, **changes):
    finalists = tuple(
        dataclasses.replace(stored.FINALIST, kernel=kernel, config=config)
        for kernel in (KERNEL, "no.such_kernel")
    )
    return stored.winner(
        kernel=KERNEL, config=config, runner_up=config, finalists=finalists, **changes
    )


def current(record):
    """The winner of an old text with current names; another kernel's finalist keeps its text."""
    first, second = record.finalists
    return dataclasses.replace(
        record,
        config=NEW,
        runner_up=NEW,
        finalists=(dataclasses.replace(first, config=NEW), second),
    )


def as_an_older_version(path, *records):
    """Puts records into a store's file as a version did that knew the old names alone."""
    Store(path).close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.row_factory = sqlite3.Row
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(config_aliases, "renamed_fields", lambda kernel: {})
            for record in records:
                table = "winners" if hasattr(record, "finalists") else "trials"
                queries._put(connection, table, queries._row(record), record.gpu)


def stored_configs(path):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return sorted(row[0] for row in connection.execute("SELECT config FROM trials"))


def test_texts_have_the_current_names():
    assert config_aliases.current_text(KERNEL, OLD) == NEW
    assert config_aliases.current_text(KERNEL, MIDDLE) == NEW
    assert config_aliases.current_text(KERNEL, NEW) == NEW
    assert config_aliases.current_text("no.such_kernel", OLD) == OLD
    contradicting = "ring=5,depth=6"
    assert config_aliases.current_text(KERNEL, contradicting) == contradicting


def test_the_spellings_of_a_config():
    for text in (OLD, MIDDLE, NEW):
        assert config_aliases.spellings(KERNEL, text) == (NEW, OLD, MIDDLE)
    assert config_aliases.spellings(KERNEL, "tile=64") == ("tile=64",)
    assert config_aliases.spellings("no.such_kernel", OLD) == (OLD,)


def test_an_old_store_is_read_with_current_names(path):
    as_an_older_version(path, trial(OLD), winner(OLD))
    before = path.read_bytes()
    for read_only in (True, False):
        with Store(path, read_only=read_only) as store:
            assert store.trials() == [trial(NEW)]
            assert store.winners() == [current(winner(OLD))]
            assert [each.config for each in store.tuned(H100)] == [NEW]
            assert store.browse() == ([trial(NEW)], 1)
            assert [each.winner["config"] for each in store.summaries()] == [NEW]
            assert store.stream(lambda trials, winners: [t.config for t in trials]) == [NEW]
            assert store.verify() == []
        if read_only:
            assert path.read_bytes() == before
    assert stored_configs(path) == [OLD]  # an older outblas finds its own text


@pytest.mark.parametrize("text", [OLD, MIDDLE, NEW])
@pytest.mark.parametrize("there", [OLD, MIDDLE, NEW])
def test_a_config_is_one_trial_by_any_name(path, there, text):
    as_an_older_version(path, trial(there))
    with Store(path) as store:
        identity = H100, WORKLOAD, KERNEL, "abc", text
        assert store.find(*identity) == trial(NEW)
        assert store.claim(*identity).known == trial(NEW)
        assert not store.add(trial(text, us=1.0))
        assert store.merge([trial(text, us=1.0)], []) == (0, 0)
        assert store.add(trial(text, us=2.0), replace=True)
        assert store.trials() == [trial(NEW, us=2.0)]
    assert stored_configs(path) == [NEW]


def test_what_may_have_been_circumstance_gives_way_under_any_name(path):
    none = dict.fromkeys(("us", "ratio", "ratio_low", "ratio_high", "clock_mhz"))
    as_an_older_version(path, trial(OLD, status="hang", **none))
    with Store(path) as store:
        assert store.add(trial(NEW))
        assert store.trials() == [trial(NEW)]
    assert stored_configs(path) == [NEW]


def test_a_lease_is_of_the_config_and_not_of_its_text(path):
    with Store(path) as store, Store(path) as other:
        assert store.claim(H100, WORKLOAD, KERNEL, "abc", OLD).granted
        assert other.claim(H100, WORKLOAD, KERNEL, "abc", NEW).held
        store.release(H100, WORKLOAD, KERNEL, "abc", MIDDLE)
        assert other.claim(H100, WORKLOAD, KERNEL, "abc", OLD).granted
        assert other.add(trial(OLD))
        assert store.claim(H100, WORKLOAD, KERNEL, "abc", NEW).known == trial(NEW)


def test_what_an_older_version_adds_beside_a_trial_is_read_once(path):
    with Store(path) as store:
        store.add(trial(NEW))
    as_an_older_version(path, trial(OLD, us=1.0), trial("tile=32,ring=5,swap=True"))
    other = trial("tile=32,depth=5,swap_ab=True")
    with Store(path) as store:
        assert store.trials() == [trial(NEW), other]
        assert {each.config for each in store.browse()[0]} == {NEW, other.config}
        assert store.stream(lambda trials, winners: list(trials)) == [trial(NEW), other]


def test_a_row_that_was_altered_is_not_taken_for_another_spelling(path):
    """Checksums are of what the file has, and not of the current names."""
    as_an_older_version(path, trial(OLD))
    sql(path, f"UPDATE trials SET config = '{NEW}'")
    with Store(path, read_only=True) as store:
        assert store.trials() == []
        (problem,) = store.verify()
        assert "not what was stored" in problem


def test_exports_of_both_versions_are_read_with_current_names(tmp_path):
    lines, first = tmp_path / "lines.json", tmp_path / "first.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_aliases, "renamed_fields", lambda kernel: {})
        transfer.export([trial(OLD)], [winner(OLD)], lines)
        content = {
            "format": "outblas-tuning",
            "version": 1,
            "gpus": {H100.key: {**vars(H100)}},
            "trials": [validation.fields_of(trial(OLD))],
            "winners": [validation.fields_of(winner(OLD))],
        }
    first.write_text(signed(json.loads(json.dumps(content))))
    for file in (lines, first):
        assert transfer.read(file) == ([trial(NEW)], [current(winner(OLD))])
        with Store(tmp_path / f"{file.name}.sqlite") as store:
            store.add(trial(NEW))
            assert transfer.import_into(store, file) == (0, 1)
            assert store.trials() == [trial(NEW)]
    transfer.export([trial(OLD)], [winner(OLD)], lines)
    assert '"ring=' not in lines.read_text()


def test_shipped_tables_are_read_with_current_names(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_aliases, "renamed_fields", lambda kernel: {})
        (path,) = tables.ship([winner(OLD)], tmp_path)
    assert OLD in path.read_text()
    (entry,) = tables.read_table(path).entries
    assert entry.config == NEW
    assert tables.ship([winner(MIDDLE, ratio=2.0)], tmp_path) == [path]
    assert [each.config for each in tables.read_table(path).entries] == [NEW]
    assert NEW in path.read_text()


@pytest.mark.parametrize("kernel", ["simt.pipelined", "turing.wmma", "hopper.gemm"])
def test_the_names_of_a_kernel_s_fields_are_read_without_its_dsl(kernel):
    program = f"""{BARE}from outblas.core import config_source, registry
assert config_source.source(registry.module_name({kernel!r}), "Config").defaults
found = sorted({{"cutlass", "triton", "torch"}} & set(sys.modules))
assert not found, found
"""
    subprocess.run([sys.executable, "-c", program], check=True)

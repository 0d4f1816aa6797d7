"""Shipped tables: what was shipped is read again, of this version and of the one before."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paths import DATA
from support.stored import BARE, H100
from support.tables import FIGURES, WORKLOAD, examples, inside, put, signed, winner, winners

from outblas.autotune.store import table_version_2, transfer, validation
from outblas.autotune.store.records import Gpu, Workload
from outblas.autotune.store.tables import TABLES, Entry, read_table, ship

OLD_TABLE = DATA / "table_version_2.json"
H100_TABLE = TABLES / "NVIDIA_H100_80GB_HBM3.json"


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    """The content of a table of one winner."""
    (path,) = ship([winner()], tmp_path / "tables")
    return json.loads(path.read_text())


@pytest.fixture
def old_table():
    """The content of a table of version 2."""
    return json.loads(OLD_TABLE.read_text())


def test_an_export_is_no_table(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    transfer.export([], [winner()], file)
    with pytest.raises(ValueError, match="format is 'outblas-tuning'"):
        read_table(file.read_text().splitlines()[0])


def test_the_best_winner_of_each_gpu_is_shipped(tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    other = Gpu("NVIDIA/H200 ../x", 90, 132)
    best = winner(ratio=1.3, config="tile_m=256", source="def")
    first, second = ship([winner(), best, winner(ratio=1.1, source="x"), winner(gpu=other)], folder)
    assert [first.name, second.name] == ["NVIDIA_H100_80GB_HBM3.json", "NVIDIA_H200_.._x.json"]
    table = read_table(first)
    assert table.gpu == H100
    assert table == read_table(first.read_text())
    names = (*FIGURES, "kernel", "config", "workload", "confidence")
    fields = {name: getattr(best, name) for name in names}
    assert table.entries == (Entry(**fields, when=best.when[:10]),)
    assert read_table(second).gpu == other


def test_a_table_keeps_its_entries_of_other_workloads_and_kernels(tmp_path: Path) -> None:
    small = Workload(16, 16, 16)
    won = [winner(), winner(workload=small), winner(kernel="simt.naive")]
    (path,) = ship(won, tmp_path)
    ship([winner(config="tile_m=1", ratio=0.5)], tmp_path)
    assert [(e.workload, e.kernel, e.config) for e in read_table(path).entries] == [
        (small, "hopper.hilbert", "tile_m=128"),
        (WORKLOAD, "hopper.hilbert", "tile_m=1"),
        (WORKLOAD, "simt.naive", "tile_m=128"),
    ]


def test_the_order_in_which_winners_are_shipped_does_not_matter(tmp_path: Path) -> None:
    won = [winner(), winner(workload=Workload(16, 16, 16)), winner(kernel="simt.naive")]
    (path,) = ship(won, tmp_path)
    (again,) = ship(won[::-1], tmp_path / "again")
    assert again.read_text() == path.read_text()


def test_a_table_is_plain_indented_json_with_whole_configs_and_all_digits(tmp_path: Path) -> None:
    config = "tile_m=64,order=hilbert,sms=0"
    (path,) = ship([winner(config=config, us=100.123456789, ratio=1.0123456789012)], tmp_path)
    content = json.loads(path.read_text())
    (entry,) = content["entries"]
    assert entry["workload"] == vars(WORKLOAD)
    assert (entry["config"], entry["us"], entry["ratio"]) == (
        config,
        100.123456789,
        1.0123456789012,
    )
    assert path.read_text() == json.dumps(content, indent=2) + "\n"


def test_two_models_of_one_name(tmp_path: Path) -> None:
    half = dataclasses.replace(H100, sms=66)
    for _ in range(2):
        paths = ship([winner(), winner(gpu=half)], tmp_path)
        assert {path.name: read_table(path).gpu.sms for path in paths} == {
            "NVIDIA_H100_80GB_HBM3.json": 66,
            "NVIDIA_H100_80GB_HBM3_132_SMs.json": 132,
        }


def test_ship_replaces_no_table_that_it_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "NVIDIA_H100_80GB_HBM3.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"HBM3\.json: format is None"):
        ship([winner(), winner(gpu=Gpu("A", 80, 108))], tmp_path)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["{}"]


@examples
@given(st.lists(winners, min_size=1, max_size=5))
def test_whatever_is_valid_can_be_shipped(tmp_path_factory: pytest.TempPathFactory, won) -> None:
    won = [dataclasses.replace(each, gpu=H100) for each in won]
    (path,) = ship(won, tmp_path_factory.mktemp("tables"))
    entries = {entry.place: entry for entry in read_table(path).entries}
    assert entries.keys() == {(each.workload, each.kernel) for each in won}
    for (workload, kernel), entry in entries.items():
        alike = [each for each in won if (each.workload, each.kernel) == (workload, kernel)]
        best = sorted(alike, key=lambda each: (each.ratio, each.when))[-1]  # of equals the last
        assert (entry.config, entry.when) == (best.config, best.when[:10])
        for name in (*FIGURES, "confidence"):
            assert getattr(entry, name) == getattr(best, name), name
    again = path.read_text()
    ship(won, path.parent)
    assert path.read_text() == again


def test_every_shipped_table_is_valid() -> None:
    paths = list(TABLES.glob("*.json"))
    assert paths
    for path in paths:
        assert read_table(path).entries, path


def test_a_table_that_is_read_from_version_2_is_shipped_as_it_is_today() -> None:
    """The sample is the table of the H100 that came with the package in version 2."""
    assert read_table(OLD_TABLE).gpu == read_table(H100_TABLE).gpu
    old = {e.place: e for e in read_table(OLD_TABLE).entries}
    assert len(old) > 50
    new = {e.place: e for e in read_table(H100_TABLE).entries}
    for place, entry in old.items():
        assert (new[place].config, new[place].when) == (entry.config, entry.when), place
        # Version 2 had five digits, and seven of a ratio.
        assert new[place].us == pytest.approx(entry.us, rel=1e-4), place
        assert new[place].ratio == pytest.approx(entry.ratio, rel=1e-6), place


def test_shipping_into_a_table_of_version_2_keeps_its_entries(tmp_path: Path) -> None:
    path = tmp_path / "NVIDIA_H100_80GB_HBM3.json"
    path.write_text(OLD_TABLE.read_text())
    before = set(read_table(path).entries)
    new = winner(workload=Workload(17, 19, 23), gpu=read_table(path).gpu)
    assert ship([new], tmp_path) == [path]
    assert json.loads(path.read_text())["version"] == 3
    after = set(read_table(path).entries)
    assert before < after
    assert {entry.place for entry in after - before} == {(new.workload, new.kernel)}


# What is amiss is refused.


def refuses_table(table, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_table(signed(table))


@pytest.mark.parametrize("name", validation.TABLE_ENTRY)
def test_tampered_entries_are_refused(table: dict[str, Any], name) -> None:
    (entry,) = table["entries"]
    for value in ([], "x" * 5000, math.nan, True):
        entry[name] = value
        refuses_table(table, f"entries[0].{name} is")
    del entry[name]
    refuses_table(table, f"entries[0] has no {name}")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("version",), 1, "version is 1, expected 2 or 3"),
        (("version",), True, "version is True, expected 2 or 3"),
        (("entries",), {}, "entries is {}, expected a JSON list"),
        (("entries", 0), [], "entries[0] is [], expected an object"),
        (("entries", 0, "more"), 1, "entries[0] has 'more', expected only"),
        (("entries", 0, "kernel"), "A", "entries[0].kernel is 'A'"),
        (("entries", 0, "config"), "tile_m", "entries[0].config is 'tile_m'"),
        (("entries", 0, "workload", "M"), 0, "entries[0].workload.M is 0, expected an integer"),
        (("entries", 0, "workload", "layout"), "xy", "entries[0].workload.layout is 'xy'"),
        (("gpu", "sms"), "x", "gpu.sms is 'x'"),
        (("more",), 1, "the file has 'more', expected only"),
    ],
)
def test_tampered_tables_are_refused(table: dict[str, Any], place, value, message: str) -> None:
    put(table, place, value)
    refuses_table(table, message)


def test_an_entry_that_is_there_twice_is_refused(table: dict[str, Any]) -> None:
    table["entries"].append(table["entries"][0])
    refuses_table(table, "entries[1] is the second of hopper.hilbert at 4096x512x64")


def test_a_table_that_was_changed_is_refused(table: dict[str, Any]) -> None:
    table["entries"][0]["us"] += 1
    with pytest.raises(ValueError, match="the file was changed or is not whole"):
        read_table(json.dumps(table))


ROW = ("kernels", 0, "entries", 0)


@pytest.mark.parametrize("name", validation.ROW_VERSION_2)
def test_tampered_rows_of_version_2_are_refused(old_table, name) -> None:
    row, column = inside(old_table, ROW), list(validation.ROW_VERSION_2).index(name)
    for value in ([], "x" * 5000, math.nan, True):
        row[column] = value
        refuses_table(old_table, f"kernels[0].entries[0].{name} is")
    del row[column]
    expected = f"kernels[0].entries[0] is {validation.shown(row)}, expected a list of workload"
    refuses_table(old_table, expected)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("columns",), ["workload"], "columns is ['workload'], expected workload, changes, us"),
        (("kernels",), {}, "kernels is {}, expected a JSON list"),
        (("kernels", 0, "kernel"), "A", "kernels[0].kernel is 'A'"),
        (("kernels", 0, "base"), "tile_m", "kernels[0].base is 'tile_m'"),
        (("kernels", 0, "entries"), {}, "kernels[0].entries is {}, expected a list"),
        ((*ROW, 1), "tile_q=1", "kernels[0].entries[0].changes: 'tile_q' is no field of the base"),
        ((*ROW, 0), "16x16 float16 nt", "kernels[0].entries[0].workload is '16x16 float16 nt'"),
        ((*ROW, 0), "16", "kernels[0].entries[0] is ['16', "),
        ((*ROW, -1), "", "expected a kind of workload and a day in the first"),
        ((*ROW, 0), "0 float16 nt", "kernels[0].entries[0].workload.M is 0, expected an integer"),
        (
            (*ROW, 0),
            "9" * 15 + " float16 nt",
            "kernels[0].entries[0].workload.M is 999999999999999, expected",
        ),
        (
            (*ROW, 0),
            "16 tf32 to bfloat16 nt",
            "kernels[0].entries[0].workload.out_dtype is 'bfloat16'",
        ),
        (("gpu", "sms"), "x", "gpu.sms is 'x'"),
    ],
)
def test_tampered_tables_of_version_2_are_refused(old_table, place, value, message: str) -> None:
    put(old_table, place, value)
    refuses_table(old_table, message)


def test_an_entry_that_version_2_has_twice_is_refused(old_table) -> None:
    first = old_table["kernels"][0]["entries"]
    first.append(first[-1])
    refuses_table(old_table, f"kernels[0].entries[{len(first) - 1}] is the second of")


@pytest.mark.parametrize(
    ("base", "changes", "config"),
    [
        ("", "", ""),
        ("a=1,b=-2.5", "", "a=1,b=-2.5"),
        ("a=1,b=2", "b=3", "a=1,b=3"),
        ("a=1,b=2", "b=3,a=", "a=,b=3"),
    ],
)
def test_changes_of_version_2_are_applied_to_the_base(base: str, changes: str, config: str) -> None:
    assert table_version_2.applied(base, changes) == config


def test_reading_a_table_imports_neither_torch_nor_sqlite() -> None:
    """Apart from what the package itself imports."""
    code = (
        f"{BARE}import outblas.autotune.store.tables\n"
        "assert not {'torch', 'sqlite3'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

"""Shipped tables: what was shipped is read again, of this version and of the one before."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paths import DATA
from support.stored import BARE, H100
from support.tables import FIGURES, WORKLOAD, examples, winner, winners

from outblas.autotune.store import table_version_2, transfer
from outblas.autotune.store.records import BestConfig, Gpu, Workload, age, latest_date
from outblas.autotune.store.tables import TABLES, Entry, read_table, ship

OLD_TABLE = DATA / "table_version_2.json"
H100_TABLE = TABLES / "NVIDIA_H100_80GB_HBM3.json"


def test_an_export_is_no_table(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    transfer.export([], [winner()], file)
    first_line = file.read_text().splitlines()[0]

    with pytest.raises(ValueError, match="format is 'outblas-tuning'"):
        read_table(first_line)


# Shipping.


def test_each_gpu_has_a_table_that_is_named_after_it(tmp_path: Path) -> None:
    other = Gpu("NVIDIA/H200 ../x", 90, 132)

    first, second = ship([winner(), winner(gpu=other)], tmp_path / "tables")

    assert [first.name, second.name] == ["NVIDIA_H100_80GB_HBM3.json", "NVIDIA_H200_.._x.json"]
    assert [read_table(first).gpu, read_table(second).gpu] == [H100, other]


def test_a_table_is_read_from_a_path_or_a_text(tmp_path: Path) -> None:
    (path,) = ship([winner()], tmp_path)

    assert read_table(path) == read_table(path.read_text())


def test_the_best_winner_of_a_gpu_is_shipped(tmp_path: Path) -> None:
    best = winner(ratio=1.3, config="tile_m=256", source="def")

    (path,) = ship([winner(), best, winner(ratio=1.1, source="x")], tmp_path)

    names = (*FIGURES, "kernel", "config", "workload", "confidence")
    fields = {name: getattr(best, name) for name in names}
    assert read_table(path).entries == (Entry(**fields, when=best.when[:10]),)


def test_a_table_keeps_its_entries_of_other_workloads_and_kernels(tmp_path: Path) -> None:
    small = Workload(16, 16, 16)
    (path,) = ship([winner(), winner(workload=small), winner(kernel="simt.naive")], tmp_path)

    ship([winner(config="tile_m=1", ratio=0.5)], tmp_path)

    assert [(each.workload, each.kernel, each.config) for each in read_table(path).entries] == [
        (small, "hopper.hilbert", "tile_m=128"),
        (WORKLOAD, "hopper.hilbert", "tile_m=1"),
        (WORKLOAD, "simt.naive", "tile_m=128"),
    ]


def test_the_order_in_which_winners_are_shipped_does_not_matter(tmp_path: Path) -> None:
    won = [winner(), winner(workload=Workload(16, 16, 16)), winner(kernel="simt.naive")]

    (path,) = ship(won, tmp_path)
    (reversed_path,) = ship(won[::-1], tmp_path / "reversed")

    assert reversed_path.read_text() == path.read_text()


def test_a_table_is_indented_json(tmp_path: Path) -> None:
    (path,) = ship([winner()], tmp_path)

    text = path.read_text()
    assert text == json.dumps(json.loads(text), indent=2) + "\n"


def test_an_entry_has_its_workload_and_config_in_full_and_all_digits(tmp_path: Path) -> None:
    config = "tile_m=64,order=hilbert,sms=0"

    (path,) = ship([winner(config=config, us=100.123456789, ratio=1.0123456789012)], tmp_path)

    (entry,) = json.loads(path.read_text())["entries"]
    assert Workload(**entry["workload"]) == WORKLOAD
    assert entry["config"] == config
    assert (entry["us"], entry["ratio"]) == (100.123456789, 1.0123456789012)


def test_the_workload_of_a_plain_product_is_written_as_in_older_tables(tmp_path: Path) -> None:
    (path,) = ship([winner()], tmp_path)

    (entry,) = json.loads(path.read_text())["entries"]
    assert list(entry["workload"]) == ["M", "N", "K", "dtype", "out_dtype", "layout"]


def test_a_table_has_results_of_other_conditions_beside_plain_ones(
    tmp_path: Path,
) -> None:
    plain = Workload(16, 4096, 4096)
    cold = dataclasses.replace(plain, weights="cold")
    fused = dataclasses.replace(plain, epilogue="bias+gelu")

    groups = dataclasses.replace(plain, grouping="8:zipf")

    (path,) = ship([winner(workload=each) for each in (fused, plain, cold, groups)], tmp_path)

    assert {entry.workload for entry in read_table(path).entries} == {plain, cold, fused, groups}


@pytest.mark.parametrize("times", [1, 2], ids=["shipped once", "shipped again"])
def test_two_models_of_one_name_have_a_table_each(tmp_path: Path, times: int) -> None:
    half = dataclasses.replace(H100, sms=66)

    for _ in range(times):
        paths = ship([winner(), winner(gpu=half)], tmp_path)

    assert {path.name: read_table(path).gpu.sms for path in paths} == {
        "NVIDIA_H100_80GB_HBM3.json": 66,
        "NVIDIA_H100_80GB_HBM3_132_SMs.json": 132,
    }


def test_a_table_that_cannot_be_read_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "NVIDIA_H100_80GB_HBM3.json"
    path.write_text("{}")

    with pytest.raises(ValueError, match=r"HBM3\.json: format is None"):
        ship([winner(), winner(gpu=Gpu("A", 80, 108))], tmp_path)

    assert [each.read_text() for each in tmp_path.iterdir()] == ["{}"]


some_winners = st.lists(
    winners.map(lambda each: dataclasses.replace(each, gpu=H100)), min_size=1, max_size=5
)


@examples
@given(some_winners)
def test_whatever_is_valid_can_be_shipped(
    tmp_path_factory: pytest.TempPathFactory, won: list[BestConfig]
) -> None:
    best: dict[tuple[Workload, str], BestConfig] = {}
    latest = latest_date()
    for each in sorted(won, key=lambda each: (each.ratio, age(each.when, latest))):  # the last
        best[each.workload, each.kernel] = each

    (path,) = ship(won, tmp_path_factory.mktemp("tables"))

    entries = {entry.place: entry for entry in read_table(path).entries}
    assert entries.keys() == best.keys()
    for place, entry in entries.items():
        assert (entry.config, entry.when) == (best[place].config, best[place].when[:10]), place
        for name in (*FIGURES, "confidence"):
            assert getattr(entry, name) == getattr(best[place], name), (place, name)


@examples
@given(some_winners)
def test_shipping_the_same_again_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, won: list[BestConfig]
) -> None:
    (path,) = ship(won, tmp_path_factory.mktemp("tables"))
    before = path.read_text()

    ship(won, path.parent)

    assert path.read_text() == before


# The tables that come with the package.


def test_there_are_shipped_tables() -> None:
    assert list(TABLES.glob("*.json"))


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_every_shipped_table_is_valid_and_has_entries(path: Path) -> None:
    assert read_table(path).entries


# Version 2.


def test_a_table_that_is_read_from_version_2_is_shipped_as_it_is_today() -> None:
    """The sample is the table of the H100 that came with the package in version 2. Some of its
    shapes were measured again since.
    """
    old, new = read_table(OLD_TABLE), read_table(H100_TABLE)

    today = {entry.place: entry for entry in new.entries}
    assert old.gpu == new.gpu
    same = [entry for entry in old.entries if today[entry.place].when == entry.when]
    assert len(same) > 50
    for entry in same:
        now = today[entry.place]
        assert now.config == entry.config, entry.place
        # Version 2 had five digits, and seven of a ratio.
        assert now.us == pytest.approx(entry.us, rel=1e-4), entry.place
        assert now.ratio == pytest.approx(entry.ratio, rel=1e-6), entry.place


@pytest.fixture
def folder_of_version_2(tmp_path: Path) -> Path:
    """A folder with the H100's table in version 2."""
    (tmp_path / H100_TABLE.name).write_text(OLD_TABLE.read_text())
    return tmp_path


NEW = winner(workload=Workload(17, 19, 23), gpu=read_table(OLD_TABLE).gpu)


def test_shipping_into_a_table_of_version_2_makes_it_one_of_version_3(
    folder_of_version_2: Path,
) -> None:
    (path,) = ship([NEW], folder_of_version_2)

    assert path == folder_of_version_2 / H100_TABLE.name
    assert json.loads(path.read_text())["version"] == 3


def test_shipping_into_a_table_of_version_2_keeps_its_entries(folder_of_version_2: Path) -> None:
    before = set(read_table(OLD_TABLE).entries)

    (path,) = ship([NEW], folder_of_version_2)

    after = set(read_table(path).entries)
    assert before < after
    assert {entry.place for entry in after - before} == {(NEW.workload, NEW.kernel)}


@pytest.mark.parametrize(
    ("base", "changes", "config"),
    [
        pytest.param("", "", "", id="nothing"),
        pytest.param("a=1,b=-2.5", "", "a=1,b=-2.5", id="no change"),
        pytest.param("a=1,b=2", "b=3", "a=1,b=3", id="one field"),
        pytest.param("a=1,b=2", "b=3,a=", "a=,b=3", id="a field that is empty now"),
    ],
)
def test_changes_of_version_2_are_applied_to_the_base(base: str, changes: str, config: str) -> None:
    assert table_version_2.applied(base, changes) == config


# Imports.


def test_reading_a_table_imports_neither_torch_nor_sqlite() -> None:
    """Apart from what the package itself imports, and whoever started Python, as coverage does."""
    code = f"""{BARE}
before = set(sys.modules)
import outblas.autotune.store.tables
print(sorted({{"torch", "sqlite3"}} & (set(sys.modules) - before)))
"""

    imported = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)

    assert imported == "[]\n"

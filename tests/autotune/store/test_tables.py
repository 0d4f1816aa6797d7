"""Shipped tables: those that ship, what is written is read again, and what is refused."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.stored import H100, H200, INTERPRETED, OTHER, WORKLOAD, winner

from outblas.autotune.search import target
from outblas.autotune.store import tables, transfer
from outblas.autotune.store.records import Workload
from outblas.base import configs
from tools import ship

SHIPPED = sorted(tables.TABLES.glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_tables_are_as_this_version_writes_them(path: Path) -> None:
    """A field that was renamed must not leave calls untuned."""
    table = tables.read_table(path)

    assert tables.to_bytes(table) == path.read_bytes()
    assert table.entries
    for entry in table.entries:
        kind = target.of(entry.kernel).load().Config
        assert configs.to_text(configs.from_text(kind, entry.config)) == entry.config


CASES = [
    winner(),
    winner(workload=dataclasses.replace(WORKLOAD, weights="cold", epilogue="bias+gelu")),
    winner(workload=Workload(8, 64, 64, layout="nn", grouping="8:zipf"), kernel="hopper.grouped"),
    winner(workload=OTHER, kernel="portable", config=""),
]


def test_what_is_shipped_is_read_again(tmp_path: Path) -> None:
    (path,) = ship.ship(CASES, tmp_path / "tables")

    table = tables.read_table(path)

    assert path.name == "NVIDIA_H100_80GB_HBM3.json"
    assert table.gpu == H100
    assert {entry.place for entry in table.entries} == {
        (each.workload, each.kernel) for each in CASES
    }
    assert {entry.when for entry in table.entries} == {"2026-02-01"}
    assert tables.read_table(tables.to_bytes(table).decode()) == table


def test_shipping_takes_the_best_where_a_store_takes_the_newest(tmp_path: Path) -> None:
    ship.ship([winner(), winner(workload=OTHER)], tmp_path)
    slow = winner(ratio=0.5, when="2026-03-01T00:00:00+00:00")
    fast = winner(ratio=0.9, config="tile_m=64")

    (path,) = ship.ship([fast, slow], tmp_path)

    ratios = {entry.workload: entry.ratio for entry in tables.read_table(path).entries}
    assert ratios == {WORKLOAD: 0.9, OTHER: 1.047}
    newest = tables.best_of([fast, slow], lambda won: won.when)
    assert [entry.ratio for entry in newest.entries] == [0.5]


def test_the_program_ships_what_an_export_has_but_not_of_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "export"
    arguments = [str(file), "--to", str(tmp_path / "tables")]

    transfer.write(file, [], [winner(gpu=INTERPRETED)])
    assert ship.main(arguments) == 1
    transfer.write(file, [], [winner(gpu=INTERPRETED), winner()])
    assert ship.main(arguments) == 0

    (path,) = (tmp_path / "tables").iterdir()
    assert capsys.readouterr().out.splitlines()[-1] == str(path)
    assert len(tables.read_table(path).entries) == 1


def test_each_model_has_a_file(tmp_path: Path) -> None:
    models = [H100, dataclasses.replace(H100, sms=114), H200]

    paths = ship.ship([winner(gpu=gpu) for gpu in models], tmp_path)

    assert {path.stem: tables.read_table(path).gpu.model for path in paths} == {
        "NVIDIA_H100_80GB_HBM3": (H100.name, 114),
        "NVIDIA_H100_80GB_HBM3_132_SMs": H100.model,
        "NVIDIA_H200": H200.model,
    }


def test_what_cannot_be_shipped_is_refused_with_nothing_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a number above 0"):
        ship.ship([winner(), winner(workload=OTHER, us=0.0)], tmp_path / "tables")
    assert not (tmp_path / "tables").exists()


def test_a_table_that_cannot_be_read_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "NVIDIA_H200.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"NVIDIA_H200.json: the file is {}, expected the format"):
        ship.ship([winner(gpu=H200)], tmp_path)
    assert path.read_text() == "{}"


Change = Callable[[Any], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.update(format="other"), "expected the format 'outblas-table'"),
        (lambda table: table.update(version=3), "the file has 'version', expected only format"),
        (lambda table: table.update(entries={}), "entries is {}, expected a list"),
        (lambda table: table["entries"].append(7), r"entries\[1\] is 7, expected an object"),
        (
            lambda table: table["entries"].append(table["entries"][0]),
            r"entries\[1\] is the second entry of hopper.hilbert at 4096 bfloat16 nt",
        ),
        (
            lambda table: table["entries"][0]["workload"].update(layout="xy"),
            r"entries\[0\].workload: layout is 'xy', expected one of nt, nn, tn, tt",
        ),
    ],
)
def test_a_table_with_an_error_is_refused(change: Change, message: str) -> None:
    table = json.loads(tables.to_bytes(tables.best_of([winner()], lambda won: won.when)))
    change(table)
    with pytest.raises(ValueError, match=message):
        tables.read_table(json.dumps(table))

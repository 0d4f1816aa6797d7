"""Result files in little space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_report import entry, invoke, report, write

from outblas.report import results


def test_packed_results_say_what_they_said(tmp_path: Path) -> None:
    entries = [entry("portable", 0.8), entry("cublas", 1.0) | {"us_apart": 3.5}, entry("hopper.hilbert", 0.9)]
    path = write(tmp_path / "a.json", report(*entries))
    before, size = results.load([path]), path.stat().st_size
    made = results.packed(path)
    write(path, made)
    assert results.packed(path) == made
    assert results.load([path]) == before
    assert path.stat().st_size < 0.8 * size
    assert [sorted(made) for made in results.parsed(path)["results"]] == [
        sorted(name for name, value in said.items() if value is not None) for said in entries
    ]


@pytest.mark.parametrize(
    ("values", "columns"),
    [
        ([{"x": 1, "y": 2}, {"y": 3}, {"x": 4, "z": 5}], [{"v": ["x", "y", "z"]}]),
        ([[{"x": [1, 2]}, {"x": {"a": 1}, "y": 2}], [], [{"y": 3}]], [{"v": ["x", "y"]}]),
        ([{"x": 1}, [{"x": 2}]], [{"v": ["x"]}]),
        ([{"x": [1]}, {"x": [2]}], ["v"]),  # of one object in a list, or of two
        ([{"x": None}, {"x": 2}], ["v"]),
        ([{}, {"x": 2}], ["v"]),
        ([{"ld": {"x": 1, "y": [2]}, "st": {"x": 3}}, {"ld": {"y": 4}}], ["v.ld.x", "v.ld.y", "v.st.x"]),
        ([{"ld": {}}, {"ld": {"x": 1}, "st": 2}, {"st": {"x": None}}], ["v"]),
        ([{"hopper.gemm": {"x": 1}}, {"ld": {"x.y": 1}}], ["v"]),
        ([[1, 2], [3]], ["v"]),
        ([3, {"x": 1}], ["v"]),
        ([*3 * ["tile_m=1,order=row,flag=True"], "", "order=007"], [{"v=": ["tile_m", "order", "flag"]}]),
        (["x=1,y=2", "y=2,x=1"], ["v"]),  # in another order
        (["x=1,y=2", "x=1,z", "x=1,y=2"], ["v"]),
        (["x=1"], ["v"]),  # no shorter
        (["x=1,y=2", 3], ["v"]),
    ],
)
def test_objects_within_are_packed_too(tmp_path: Path, values: list[Any], columns: list[Any]) -> None:
    said = [{"v": value} for value in values]
    path = write(tmp_path / "a.json", {"environment": {}, "results": said})
    made = results.packed(path)
    assert made["columns"] == columns
    write(path, made)
    assert results.parsed(path)["results"] == said
    assert results.packed(path) == made


@pytest.mark.parametrize(
    ("columns", "rows", "message"),
    [
        ("us", [[1]], "columns is 'us', expected the names of fields"),
        (["us"], [[1, 2]], r"results\[0\] is \[1, 2\], expected a list of up to 1 values"),
        (["us"], [{"us": 1}], r"results\[0\] is \{'us': 1\}, expected a list"),
        (["us"], 3, "results is int, expected a list"),
        ([{"us": "x"}], [[[1]]], "expected the names of fields"),
        ([{"us": ["x"], "v": []}], [[[1]]], "expected the names of fields"),
        ([{"us": ["x"]}], [[1]], r"results\[0\]\.us is 1, expected a list of up to 1 values"),
        (["us", "us.ld.x"], [[1, 2]], "expected fields, or those of an object's objects"),
        (["us.x"], [[1]], "expected fields, or those of an object's objects"),
        ([{"us=": ["x"]}], [[1]], r"results\[0\]\.us= is 1, expected a list of up to 1 values"),
        ([{"us": ["x"]}], [[[[1, 2]]]], r"results\[0\]\.us is \[1, 2\], expected a list of up to 1 values"),
    ],
)
def test_badly_packed_results_are_refused(tmp_path: Path, columns: Any, rows: Any, message: str) -> None:
    path = write(tmp_path / "a.json", {"environment": {"gpu": "x"}, "columns": columns, "results": rows})
    with pytest.raises(ValueError, match=message):
        results.load([path])


def test_what_all_entries_say_is_said_once(tmp_path: Path) -> None:
    said = [{"dtype": "x", "mode": "", "N": 1}, {"dtype": "x", "mode": "y", "N": 1}]
    path = write(tmp_path / "a.json", {"environment": {}, "results": said})
    made = results.packed(path)
    assert (made["same"], made["columns"]) == ({"dtype": "x"}, ["mode", "N"])
    write(path, made)
    assert results.parsed(path) == {"environment": {}, "results": said}
    write(path, made | {"same": {"dtype": 3}})
    with pytest.raises(ValueError, match=r"same is \{'dtype': 3\}, expected text"):
        results.parsed(path)


def test_the_command_packs_a_row_a_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", report(entry("portable", 0.8), entry("cublas", 1.0)))
    assert invoke("pack", str(path)).exit_code == 0
    lines = path.read_text().splitlines()
    assert [line[:1] for line in lines].count("[") == 2
    assert results.parsed(path)["results"][1]["provider"] == "cublas"
    path.write_text("[]")
    assert invoke("pack", str(path)).exit_code == 2


@pytest.mark.parametrize("name", ["a.b.c", "v="])
def test_names_that_packing_uses_are_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "a.json", {"environment": {}, "results": [{name: 1}]})
    with pytest.raises(ValueError, match="a field is named"):
        results.packed(path)


def test_what_holds_no_entries_is_not_packed(tmp_path: Path) -> None:
    for value in ({"environment": {}}, {"environment": {}, "results": [1]}, []):
        path = write(tmp_path / "a.json", value)
        before = path.read_text()
        with pytest.raises(ValueError, match="expected an object with environment and results"):
            results.packed(path)
        assert path.read_text() == before

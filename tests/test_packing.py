"""Result files in little space."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_report import entry, invoke

from outblas.report import results


def of(*entries: Any) -> dict[str, Any]:
    return {"environment": {"gpu": "x"}, "results": list(entries)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.json"


def write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))


def packed(file: Path, said: dict[str, Any]) -> dict[str, Any]:
    """What the file has in place of what was said, and says as well; it is not packed twice."""
    write(file, said)
    made = results.packed(file)
    write(file, made)
    assert results.parsed(file) == said
    assert results.packed(file) == made
    return made


def test_packed_results_are_smaller_and_say_what_they_said(file: Path) -> None:
    said = of(
        entry("portable", 0.8), entry("cublas", 1.0, us_apart=3.5), entry("hopper.hilbert", 0.9)
    )
    write(file, said)
    before = results.load([file])
    packed(file, said)
    assert results.load([file]) == before
    assert file.stat().st_size < 0.8 * len(json.dumps(said))


@pytest.mark.parametrize(
    ("values", "columns"),
    [
        ([{"x": 1, "y": 2}, {"y": 3}, {"x": 4, "z": 5}], [{"v": ["x", "y", "z"]}]),
        ([[{"x": [1, 2]}, {"x": {"a": 1}, "y": 2}], [], [{"y": 3}]], [{"v": ["x", "y"]}]),
        ([{"x": 1}, [{"x": 2}]], [{"v": ["x"]}]),
        ([{"x": [1]}, {"x": [2]}], ["v"]),  # of one object in a list, or of two
        ([{"x": None}, {"x": 2}], ["v"]),
        ([{}, {"x": 2}], ["v"]),
        (
            [{"ld": {"x": 1, "y": [2]}, "st": {"x": 3}}, {"ld": {"y": 4}}],
            ["v.ld.x", "v.ld.y", "v.st.x"],
        ),
        ([{"ld": {}}, {"ld": {"x": 1}, "st": 2}, {"st": {"x": None}}], ["v"]),
        ([{"hopper.gemm": {"x": 1}}, {"ld": {"x.y": 1}}], ["v"]),
        ([[1, 2], [3]], ["v"]),
        ([3, {"x": 1}], ["v"]),
        (
            [*3 * ["tile_m=1,order=row,flag=True"], "", "order=007"],
            [{"v=": ["tile_m", "order", "flag"]}],
        ),
        (["x=1,y=2", "y=2,x=1"], ["v"]),  # in another order
        (["x=1,y=2", "x=1,z", "x=1,y=2"], ["v"]),
        (["x=1"], ["v"]),  # no shorter
        (["x=1,y=2", 3], ["v"]),
    ],
)
def test_objects_within_are_packed_too(file: Path, values: list[Any], columns: list[Any]) -> None:
    assert packed(file, of(*({"v": value} for value in values)))["columns"] == columns


@pytest.mark.parametrize(
    ("columns", "rows", "message"),
    [
        ("us", [[1]], "columns is 'us', expected the names of fields"),
        (["us"], [[1, 2]], "results[0] is [1, 2], expected a list of up to 1 values"),
        (["us"], [{"us": 1}], "results[0] is {'us': 1}, expected a list"),
        (["us"], 3, "results is int, expected a list"),
        ([{"us": "x"}], [[[1]]], "expected the names of fields"),
        ([{"us": ["x"], "v": []}], [[[1]]], "expected the names of fields"),
        ([{"us": ["x"]}], [[1]], "results[0].us is 1, expected a list of up to 1 values"),
        (["us", "us.ld.x"], [[1, 2]], "expected fields, or those of an object's objects"),
        (["us.x"], [[1]], "expected fields, or those of an object's objects"),
        ([{"us=": ["x"]}], [[1]], "results[0].us= is 1, expected a list of up to 1 values"),
        (
            [{"us": ["x"]}],
            [[[[1, 2]]]],
            "results[0].us is [1, 2], expected a list of up to 1 values",
        ),
    ],
)
def test_badly_packed_results_are_refused(
    file: Path, columns: Any, rows: Any, message: str
) -> None:
    write(file, of() | {"columns": columns, "results": rows})
    with pytest.raises(ValueError, match=re.escape(message)):
        results.load([file])


def test_what_all_entries_say_is_said_once(file: Path) -> None:
    made = packed(file, of({"dtype": "x", "mode": "", "N": 1}, {"dtype": "x", "mode": "y", "N": 1}))
    assert (made["same"], made["columns"]) == ({"dtype": "x"}, ["mode", "N"])
    write(file, made | {"same": {"dtype": 3}})
    with pytest.raises(ValueError, match=r"same is \{'dtype': 3\}, expected text"):
        results.parsed(file)


def test_the_command_packs_a_row_a_line(file: Path) -> None:
    write(file, said := of(entry("portable", 0.8), entry("cublas", 1.0)))
    invoke("pack", file, code=0)
    assert [line[:1] for line in file.read_text().splitlines()].count("[") == 2
    assert results.parsed(file) == said
    file.write_text("[]")
    invoke("pack", file, code=2)


@pytest.mark.parametrize("name", ["a.b.c", "v="])
def test_names_that_packing_uses_are_refused(file: Path, name: str) -> None:
    write(file, of({name: 1}))
    with pytest.raises(ValueError, match="a field is named"):
        results.packed(file)


@pytest.mark.parametrize("value", [{"environment": {}}, of(1), []])
def test_what_holds_no_entries_is_not_packed(file: Path, value: Any) -> None:
    write(file, value)
    with pytest.raises(ValueError, match="expected an object with environment and results"):
        results.packed(file)

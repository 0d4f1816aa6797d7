"""Result files in the packed form of earlier versions stay readable."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.paths import DATA
from support.reports import Entry

from outblas.report import legacy, phases, profiles, results

SAMPLES = DATA / "packed_results"
LOADERS: dict[str, Callable[[list[Path]], object]] = {
    "bench": results.load,
    "profile": profiles.load,
    "phases": phases.load,
}


def plain(kind: str) -> Path:
    return SAMPLES / f"{kind}.plain.json"


def packed(kind: str) -> Path:
    return SAMPLES / f"{kind}.packed.json"


@pytest.mark.parametrize("kind", LOADERS)
def test_a_packed_file_is_known_as_one(kind: str) -> None:
    assert legacy.is_packed(json.loads(packed(kind).read_text()))


@pytest.mark.parametrize("kind", LOADERS)
def test_a_packed_file_says_what_it_said_before_it_was_packed(kind: str) -> None:
    assert results.parsed(packed(kind)) == json.loads(plain(kind).read_text())


@pytest.mark.parametrize("kind", LOADERS)
def test_every_report_reads_a_packed_file(kind: str) -> None:
    load = LOADERS[kind]

    found = load([packed(kind)])

    assert found
    assert found == load([plain(kind)])


def test_a_packed_file_is_sorted_by_the_command_that_wrote_it() -> None:
    files = results.by_kind(map(packed, LOADERS))

    assert files.bench == [packed("bench")]
    assert files.profiles == [packed("profile")]
    assert files.phases == [packed("phases")]


@pytest.mark.parametrize(
    ("columns", "row", "entry"),
    [
        pytest.param(["us", "host_us"], [1.5], {"us": 1.5}, id="fewer values than columns"),
        pytest.param(["us", "host_us"], [None, 2.5], {"host_us": 2.5}, id="no value"),
        pytest.param(["shape"], ["4096"], {"shape": [4096, 4096, 4096]}, id="a square shape"),
        pytest.param(["shape"], ["16x4096x512"], {"shape": [16, 4096, 512]}, id="a shape"),
        pytest.param(["shape"], ["16x4096"], {"shape": "16x4096"}, id="what readers refuse"),
        pytest.param(
            [{"config=": ["tile_m", "order"]}],
            [[64]],
            {"config": "tile_m=64"},
            id="a config with fewer values than fields",
        ),
        pytest.param(
            [{"config=": ["tile_m", "pad"]}],
            [[64, False]],
            {"config": "tile_m=64,pad=False"},
            id="a config",
        ),
        pytest.param([{"config=": ["tile_m"]}], [[]], {"config": ""}, id="a kernel's own config"),
        pytest.param(
            [{"phases": ["name", "load"]}],
            [[["A", 3], ["B"]]],
            {"phases": [{"name": "A", "load": 3}, {"name": "B"}]},
            id="a list of objects",
        ),
        pytest.param(
            [{"clock": ["name", "load"]}],
            [["A", 3]],
            {"clock": {"name": "A", "load": 3}},
            id="an object",
        ),
        pytest.param(
            ["shared.load.excess"],
            [0.5],
            {"shared": {"load": {"excess": 0.5}}},
            id="a field of an object's object",
        ),
    ],
)
def test_a_row_becomes_an_entry(columns: list[Any], row: list[Any], entry: Entry) -> None:
    report = {"environment": {}, "columns": columns, "results": [row]}

    assert legacy.unpack(report) == {"environment": {}, "results": [entry]}


def test_what_all_entries_share_is_in_each() -> None:
    report = {"environment": {}, "same": {"dtype": "x"}, "columns": ["N"], "results": [[1], [2]]}

    assert legacy.unpack(report)["results"] == [{"dtype": "x", "N": 1}, {"dtype": "x", "N": 2}]


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
        (["us", "us"], [[1, 2]], "expected fields, or those of an object's objects, each once"),
        (["us.x"], [[1]], "expected fields, or those of an object's objects"),
        ([{"us=": ["x"]}], [[1]], "results[0].us= is 1, expected a list of up to 1 values"),
        (
            [{"us": ["x"]}],
            [[[[1, 2]]]],
            "results[0].us is [1, 2], expected a list of up to 1 values",
        ),
    ],
)
def test_a_badly_packed_file_is_refused(
    tmp_path: Path, columns: Any, rows: Any, message: str
) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"environment": {"gpu": "x"}, "columns": columns, "results": rows}))

    with pytest.raises(ValueError, match=re.escape(message)):
        results.load([file])


def test_shared_text_of_another_type_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    report = {"environment": {}, "same": {"dtype": 3}, "columns": ["N"], "results": [[1]]}
    file.write_text(json.dumps(report))

    with pytest.raises(ValueError, match=r"a\.json: same is \{'dtype': 3\}, expected text"):
        results.parsed(file)

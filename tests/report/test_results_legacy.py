"""Result files in the packed form of earlier versions stay readable."""

import json
import re
from pathlib import Path

import pytest
from support.paths import DATA

from outblas.report import legacy, phases, profiles, results

SAMPLES = DATA / "packed_results"
LOADERS = {"bench": results.load, "profile": profiles.load, "phases": phases.load}


def plain(kind):
    return SAMPLES / f"{kind}.plain.json"


def packed(kind):
    return SAMPLES / f"{kind}.packed.json"


@pytest.mark.parametrize("kind", LOADERS)
def test_a_packed_file_says_what_it_said_before_it_was_packed(kind) -> None:
    assert legacy.is_packed(json.loads(packed(kind).read_text()))
    assert results.parsed(packed(kind)) == json.loads(plain(kind).read_text())


@pytest.mark.parametrize("kind", LOADERS)
def test_every_report_reads_a_packed_file(kind) -> None:
    found = LOADERS[kind]([packed(kind)])
    assert found
    assert found == LOADERS[kind]([plain(kind)])


def test_a_packed_file_is_sorted_by_the_command_that_wrote_it() -> None:
    files = results.by_kind(map(packed, LOADERS))
    assert (files.bench, files.profiles, files.phases) == (
        [packed("bench")],
        [packed("profile")],
        [packed("phases")],
    )


@pytest.mark.parametrize(
    ("columns", "row", "entry"),
    [
        (["us", "host_us"], [1.5], {"us": 1.5}),
        (["us", "host_us"], [None, 2.5], {"host_us": 2.5}),
        (["shape"], ["4096"], {"shape": [4096, 4096, 4096]}),
        (["shape"], ["16x4096x512"], {"shape": [16, 4096, 512]}),
        (["shape"], ["16x4096"], {"shape": "16x4096"}),  # for the readers to refuse
        ([{"config=": ["tile_m", "order"]}], [[64]], {"config": "tile_m=64"}),
        ([{"config=": ["tile_m", "pad"]}], [[64, False]], {"config": "tile_m=64,pad=False"}),
        ([{"config=": ["tile_m"]}], [[]], {"config": ""}),
        ([{"phases": ["name", "load"]}], [[["A", 3], ["B"]]], None),
        ([{"clock": ["name", "load"]}], [["A", 3]], {"clock": {"name": "A", "load": 3}}),
        (["shared.load.excess"], [0.5], {"shared": {"load": {"excess": 0.5}}}),
    ],
)
def test_a_row_becomes_an_entry(columns, row, entry) -> None:
    report = {"environment": {}, "columns": columns, "results": [row]}
    expected = entry or {"phases": [{"name": "A", "load": 3}, {"name": "B"}]}
    assert legacy.unpack(report) == {"environment": {}, "results": [expected]}


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
def test_a_badly_packed_file_is_refused(tmp_path: Path, columns, rows, message: str) -> None:
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

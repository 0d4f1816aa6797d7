"""What is amiss in a shipped table is refused, by the place where it is."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from support.paths import DATA
from support.tables import inside, put, signed, winner

from outblas.autotune.store import validation
from outblas.autotune.store.tables import read_table, ship

Content = dict[str, Any]
Place = tuple[Any, ...]  # the steps to a value in a table's content
WRONG = [
    pytest.param([], id="a list"),
    pytest.param("x" * 5000, id="a long text"),
    pytest.param(math.nan, id="no number"),
    pytest.param(True, id="a bool"),
]


@pytest.fixture
def table(tmp_path: Path) -> Content:
    """The content of a table of one winner."""
    (path,) = ship([winner()], tmp_path / "tables")
    return json.loads(path.read_text())


@pytest.fixture
def old_table() -> Content:
    """The content of a table of version 2."""
    return json.loads((DATA / "table_version_2.json").read_text())


def assert_refused(table: Content, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_table(signed(table))


# Tables of today.


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("name", validation.TABLE_ENTRY)
def test_a_wrong_value_in_an_entry_is_refused(table: Content, name: str, value: Any) -> None:
    table["entries"][0][name] = value

    assert_refused(table, f"entries[0].{name} is")


@pytest.mark.parametrize("name", validation.TABLE_ENTRY)
def test_an_entry_that_lacks_a_field_is_refused(table: Content, name: str) -> None:
    del table["entries"][0][name]

    assert_refused(table, f"entries[0] has no {name}")


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
def test_a_table_with_a_wrong_value_is_refused(
    table: Content, place: Place, value: Any, message: str
) -> None:
    put(table, place, value)

    assert_refused(table, message)


def test_an_entry_that_is_there_twice_is_refused(table: Content) -> None:
    table["entries"].append(table["entries"][0])

    assert_refused(table, "entries[1] is the second entry of hopper.hilbert at 4096x512x64")


def test_a_table_that_was_changed_is_refused(table: Content) -> None:
    table["entries"][0]["us"] += 1

    with pytest.raises(ValueError, match="the file was changed or is incomplete"):
        read_table(json.dumps(table))


# Tables of version 2, whose entries are rows.

ROW = ("kernels", 0, "entries", 0)
COLUMNS = list(validation.ROW_VERSION_2)


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("name", COLUMNS)
def test_a_wrong_value_in_a_row_of_version_2_is_refused(
    old_table: Content, name: str, value: Any
) -> None:
    inside(old_table, ROW)[COLUMNS.index(name)] = value

    assert_refused(old_table, f"kernels[0].entries[0].{name} is")


@pytest.mark.parametrize("name", COLUMNS)
def test_a_row_of_version_2_that_lacks_a_value_is_refused(old_table: Content, name: str) -> None:
    row = inside(old_table, ROW)
    del row[COLUMNS.index(name)]

    assert_refused(
        old_table,
        f"kernels[0].entries[0] is {validation.shown(row)}, expected a list of workload",
    )


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
def test_a_table_of_version_2_with_a_wrong_value_is_refused(
    old_table: Content, place: Place, value: Any, message: str
) -> None:
    put(old_table, place, value)

    assert_refused(old_table, message)


def test_a_row_that_version_2_has_twice_is_refused(old_table: Content) -> None:
    rows = old_table["kernels"][0]["entries"]
    rows.append(rows[-1])

    assert_refused(old_table, f"kernels[0].entries[{len(rows) - 1}] is the second entry of")

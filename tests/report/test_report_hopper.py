"""The Hopper climb in reports: several sizes, ncu's counters, what the command and the README make
of both.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from support.hopper_reports import CLIMBED, COUNTED, profile
from support.reports import named_cells, rendered, rows_of, shown, write

from outblas.report import ladder, ladder_chart, readme


# ---- rows
@pytest.fixture(scope="module")
def rows() -> dict[str, ladder.Row]:
    """The rows of the ladder: every rung is measured at two sizes, some are profiled."""
    return rows_of("hopper", (4096, 8192), *CLIMBED, *COUNTED)


@pytest.mark.parametrize(
    ("heading", "cell"),
    {
        "rung": "hopper.persistent",
        "seed: TFLOP/s, × its cuBLAS": "660, 0.92\n001 kernel 6",
        "N": "4096\n8192",
        "TFLOP/s": "530\n530",
        "× cuBLAS": "0.680 (0.673–0.687)\n0.680 (0.673–0.687)",
        "× parent": "1.115\n1.115",
        "registers": "168",
        "stages": "3",
        "L2 hits": "84%",
        "check": "exact",
    }.items(),
)
def test_a_cell_of_a_rung_that_was_measured_and_profiled(
    heading: str, cell: str, rows: dict[str, ladder.Row]
) -> None:
    assert named_cells(rows["hopper.persistent"])[heading] == cell


def test_a_gain_is_over_the_parent_at_each_size(rows: dict[str, ladder.Row]) -> None:
    gains = [at.gain for at in rows["hopper.persistent"].at]

    assert gains == [pytest.approx(0.68 / 0.61)] * 2


def test_a_rung_that_was_profiled_at_the_second_size_shows_that_profile(
    rows: dict[str, ladder.Row],
) -> None:
    assert named_cells(rows["hopper.hilbert"])["L2 hits"] == "88%"


@pytest.mark.parametrize("heading", ["registers", "stages", "L2 hits"])
def test_a_rung_without_a_profile_shows_no_counters(
    heading: str, rows: dict[str, ladder.Row]
) -> None:
    assert named_cells(rows["hopper.tma_store"])[heading] == "–"


def test_the_record_of_a_row_has_both_sizes(rows: dict[str, ladder.Row]) -> None:
    record = rows["hopper.persistent"].record()

    assert [at["n"] for at in record["sizes"]] == [4096, 8192]


def test_the_record_of_a_row_has_the_hit_rate_of_its_own_config(
    rows: dict[str, ladder.Row],
) -> None:
    record = rows["hopper.persistent"].record()

    assert record["profile"]["l2_hit_rate"] == 0.84


@pytest.mark.parametrize("field", ["slots", "stages"])
def test_stages_are_read_by_both_names_of_their_field(field: str) -> None:
    counted = profile("hopper.persistent", 0.84, resolved=f"tile_m=128,{field}=3")

    row = rows_of("hopper", (4096,), *CLIMBED, counted)["hopper.persistent"]

    assert named_cells(row)["stages"] == "3"
    assert row.record()["profile"]["slots"] == "3"


def test_a_ladder_without_figures_is_not_drawn() -> None:
    empty = ladder.rows((), "portable", (4096,))

    with pytest.raises(ValueError, match="no rung has a figure"):
        ladder_chart.draw(empty, (4096,))


# ---- the command
@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """The options of a report on the Hopper ladder."""
    folder = tmp_path_factory.mktemp("measured")
    bench, ncu = write(folder / "bench.json", *CLIMBED), write(folder / "ncu.json", *COUNTED)
    return "--results", bench, "--profiles", ncu, "--ladder", "hopper"


@pytest.fixture(scope="module")
def printed_and_saved(
    options: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any]]:
    """What one run of `outblas report ladder` prints, and the record that it saves."""
    path = tmp_path_factory.mktemp("report") / "ladder.json"
    printed = shown("ladder", *options, "--save", path)
    return printed, json.loads(path.read_text())


@pytest.fixture(scope="module")
def printed(printed_and_saved: tuple[str, dict[str, Any]]) -> str:
    """What the command prints."""
    return printed_and_saved[0]


@pytest.fixture(scope="module")
def saved(printed_and_saved: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """The record that the command saves."""
    return printed_and_saved[1]


def test_the_printed_ladder_is_no_wider_than_140_columns(printed: str) -> None:
    assert max(map(len, printed.splitlines())) <= 140


def test_the_longest_name_is_on_one_line(printed: str) -> None:
    assert "│ hopper.cluster_multicast │ 734, 1.03      │ 4096 │" in printed


def test_the_command_saves_the_sizes_of_the_ladder(saved: dict[str, Any]) -> None:
    assert saved["sizes"] == [4096, 8192]


def test_the_command_saves_the_last_rung_at_every_size(saved: dict[str, Any]) -> None:
    sweep = saved["sweep"]

    assert sweep["kernel"] == "hopper.hilbert"
    assert [at["n"] for at in sweep["sizes"]] == [512, 1024, 2048, 4096, 8192, 16384]


def test_the_command_draws_each_size_and_the_start_of_the_climb(
    options: tuple[object, ...], tmp_path: Path
) -> None:
    chart = tmp_path / "ladder.svg"

    shown("ladder", *options, "--chart", chart)

    drawn = chart.read_text()
    assert "N = 8192" in drawn
    assert "simt.warptile" in drawn


def test_the_command_writes_a_page_with_the_last_rung_by_size(
    options: tuple[object, ...], tmp_path: Path
) -> None:
    html = tmp_path / "ladder.html"

    shown("ladder", *options, "--html", html)

    assert "hopper.hilbert by size" in html.read_text()


def test_shapes_choose_the_sizes_of_a_ladder(options: tuple[object, ...]) -> None:
    printed = shown("ladder", *options, "--shapes", "8192", "--json")

    first_rung = json.loads(printed)["rungs"][1]
    assert [at["n"] for at in first_rung["sizes"]] == [8192]


# ---- parts of the README
def render(folder: Path, *parts: str) -> tuple[list[str], str]:
    """A README of these parts of the climb's measurements: which files were made, and its text."""
    write(folder / "bench.json", *CLIMBED)
    write(folder / "ncu.json", *COUNTED)
    return rendered(folder, *(f"{part} from bench.json,ncu.json" for part in parts))


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A README with the ladder at both sizes and at one, and its last rung by size."""
    parts = "ladder hopper", "ladder hopper 8192", "sizes hopper.hilbert"
    _, text = render(tmp_path_factory.mktemp("tables"), *parts)
    return text


@pytest.mark.parametrize(
    "row",
    [
        pytest.param("| `hopper.persistent` | 4096 | 530 |", id="a rung at the first size"),
        pytest.param("| `hopper.persistent` | 8192 | 530 |", id="a rung at the second size"),
        pytest.param(
            "| `hopper.persistent` | 001 kernel 6 | H100 | 4096 | 660 | 0.92 |",
            id="a document's figure",
        ),
        pytest.param("| `512` | 3 | 936 |", id="a rung by size"),
    ],
)
def test_the_readme_has_a_row_of(row: str, tables: str) -> None:
    assert row in tables


def test_a_climb_makes_the_readme_and_a_picture_that_names_its_rungs(tmp_path: Path) -> None:
    made, _ = render(tmp_path, "climb hopper results/climb.svg")

    assert made == ["README.md", "results/climb.svg"]
    assert "hopper.hilbert" in (tmp_path / "results" / "climb.svg").read_text()


def test_a_picture_of_a_climb_is_stale_once_it_is_missing(tmp_path: Path) -> None:
    render(tmp_path, "ladder hopper", "climb hopper results/climb.svg")
    assert readme.stale(tmp_path) == []

    (tmp_path / "results" / "climb.svg").unlink()

    assert readme.stale(tmp_path) == ["results/climb.svg"]

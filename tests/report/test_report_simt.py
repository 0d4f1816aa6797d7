"""The CUDA-core climb in reports: two documents at two sizes, mixed operands, layouts, ncu's
counters of the FMA pipe.
"""

from pathlib import Path

import pytest
from support.paths import ROOT
from support.reports import named_cells, rendered, rows_of, shown, write
from support.simt_reports import CLIMBED, COUNTED_REGISTER, MIXED_REGISTER, timed

from outblas.core import machines
from outblas.report import ladder, results, roofline

# Figures in layouts that are not the ladder's: no row shows them.
IN_ANOTHER_LAYOUT = [
    timed("simt.register", 0.9, layout="nt"),
    timed("simt.register", 0.9, dtype="bfloat16", layout="nt"),
]
MEASURED = [*CLIMBED, MIXED_REGISTER, *IN_ANOTHER_LAYOUT]


# ---- rows
@pytest.fixture(scope="module")
def rows() -> dict[str, ladder.Row]:
    """The rows of the ladder: every rung is measured, simt.register with bfloat16 operands too, of
    which there is a profile as well.
    """
    return rows_of("simt", (2048, 4096), *MEASURED, COUNTED_REGISTER)


@pytest.mark.parametrize(
    ("heading", "cell"),
    {
        "rung": "simt.register",
        "seed: TFLOP/s, × its cuBLAS": (
            "25.9, 0.52\n002 2D tile, GH200, at 4096\n2.1–2.7, 0.47–0.61\n003 v04, T4"
        ),
        "N": "2048\n4096\nmixed",
        "TFLOP/s": "25\n25\n20",
        "× cuBLAS": "0.500 (0.495–0.505)\n0.500 (0.495–0.505)\n80% of float32's",
        "× parent": "1.316\n1.316\n–",
        "registers": "165",
        "occupancy": "18%",
        "FMA pipe, IPC": "64%\n2.97",
        "check": "exact",
    }.items(),
)
def test_a_cell_of_a_rung_that_was_measured_and_profiled(
    heading: str, cell: str, rows: dict[str, ladder.Row]
) -> None:
    assert named_cells(rows["simt.register"])[heading] == cell


def test_a_row_shows_the_figures_of_all_three_documents(rows: dict[str, ladder.Row]) -> None:
    seeds = named_cells(rows["simt.warptile"])["seed: TFLOP/s, × its cuBLAS"]

    assert seeds.split("\n") == [
        *("41.5, 0.83", "002 warp tile, GH200, at 4096"),
        *("1.57, 0.35", "003 v06, T4"),
        *("–, 0.94", "004, N unstated"),
    ]


def test_the_record_of_a_row_names_the_gpus_of_its_seeds(rows: dict[str, ladder.Row]) -> None:
    record = rows["simt.register"].record()

    assert [figure["gpu"] for figure in record["seeds"]] == ["GH200", "T4"]


def test_the_record_of_a_row_has_the_share_with_mixed_operands(
    rows: dict[str, ladder.Row],
) -> None:
    """They are measured at 4096 only."""
    record = rows["simt.register"].record()

    assert [at["mixed_share"] for at in record["sizes"]] == [None, pytest.approx(0.8)]


def test_the_record_of_a_row_has_ncus_counters(rows: dict[str, ladder.Row]) -> None:
    profile = rows["simt.register"].record()["profile"]

    assert (profile["ipc"], profile["occupancy"]) == (2.97, 0.18)


@pytest.mark.parametrize("name", ["simt", "turing", "hopper"])
def test_a_ladder_has_as_many_columns_as_all_together(name: str) -> None:
    assert len(ladder.columns(name)) == len(ladder.COLUMNS) == 10


def test_the_hopper_ladder_starts_from_the_measurement_with_mixed_operands() -> None:
    mixed = timed("simt.warptile", 0.05, dtype="bfloat16", tflops=38.0)

    start = rows_of("hopper", (4096,), *MEASURED, mixed, COUNTED_REGISTER)["simt.warptile"]

    cells = named_cells(start)
    assert cells["seed: TFLOP/s, × its cuBLAS"] == "32, 0.04\n001 kernel 1"
    assert (cells["N"], cells["TFLOP/s"]) == ("4096", "38")
    assert cells["× cuBLAS"] == "0.050 (0.050–0.051)"


# ---- parts of the README
def render(folder: Path, *parts: str) -> tuple[list[str], str]:
    """A README of these parts of the climb's measurements: which files were made, and its text."""
    write(folder / "bench.json", *MEASURED)
    write(folder / "ncu.json", COUNTED_REGISTER)
    return rendered(folder, *(f"{part} from bench.json,ncu.json" for part in parts))


@pytest.fixture(scope="module")
def ladder_table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A README with the table of the climb."""
    _, text = render(tmp_path_factory.mktemp("table"), "ladder simt")
    return text


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("| rung | N | TFLOP/s | × cuBLAS | spread | × parent |", id="the speeds"),
        pytest.param(
            "Counted by ncu:\n\n| rung | N | registers | occupancy | FMA pipe | IPC |",
            id="what ncu counted",
        ),
        pytest.param(
            "with bfloat16 operands and float32 sums:\n\n"
            "| rung | N | TFLOP/s | × its own float32 |",
            id="mixed operands",
        ),
        pytest.param("every product was checked: exact", id="the check"),
        pytest.param("float32 and bfloat16, nn, burst", id="the conditions of the figures"),
    ],
)
def test_the_readme_says(words: str, ladder_table: str) -> None:
    assert words in ladder_table


def test_the_climb_makes_the_readme_and_a_picture_of_each_size_and_gpu(tmp_path: Path) -> None:
    made, _ = render(tmp_path, "climb simt results/climb.svg")

    assert made == ["README.md", "results/climb.svg"]
    drawn = (tmp_path / "results" / "climb.svg").read_text()
    labels = "N = 2048", "N = 4096", "seed document (T4)", "seed document (GH200)"
    assert [label for label in labels if label not in drawn] == []


@pytest.fixture(scope="module")
def layouts_table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A README with the layouts of one kernel, of which one is timed in another config too."""
    folder = tmp_path_factory.mktemp("layouts")
    ratios = {"nt": 1.01, "tn": 0.99, "tt": 1.04}
    own = [timed("simt.pipelined", ratio, layout=layout) for layout, ratio in ratios.items()]
    other_config = timed("simt.pipelined", 0.5, layout="nt", config="group_m=4")
    write(folder / "bench.json", *own, other_config)
    _, readme = rendered(folder, "layouts simt.pipelined from bench.json")
    return readme


def test_the_table_of_layouts_has_a_row_for_each(layouts_table: str) -> None:
    assert "| `tn` | 2727 | 49.5 | 0.990 (0.980–1.000) | exact |" in layouts_table


def test_the_table_of_layouts_leaves_other_configs_out(layouts_table: str) -> None:
    assert "0.500" not in layouts_table


def test_the_table_of_layouts_names_what_was_measured(layouts_table: str) -> None:
    assert "float32, nt, tn and tt, simt.pipelined at 4096, burst" in layouts_table


# ---- the command
@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `outblas report ladder` prints."""
    folder = tmp_path_factory.mktemp("ladder")
    measured = write(folder / "bench.json", *MEASURED)
    profiled = write(folder / "ncu.json", COUNTED_REGISTER)
    return shown("ladder", "--results", measured, "--profiles", profiled, "--ladder", "simt")


def test_the_printed_ladder_is_no_wider_than_140_columns(printed: str) -> None:
    assert max(map(len, printed.splitlines())) <= 140


def test_the_printed_ladder_has_the_share_with_mixed_operands(printed: str) -> None:
    assert "80% of float32's" in printed


# ---- the roofline
# Its fixture compiles every rung: one process does so for all of these tests.
with_rooflines = pytest.mark.xdist_group("roofline_of_simt")


@pytest.fixture(scope="module")
def points() -> list[roofline.Point]:
    """The measurements of every rung in results/, with the bound at the clock of each."""
    measured = results.load([ROOT / "results" / "h100_simt.json"])
    h100 = machines.find("H100")
    return roofline.points("simt", h100, "float32", (4096, 4096, 4096), measured)


@with_rooflines
@pytest.mark.compile
def test_no_rung_is_faster_than_its_roofline(points: list[roofline.Point]) -> None:
    for point in points:
        assert point.ours.tflops < point.bound.tflops, point.cells()


@with_rooflines
@pytest.mark.compile
def test_every_rung_reaches_two_fifths_of_its_roofline(points: list[roofline.Point]) -> None:
    for point in points:
        assert point.ours.tflops > 0.4 * point.bound.tflops, point.cells()


@with_rooflines
@pytest.mark.compile
def test_the_climb_goes_from_l1_to_shared_memory_to_arithmetic(
    points: list[roofline.Point],
) -> None:
    bounds = [point.bound.by for point in points]

    assert bounds == [*["l1"] * 2, *["shared"] * 3, *["compute"] * 3]

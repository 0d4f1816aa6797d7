"""Rooflines: the points of kernels under the ceilings of a GPU, with what was measured and what the
seeds said.
"""

import json
from dataclasses import dataclass

import pytest
from support.reports import MEASURED, Entry, Page, shown, write

from outblas.core import machines, registry

KERNELS = "portable", "simt.pipelined", "turing.cp_async", "hopper.tma_wgmma"


def roofline_points(*arguments: object) -> dict[str, Entry]:
    """What the command prints, by kernel."""
    points = json.loads(shown("roofline", "--json", *arguments))
    return {point["kernel"]: point for point in points}


@dataclass(frozen=True)
class Roofline:
    """What the command prints, by kernel, and what it writes."""

    points: dict[str, Entry]
    page: Page
    chart: str


@pytest.fixture(scope="module")
def of_four_kernels(tmp_path_factory: pytest.TempPathFactory) -> Roofline:
    """A roofline of four kernels, one of each ladder, with measurements."""
    folder = tmp_path_factory.mktemp("roofline")
    html, chart = folder / "roofline.html", folder / "roofline.svg"
    measured = write(folder / "bench.json", *MEASURED)
    kernels = [registry.find(name) for name in KERNELS]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(registry, "ladder", lambda name=None: kernels)
        points = roofline_points("--results", measured, "--html", html, "--chart", chart)
    return Roofline(points, Page(html.read_text()), chart.read_text())


@pytest.mark.compile
def test_a_roofline_has_every_kernel_of_a_ladder(of_four_kernels: Roofline) -> None:
    assert tuple(of_four_kernels.points) == KERNELS


@pytest.mark.compile
def test_a_point_has_what_was_measured_and_what_bounds_it(of_four_kernels: Roofline) -> None:
    point = of_four_kernels.points["hopper.tma_wgmma"]

    assert point["measured_tflops"] == pytest.approx(0.41 * 780)
    assert point["intensity"]["l2"] == 32
    flops_a_byte = 4096 / 3
    dram_tflops = flops_a_byte * machines.find("H100").dram_gbs / 1e3
    assert point["bound"]["ceilings"]["dram"] == pytest.approx(dram_tflops)


@pytest.mark.compile
def test_a_roofline_is_drawn_and_written_as_a_page(of_four_kernels: Roofline) -> None:
    assert "svg" in of_four_kernels.page.seen
    assert (
        "hopper.tma_wgmma: bound 989 by compute at 1830 MHz, measured 320" in of_four_kernels.chart
    )


# ---- a T4, of which document 003 has figures
@pytest.fixture(scope="module")
def t4(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Entry], str]:
    """The points of every kernel that a T4 runs, and the text of their chart."""
    chart = tmp_path_factory.mktemp("t4") / "t4.svg"
    points = roofline_points("--gpu", "t4", "--chart", chart)
    return points, chart.read_text()


def test_a_t4_runs_every_kernel_of_its_architecture(t4: tuple[dict[str, Entry], str]) -> None:
    points, _ = t4

    assert set(points) == {kernel.name for kernel in registry.ladder() if kernel.min_arch == 75}
    assert {point["machine"] for point in points.values()} == {"T4"}
    assert {point["measured_tflops"] for point in points.values()} == {None}


def test_ladders_have_dtypes_of_their_own_on_a_t4(t4: tuple[dict[str, Entry], str]) -> None:
    points, _ = t4

    assert points["simt.naive"]["dtype"] == "float32"
    assert points["turing.wmma"]["dtype"] == "float16"


def test_registers_limit_the_ctas_of_document_003s_v11(t4: tuple[dict[str, Entry], str]) -> None:
    """Two CTAs an SM, which are half of its warps."""
    ldmatrix = t4[0]["turing.ldmatrix"]

    assert ldmatrix["ctas_per_sm"] == 2
    assert ldmatrix["warps_per_sm"] == 16
    assert ldmatrix["limiter"] == "registers"


def test_a_t4s_roofline_has_its_documents_figures(t4: tuple[dict[str, Entry], str]) -> None:
    points, drawn = t4

    seeds = [(seed["n"], seed["tflops"]) for seed in points["turing.vectorized"]["seeds"]]

    assert seeds == [(2048, [2.984, 2.984]), (4096, [12.38, 12.38])]
    assert "seed document 17.1 at 4096" in drawn


def test_l1_bounds_fragments_straight_from_global_memory(
    t4: tuple[dict[str, Entry], str],
) -> None:
    """Eight lines of L1 a load."""
    assert t4[0]["turing.wmma"]["bound"]["by"] == "l1"


def test_no_figure_of_a_seed_is_above_its_bound(t4: tuple[dict[str, Entry], str]) -> None:
    turing = {name: point for name, point in t4[0].items() if name.startswith("turing.")}

    for name, point in turing.items():
        for seed in point["seeds"]:
            assert seed["tflops"][1] < point["bound"]["tflops"], name

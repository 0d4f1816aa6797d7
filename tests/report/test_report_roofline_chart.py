"""The chart of a roofline: a row for each kernel, its bound and its speed in the same digits as the
table's, and the clock of each.
"""

from typing import Any

import pytest
from support import charts
from support.inspections import imagined
from support.reports import entry, loaded

from outblas.bench import plotting
from outblas.core import machines
from outblas.report import roofline_chart
from outblas.report.lookup import find
from outblas.report.roofline import Point
from outblas.report.seed_figures import of_rung

SHAPE = (4096, 4096, 4096)
H100 = machines.find("H100")
SLOW = entry(
    "simt.naive", 0.01, dtype="float32", layout="nn", tflops=0.49884713, clock_mhz=1979.9998
)
FAST = entry("hopper.hilbert", 1.0, tflops=793.6, clock_mhz=1663.4)


def point(kernel: str, *entries: dict[str, Any], **changes: Any) -> Point:
    inspection = imagined(kernel, **changes)
    measurements = loaded(*entries).measurements if entries else ()
    ours = find(measurements, kernel, SHAPE, inspection.dtype, "H100")
    seeds = tuple(f for f in of_rung(kernel) if f.gpu == "H100" and f.n and f.tflops)
    return Point(inspection, H100, ours, seeds)


NAIVE = point(
    "simt.naive",
    SLOW,
    dtype="float32",
    unit="float32",
    intensity={"dram": 683.0, "l2": 8.0, "l1": 0.0156, "shared": None},
)
HILBERT = point("hopper.hilbert", FAST)
UNTIMED = point("hopper.gemm")


def words(figure: Any) -> set[str]:
    return {each.text for each in charts.drawn_texts(figure)}


def test_a_small_speed_has_its_digits() -> None:
    figure = roofline_chart.draw([NAIVE, HILBERT], SHAPE)

    assert {"0.499", "794"} <= words(figure)
    assert "measured 0.499" in plotting.description(figure)
    assert not {"0", "0.0", "0.00"} & {w.strip() for w in words(figure)}


def test_the_chart_says_which_clock_each_roof_and_each_bound_has() -> None:
    figure = roofline_chart.draw([NAIVE, HILBERT, UNTIMED], SHAPE)

    assert "Roofs at 1830 MHz, the data sheet's clock" in words(figure)
    assert {"1980", "1663", "1830"} <= words(figure)
    note = " ".join(figure.get_supxlabel().split())
    assert "each bound at the clock of its kernel's timing, in the column MHz" in note
    assert "1830 MHz where nothing was timed" in note


def test_a_bound_is_at_the_clock_of_the_timing() -> None:
    figure = roofline_chart.draw([HILBERT], SHAPE)

    assert f"bound {HILBERT.bound.tflops:.0f} by compute at 1663 MHz" in plotting.description(
        figure
    )
    assert HILBERT.bound.tflops < H100.peak_tflops("bfloat16")


def test_kernels_are_series_by_ladder_and_rows_by_name() -> None:
    many = [point(f"hopper.kernel{i}", FAST) for i in range(20)]

    figure = roofline_chart.draw([NAIVE, *many, point("portable")], SHAPE)

    roofs, rows = charts.axes_of(figure)
    assert [tick.get_text() for tick in rows.get_yticklabels()] == [
        "simt.naive",
        *(f"hopper.kernel{i}" for i in range(20)),
        "portable",
    ]
    labels = [text.get_text() for text in roofs.get_legend().get_texts()]
    assert labels == [
        "simt (1 kernel)",
        "hopper (20 kernels, not timed: bound)",
        "portable (1 kernel, not timed: bound)",
    ]
    assert all(
        len(charts.colours_of_data(panel)) <= plotting.MOST_SERIES for panel in (roofs, rows)
    )


def test_a_seed_documents_figures_stand_in_the_row() -> None:
    figure = roofline_chart.draw([HILBERT], SHAPE)

    assert "764" in words(figure)
    assert "seed document 838 at 1024" in plotting.description(figure)


@pytest.mark.parametrize(
    "found",
    [[NAIVE, HILBERT, UNTIMED], [HILBERT], [UNTIMED]],
    ids=["both units", "one that was timed", "one that was not"],
)
def test_the_chart_can_be_read(found: list[Point]) -> None:
    figure = roofline_chart.draw(found, SHAPE)

    assert charts.collisions(figure) == []
    assert charts.clipped(figure) == []
    for panel in charts.axes_of(figure):
        assert panel.get_title(loc="left")
        assert panel.get_xlabel()
        assert panel.get_ylabel()

"""The page and the chart of a report on a sweep."""

import re

import pytest
from support.reports import Page
from support.tuning_reports import FIRST, SWEPT, build, config_text, predicting, timed, winner

from outblas.autotune.store.records import Trial
from outblas.bench import plotting
from outblas.report import chart
from outblas.report.page import html

SWEEPS = {
    "tiles, stages, failures and predictions": SWEPT,
    "a single trial": [timed(FIRST, 1.0, 170.0)],
    "one tile": [timed(config_text(128, 256, n), 0.9, 170.0 + n) for n in (2, 3, 4)],
    "ties": [
        timed(config_text(128, tile_n, stages), 0.9, 170.0)
        for tile_n in (128, 192, 256)
        for stages in (2, 3)
    ],
    "no stages": [
        timed(f"block_m={m},block_n={n},threads=256", 0.01 * m + n / 999)
        for m in (32, 64)
        for n in (8, 16)
    ],
    "predictions only": [timed(f"vector={n}", 0.5 + n / 10, 10 - n) for n in (1, 2)],
    "no predictions": predicting(None),
}
XML_NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


@pytest.mark.parametrize("trials", SWEEPS.values(), ids=SWEEPS)
def test_a_page_has_a_chart_and_tables_and_loads_nothing_from_elsewhere(
    trials: list[Trial],
) -> None:
    text = html(build(trials))

    page = Page(text)  # checks that its tags balance
    assert {"svg", "table"} <= set(page.seen)
    assert "hopper.hilbert, 4096 bfloat16 nt" in page.text
    assert set(re.findall(r'https?://[^\s>"]+', text)) <= XML_NAMESPACES


def test_where_nothing_is_right_the_page_has_no_chart() -> None:
    report = build([trial for trial in SWEPT if not trial.ok])

    page = Page(html(report))

    assert "svg" not in page.seen
    assert "4 configs were tried: 0 right, 4 failed." in page.text


def test_where_nothing_is_right_there_is_nothing_to_draw() -> None:
    report = build([trial for trial in SWEPT if not trial.ok])

    with pytest.raises(ValueError, match="there is nothing to draw of hopper"):
        chart.draw(report)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The chart of the imagined sweep, as SVG."""
    path = tmp_path_factory.mktemp("chart") / "chart.svg"
    plotting.save(chart.draw(build(SWEPT, winner())), path)
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("hopper.hilbert at 4096 bfloat16 nt: 1.047 × cuBLAS", id="the title"),
        pytest.param("1.050", id="the best ratio of a tile"),
        pytest.param("failed", id="a tile that failed"),
        pytest.param("0 of 3", id="how many configs of a tile were right"),
        pytest.param("ρ 0.9", id="the model's correlation"),
        pytest.param("predicted µs", id="the axis of predictions"),
        pytest.param("measured µs, screening", id="the axis of measurements"),
    ],
)
def test_the_chart_says_what_it_shows(drawn: str, text: str) -> None:
    assert text in drawn


def test_predictions_over_a_wide_range_are_drawn_on_logarithmic_axes() -> None:
    trials = [timed(config_text(128, 256, n), 1 / n, 100.0 * n) for n in (1, 2, 10)]

    *_, panel = chart.draw(build(trials)).axes

    assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")

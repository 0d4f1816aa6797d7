"""The page and the chart of a report on a sweep."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.reports import Page
from support.stored import INTERPRETED
from support.tuning_reports import FIRST, SWEPT, build, config_text, predicting, timed, winner

from outblas.autotune.store.records import Trial
from outblas.bench import plotting
from outblas.report.tuning import chart
from outblas.report.tuning.page import html

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
    "stages only": [timed(f"num_stages={n}", 0.5 + n / 10) for n in (1, 2, 3)],
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


@pytest.mark.parametrize("trials", SWEEPS.values(), ids=SWEEPS)
def test_the_record_of_a_page_can_be_written_as_json(trials: list[Trial]) -> None:
    record = json.loads(json.dumps(build(trials).record()))

    assert record["counts"]["tried"] == len(trials)


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
        pytest.param("128×256", id="the tile of a line over stages"),
        pytest.param("ρ 0.9", id="the model's correlation"),
        pytest.param("predicted µs", id="the axis of predictions"),
        pytest.param("measured µs, screening", id="the axis of measurements"),
    ],
)
def test_the_chart_says_what_it_shows(drawn: str, text: str) -> None:
    assert text in drawn


def test_the_chart_of_a_page_has_words_for_those_who_do_not_see_it() -> None:
    text = html(build(SWEPT, winner()))

    (words,) = re.findall(r"<desc [^>]+>([^<]+)<", text)
    assert "the best of 5 is 128×256 with 1.050 × cuBLAS, the slowest 64×64 with 0.750" in words
    assert "3 for 128×256" in words
    assert "1st of 16 in the predicted order" in words


def test_predictions_over_a_wide_range_are_drawn_on_logarithmic_axes() -> None:
    trials = [timed(config_text(128, 256, n), 1 / n, 100.0 * n) for n in (1, 2, 10)]

    *_, panel = chart.draw(build(trials)).axes

    assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")


def test_a_chart_of_a_cpu_does_not_speak_of_cublas(tmp_path: Path) -> None:
    trials = [replace(trial, gpu=INTERPRETED, predicted_us=None) for trial in SWEPT]

    plotting.save(chart.draw(build(trials)), tmp_path / "chart.svg")

    drawn = (tmp_path / "chart.svg").read_text(encoding="utf-8")
    assert "× fastest" in drawn
    assert "cuBLAS" not in drawn


def test_text_on_the_cells_of_tiles_keeps_its_colour_in_the_dark() -> None:
    """A cell has the same shade in the dark: what is written on it must not be repainted."""
    figure = chart.draw(build(SWEPT))

    written = {text.get_color() for text in figure.axes[0].texts}

    assert not written & plotting.DARK.keys()

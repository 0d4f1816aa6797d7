"""The page and the chart of a report on a sweep; those of docs/tuning are what its sweep makes."""

import re
from pathlib import Path

import pytest
from support.paths import ROOT
from support.reports import Page
from support.tuning_reports import SWEPT, build, config_text, predicting, timed, winner

from outblas.autotune.store import transfer
from outblas.autotune.store.records import Trial
from outblas.bench import plotting
from outblas.report import chart, model, tables
from outblas.report.page import html

NARROW = [timed(config_text(128, 256, n), 0.9, 170.0 + n) for n in (2, 3, 4)]
WIDE = [timed(f"vector={n}", 1 / n, 100.0 * n) for n in (1, 2, 10)]
SWEEPS = {"all tables": (SWEPT, True), "one tile": (NARROW, True), "no tile": (WIDE, True)}
SWEEPS |= {"one trial": (SWEPT[:1], False), "no predictions": (predicting(None), False)}
XML_NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


@pytest.mark.parametrize(("trials", "is_drawn"), SWEEPS.values(), ids=SWEEPS)
def test_a_page_has_tables_and_a_chart_and_loads_nothing_from_elsewhere(
    trials: list[Trial], is_drawn: bool
) -> None:
    text = html(build(trials))

    page = Page(text)  # checks that its tags balance
    assert "table" in page.seen
    assert ("svg" in page.seen) == is_drawn
    assert "hopper.hilbert, 4096 bfloat16 nt" in page.text
    assert set(re.findall(r'https?://[^\s>"]+', text)) <= XML_NAMESPACES


def test_where_nothing_is_right_there_is_no_chart() -> None:
    report = build([trial for trial in SWEPT if not trial.ok])
    page = Page(html(report))

    assert [table.heading for table in tables.tables(report)] == ["Failures"]
    assert "svg" not in page.seen
    assert "4 configs were tried: 0 right, 4 failed." in page.text
    with pytest.raises(ValueError, match="there is nothing to draw of hopper"):
        chart.draw(report)


def test_the_chart_says_what_it_shows(tmp_path: Path) -> None:
    plotting.save(chart.draw(build(SWEPT, winner())), tmp_path / "chart.svg")

    drawn = (tmp_path / "chart.svg").read_text(encoding="utf-8")

    title = "hopper.hilbert at 4096 bfloat16 nt: 1.047 × cuBLAS"
    for text in (title, "the first of 16", "ρ 0.9", "predicted µs", "measured µs"):
        assert text in drawn, text


@pytest.mark.parametrize(("trials", "scale"), [(WIDE, "log"), (NARROW, "linear")])
def test_a_wide_range_has_logarithmic_axes(trials: list[Trial], scale: str) -> None:
    (panel,) = chart.draw(build(trials)).axes

    assert (panel.get_xscale(), panel.get_yscale()) == (scale, scale)


# The sample of docs/tuning.

FOLDER = ROOT / "docs" / "tuning"
AGAIN = "is out of date: docs/tuning/reading-a-report.md has the command that makes it"


def without_drawing(page: str) -> str:
    """A page without the paths of its chart, which differ between versions of matplotlib."""
    return re.sub(r"<svg.*?</svg>", "<svg/>", page, flags=re.DOTALL)


def words(svg: str) -> list[str]:
    """What is written in a chart, its text alternative among it."""
    return [
        text.strip() for text in re.findall(r"<(?:text|desc|title)[^>]*>([^<]*)<", svg, re.DOTALL)
    ]


def test_the_sample_is_what_its_sweep_makes(tmp_path: Path) -> None:
    trials, winners = transfer.read(FOLDER / "sample-sweep.jsonl")
    written = (FOLDER / "sample-report.html").read_text(encoding="utf-8")

    sample = model.build(trials, winners, limits=lambda _: "")
    plotting.save(chart.draw(sample), tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text(encoding="utf-8")

    assert without_drawing(written) == without_drawing(html(sample)), AGAIN
    assert "× cuBLAS" not in Page(written).text, "it is a sweep of a CPU"
    for name in ("sample-chart.svg", "sample-report.html"):
        assert words(drawn) == words(
            "".join(re.findall(r"<svg.*?</svg>", (FOLDER / name).read_text(), re.DOTALL))
        ), f"{name} {AGAIN}"

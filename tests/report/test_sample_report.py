"""The sample report that docs/tuning links to is what its stored sweep makes."""

import re
from pathlib import Path

import pytest
from support.paths import ROOT
from support.reports import Page

from outblas.autotune.store import transfer
from outblas.bench import plotting
from outblas.report import chart, model
from outblas.report.page import html

FOLDER = ROOT / "docs" / "tuning"
AGAIN = "is out of date: docs/tuning/reading-a-report.md has the command that makes it"


@pytest.fixture(scope="module")
def report() -> model.TuneReport:
    trials, winners = transfer.read(FOLDER / "sample-sweep.jsonl")
    return model.build(trials, winners, limits=lambda _: "")


def without_drawing(page: str) -> str:
    """A page without the paths of its chart, which differ between versions of matplotlib."""
    return re.sub(r"<svg.*?</svg>", "<svg/>", page, flags=re.DOTALL)


def words(svg: str) -> list[str]:
    """What is written in a chart, its text alternative among it."""
    return [
        text.strip() for text in re.findall(r"<(?:text|desc|title)[^>]*>([^<]*)<", svg, re.DOTALL)
    ]


def test_the_sample_page_is_what_its_sweep_makes(report: model.TuneReport) -> None:
    written = (FOLDER / "sample-report.html").read_text(encoding="utf-8")

    assert without_drawing(written) == without_drawing(html(report)), AGAIN


def test_the_charts_of_the_sample_say_what_its_sweep_makes(
    report: model.TuneReport, tmp_path: Path
) -> None:
    plotting.save(chart.draw(report), tmp_path / "made.svg")
    made = (tmp_path / "made.svg").read_text(encoding="utf-8")

    for name in ("sample-chart.svg", "sample-report.html"):
        assert words(made) == words(
            "".join(re.findall(r"<svg.*?</svg>", (FOLDER / name).read_text(), re.DOTALL))
        ), f"{name} {AGAIN}"


def test_the_sample_page_loads_nothing_and_does_not_speak_of_cublas_ratios() -> None:
    page = Page((FOLDER / "sample-report.html").read_text(encoding="utf-8"))  # checks its tags

    assert "svg" in page.seen
    assert "× cuBLAS" not in page.text

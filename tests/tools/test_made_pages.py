"""The tables and charts that pages show are those that results/ makes."""

import re
import shutil
from pathlib import Path

import pytest
from support.paths import ROOT

from tools.pages import accesses, results
from tools.pages.__main__ import render

PLAIN = "<!-- generated: timings simt.pipelined from results/h100_simt_layouts.json -->\n"
CHART = "<!-- generated: chart results/a.svg from results/h100_suite.json -->\n"


def checkout(folder: Path, text: str) -> Path:
    """A checkout whose README has one text."""
    (folder / "docs").mkdir()
    (folder / "results").symlink_to(ROOT / "results")
    (folder / "README.md").write_text(text)
    return folder


@pytest.mark.long
def test_pages_show_what_results_make() -> None:
    assert render(check=True) == [], "out of date: run make pages"


def test_a_part_is_made_anew_and_then_it_is_current(tmp_path: Path) -> None:
    root = checkout(tmp_path, f"Before\n{PLAIN}stale\n<!-- end -->\nafter")

    assert render(root, check=True) == ["README.md"]
    assert "stale" in (root / "README.md").read_text()
    assert render(root) == ["README.md"]
    text = (root / "README.md").read_text()

    assert re.match(r"Before\n<!--.*-->\n\| shape \|", text)
    assert text.endswith("<!-- end -->\nafter")
    assert render(root, check=True) == []


def test_a_picture_is_drawn_where_its_data_changed(tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    folder.mkdir()
    root = checkout(folder, f"{CHART}<!-- end -->")
    (root / "results").unlink()
    (root / "results").mkdir()
    data = root / "results" / "h100_suite.json"
    shutil.copy(ROOT / "results" / data.name, data)

    assert render(root) == ["README.md", "results/a.svg"]
    first = (root / "results" / "a.svg").read_text()
    assert render(root) == []
    assert (root / "results" / "a.svg").read_text() == first
    data.write_text(data.read_text() + "\n")
    assert render(root, check=True) == ["results/a.svg"]


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("<!-- generated: nothing from results/h100_suite.json -->\n", "a part is a 'nothing'"),
        ("<!-- generated: suite outblas -->\n", "is not of the form"),
        (PLAIN.replace("h100_simt_layouts", "missing"), "missing.json"),
        (PLAIN.replace("timings simt.pipelined", "suite portable"), "kinds of GPU, dtype, layout"),
    ],
)
def test_a_part_that_cannot_be_made_is_named_and_nothing_is_written(
    tmp_path: Path, marker: str, message: str
) -> None:
    text = f"{PLAIN}<!-- end -->\n{marker}<!-- end -->"
    root = checkout(tmp_path, text)

    with pytest.raises(ValueError, match=re.escape("README.md")) as raised:
        render(root)

    assert message in str(raised.value)
    assert (root / "README.md").read_text() == text


def test_ncu_counts_the_conflicts_that_layouts_predict() -> None:
    counters = results.load([ROOT / "results" / "h100_simt_counters.json"])

    rows = [row for row in accesses.conflicts(counters.profiles) if row.measured is not None]

    assert len(rows) >= 14
    assert {row.within for row in rows} == {"yes"}

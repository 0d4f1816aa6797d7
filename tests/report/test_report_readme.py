"""The README's generated parts and pictures: made from results, stale when these change, and the
same file whenever they are drawn.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.paths import ROOT
from support.reports import rendered, shown

from outblas.bench import plotting
from outblas.report import readme, results


def test_the_readme_shows_the_newest_results() -> None:
    assert readme.stale() == []


def test_the_command_finds_the_readme_fresh() -> None:
    shown("readme", "--check")


# ---- a checkout
CHART = "chart results/h100_suite.svg from results/h100_suite.json"
README = (CHART, "suite from results/h100_suite.json")
PAGE = (
    CHART,
    "suite from results/h200_suite.json",
    "tuned from autotune/tables/NVIDIA_H100_80GB_HBM3.json",
)


def write_page(path: Path, *parts: str) -> Path:
    """A page of these parts, each of them empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(f"<!-- generated: {part} -->\n<!-- end -->" for part in parts))
    return path


@pytest.fixture(scope="module")
def rendered_checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with our results, a README of two parts and a page of three, made."""
    root = tmp_path_factory.mktemp("checkout")
    (root / "src" / "outblas").mkdir(parents=True)
    (root / "autotune").mkdir()
    shutil.copytree(ROOT / "results", root / "results")
    shutil.copytree(ROOT / "autotune" / "tables", root / "autotune" / "tables")
    write_page(root / "README.md", *README)
    write_page(root / "docs" / "results" / "suite.md", *PAGE)
    readme.render(root)
    return root


@pytest.fixture
def checkout(rendered_checkout: Path, tmp_path: Path) -> Path:
    """A copy of that checkout for one test."""
    return Path(shutil.copytree(rendered_checkout, tmp_path / "checkout"))


@pytest.fixture
def changed_ratio(checkout: Path) -> float:
    """A figure of the suite that was changed after the README was made."""
    path = checkout / "results" / "h100_suite.json"
    suite = results.parsed(path)
    suite["results"][1]["ratio_high"] += 0.1
    path.write_text(json.dumps(suite))
    return suite["results"][1]["ratio_high"]


def test_what_was_made_is_not_stale(checkout: Path) -> None:
    assert readme.stale(checkout) == []


@pytest.mark.usefixtures("changed_ratio")
def test_a_changed_figure_makes_readme_and_picture_stale(checkout: Path) -> None:
    assert readme.stale(checkout) == ["README.md", "results/h100_suite.svg"]


def test_a_page_below_docs_is_stale_where_a_part_was_touched(checkout: Path) -> None:
    page = checkout / "docs" / "results" / "suite.md"

    page.write_text(page.read_text().replace("| 512 |", "| 513 |", 1))

    assert readme.stale(checkout) == ["docs/results/suite.md"]


def test_rendering_makes_a_page_below_docs(checkout: Path) -> None:
    page = write_page(checkout / "docs" / "a" / "b" / "c.md", "suite from results/h100_suite.json")

    assert readme.render(checkout) == ["docs/a/b/c.md"]
    assert "| 4096 |" in page.read_text()


@pytest.mark.parametrize(
    ("page", "link"),
    [
        ("README.md", "results/h100_suite.svg"),
        ("docs/results/suite.md", "../../results/h100_suite.svg"),
    ],
)
def test_the_link_to_a_picture_is_relative_to_the_page(
    page: str, link: str, checkout: Path
) -> None:
    assert f"]({link})" in (checkout / page).read_text()


def test_one_picture_is_made_from_one_set_of_files(checkout: Path) -> None:
    other = "chart results/h100_suite.svg from results/h200_suite.json"
    write_page(checkout / "docs" / "other.md", other)

    with pytest.raises(ValueError, match=r"docs/other.md: .*h100_suite.svg is drawn from"):
        readme.stale(checkout)


@pytest.mark.usefixtures("changed_ratio")
def test_a_part_that_cannot_be_made_leaves_other_pages_as_they_were(checkout: Path) -> None:
    before = (checkout / "README.md").read_text()
    write_page(checkout / "docs" / "wrong.md", "suite from results/none.json")

    with pytest.raises(ValueError, match=r"docs/wrong.md: suite: .*none.json: cannot be read"):
        readme.render(checkout)

    assert (checkout / "README.md").read_text() == before


@pytest.mark.usefixtures("changed_ratio")
def test_rendering_makes_what_is_stale(checkout: Path) -> None:
    assert readme.render(checkout) == ["README.md", "results/h100_suite.svg"]
    assert readme.stale(checkout) == []


def test_a_changed_figure_changes_its_line_only(checkout: Path, changed_ratio: float) -> None:
    before = (checkout / "README.md").read_text().splitlines()

    readme.render(checkout)

    after = (checkout / "README.md").read_text().splitlines()
    (line,) = [new for new, old in zip(after, before, strict=True) if new != old]
    assert f"{changed_ratio:.3f}" in line


@pytest.mark.parametrize(
    "touched",
    [
        pytest.param(lambda text: text[: len(text) // 2], id="cut"),
        pytest.param(lambda text: text.replace("512", "513", 1), id="another figure"),
        pytest.param(lambda text: "", id="empty"),
    ],
)
def test_a_picture_that_was_touched_is_stale(touched: Callable[[str], str], checkout: Path) -> None:
    path = checkout / "results" / "h100_suite.svg"

    path.write_text(touched(path.read_text()))

    assert readme.stale(checkout) == ["results/h100_suite.svg"]


def test_a_picture_that_is_missing_is_made(checkout: Path) -> None:
    (checkout / "results" / "h100_suite.svg").unlink()

    assert readme.render(checkout) == ["results/h100_suite.svg"]
    assert readme.stale(checkout) == []


@pytest.fixture
def h200_suite(checkout: Path) -> Path:
    """A copy of the suite that says it is of another GPU."""
    suite = results.parsed(checkout / "results" / "h100_suite.json")
    suite["environment"]["gpu"] = "NVIDIA H200"
    path = checkout / "results" / "h200.json"
    path.write_text(json.dumps(suite))
    return path


@pytest.mark.usefixtures("h200_suite")
def test_a_table_holds_one_campaign(checkout: Path) -> None:
    with pytest.raises(ValueError, match="2 kinds of GPU, dtype, layout and operation"):
        rendered(checkout, "suite from results/h100_suite.json,results/h200.json")


def test_a_table_needs_a_base(checkout: Path, h200_suite: Path) -> None:
    suite = results.parsed(h200_suite)
    suite["results"] = [r for r in suite["results"] if r["provider"] != "cublas"]
    h200_suite.write_text(json.dumps(suite))

    with pytest.raises(ValueError, match="512 has no cublas in burst"):
        rendered(checkout, "suite from results/h200.json")


def test_the_readme_is_made_in_a_checkout_only(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("")

    with pytest.raises(ValueError, match="is no checkout of outblas"):
        readme.render(tmp_path)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        pytest.param(
            "nonsense from results/h100_suite.json -->\n<!-- end -->",
            "is a 'nonsense', expected one of",
            id="unknown kind",
        ),
        pytest.param(
            "suite from results/none.json -->\n<!-- end -->",
            "none.json: cannot be read",
            id="missing file",
        ),
        pytest.param("suite -->\n<!-- end -->", "is not of the form", id="no file"),
        pytest.param("suite from results/h100_suite.json -->\n", "is not of the form", id="no end"),
    ],
)
def test_a_part_that_cannot_be_made_is_an_error(part: str, message: str, checkout: Path) -> None:
    text = f"<!-- generated: {part}"
    (checkout / "README.md").write_text(text)

    with pytest.raises(ValueError, match=re.escape(message)):
        readme.render(checkout)

    assert (checkout / "README.md").read_text() == text


# ---- pictures
def drawn(path: Path) -> str:
    """The text of a chart that is drawn to this file."""
    figure, (axis,) = plotting.canvas(1, (3.0, 2.0))
    axis.plot([0, 1 / 3], [0, 1 / 7], marker="o")
    axis.set_title("1.00345 × cuBLAS")
    plotting.save(figure, path, note="0.12345")
    return path.read_text(encoding="utf-8")


def test_saved_charts_keep_their_words(tmp_path: Path) -> None:
    text = drawn(tmp_path / "c.svg")

    assert "1.00345 × cuBLAS" in text
    assert "<dc:description>0.12345</dc:description>" in text


def test_one_figure_is_one_file_whenever_it_is_drawn(tmp_path: Path) -> None:
    first, second = drawn(tmp_path / "a.svg"), drawn(tmp_path / "b.svg")

    assert first == second
    assert "<dc:date>" not in first

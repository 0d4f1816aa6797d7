"""Reports: the seeds' figures, claims, ladders, rooflines, HTML pages, and the README's generated
parts.
"""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import commands
from support.paths import ROOT
from support.reports import (
    MEASURED,
    Entry,
    Page,
    entry,
    invoke,
    loaded,
    rendered,
    report,
    rows_of,
    shown,
    write,
)

from outblas.core import machines, registry
from outblas.report import ladder, lookup, readme, results, rungs, seed_figures

RUNGS = {
    "simt": "naive coalesced shared strip register vectorized warptile pipelined",
    "turing": "wmma shared double_buffer vectorized ldmatrix cp_async",
    "hopper": (
        "tma_wgmma large_tile warp_specialized two_consumers persistent lean_barriers "
        "cluster_multicast store_tuning tma_store hilbert gemm"
    ),
}


def test_every_planned_rung_has_its_place() -> None:
    names = [f"{own}.{rung}" for own, text in RUNGS.items() for rung in text.split()]
    assert set(names) | {"portable"} == set(rungs.names())
    built = [kernel.name for kernel in registry.ladder()]
    assert [rung.name for rung in rungs.climb()] == sorted(built, key=rungs.names().index)
    assert sorted(
        [*{figure.rung for figure in seed_figures.FIGURES}, *seed_figures.WITHOUT_FIGURE]
    ) == sorted(rungs.names())
    with pytest.raises(ValueError, match="--ladder is 'nothing'"):
        rungs.climb("nothing")


def test_the_seeds_figures() -> None:
    first = {figure.rung: figure for figure in reversed(seed_figures.FIGURES)}
    assert first["hopper.tma_wgmma"].tflops == (317.0, 317.0)
    assert first["hopper.hilbert"].ratio == pytest.approx((764 / 716,) * 2)
    assert first["simt.warptile"].ratio == pytest.approx((41.496 / 50.058,) * 2)
    assert all(
        f.tflops is None or 0 < f.tflops[0] <= f.tflops[1] < 1000 for f in seed_figures.FIGURES
    )


def test_ladder() -> None:
    rows = rows_of("hopper", (4096, 8192), *MEASURED)
    assert list(rows) == ["simt.warptile", *rungs.names("hopper")]
    first = rows["hopper.tma_wgmma"]
    assert first.at[0].ours is not None
    assert (first.at[0].ours.ratio, first.at[0].gain, first.at[1].ours) == (0.41, None, None)
    assert first.cells()[:5] == (
        "hopper.tma_wgmma",
        "317, 0.44\n001 kernel 2",
        "4096",
        "320",
        "0.410 (0.406–0.414)",
    )
    assert rows["hopper.gemm"].cells()[1:5] == ("–", "–", "–", "not measured")


def test_gain_over_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, child = (
        rungs.climb("hopper")[0],
        dataclasses.replace(rungs.climb("portable")[0], parent="hopper.tma_wgmma"),
    )
    monkeypatch.setattr(ladder, "climb", lambda name: (parent, child))
    rows = ladder.rows(loaded(*MEASURED).measurements, None, (4096,))
    assert rows[1].at[0].gain == pytest.approx(0.9 / 0.41)
    assert rows[1].record()["sizes"][0]["gain"] == rows[1].at[0].gain


@pytest.mark.parametrize(
    ("name", "sizes", "seed"),
    [
        ("simt", (2048, 4096), "0.502, 0.01\n002 baseline, GH200, at 4096"),
        ("turing", (2048, 4096), "1.87, 0.05\n003 v07, T4"),
        ("portable", (4096, 8192), "–"),
    ],
)
def test_ladders_without_a_measurement_show_the_seeds(
    name: str, sizes: tuple[int, ...], seed: str
) -> None:
    assert ladder.default_sizes(name) == sizes
    rows = rows_of(name, sizes)
    start = ["simt.vectorized"] if name == "turing" else []  # where its climb starts from
    assert list(rows) == start + list(rungs.names(name))
    assert rows[rungs.names(name)[0]].cells()[1] == seed


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "expected an object with environment and results"),
        ({"environment": {}, "results": []}, "environment.gpu is None"),
        (report({}), r"results\[0\].provider is None, expected text"),
        (report(entry("x", 1.0, mode="fast")), r"results\[0\].mode is 'fast'"),
        (report(entry("x", 1.0, shape=[1, 2])), r"results\[0\].shape is \[1, 2\]"),
        (
            report(entry("x", 1.0), entry("x", 1.0, us=-1)),
            r"results\[1\].us is -1, expected a number above 0",
        ),
        (report(entry("x", 1.0, ratio_low=None)), "expected all three or none"),
        (report(entry("x", 1.0, check="wrong: 1")), "has figures although its check is 'wrong: 1'"),
        (report(entry("x", 1.0, tflops=None)), "has a ratio and no us or tflops"),
        (report(entry("x", 1.0, us=10**400)), "expected a number above 0"),
    ],
)
def test_malformed_results_name_file_and_field(value: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(value))
    with pytest.raises(ValueError, match=rf"bad\.json: .*{message}"):
        results.load([path])
    invoke("ladder", "--results", path, code=2)


def test_ladder_command(tmp_path: Path) -> None:
    file = write(tmp_path / "bench.json", *MEASURED)
    html, chart, saved = (tmp_path / name for name in ("l.html", "l.svg", "l.json"))
    files = "--html", html, "--chart", chart, "--save", saved
    text = shown("ladder", "--ladder", "hopper", "--results", file, *files)
    assert "hopper.hilbert" in text
    assert "0.410" in text
    assert "hopper.tma_wgmma" in chart.read_text()
    value = json.loads(saved.read_text())
    assert value["sizes"] == [4096, 8192]
    assert [rung["rung"] for rung in value["rungs"]] == ["simt.warptile", *rungs.names("hopper")]
    at = [rung["sizes"] for rung in value["rungs"]]
    assert at[1][0]["ours"]["ratio"] == 0.41
    assert at[1][1]["ours"] is at[2][0]["ours"] is None
    page = Page(html.read_text())
    assert {"svg", "table"} <= set(page.seen)
    assert "not yet measured" in page.text


def roofline_points(*arguments: object) -> Entry:
    """By kernel."""
    return {point["kernel"]: point for point in json.loads(shown("roofline", "--json", *arguments))}


@pytest.mark.compile
def test_roofline_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "bench.json", *MEASURED)
    kernels = [
        registry.find(name)
        for name in ("portable", "simt.pipelined", "turing.cp_async", "hopper.tma_wgmma")
    ]
    monkeypatch.setattr(registry, "ladder", lambda name=None: kernels)
    html, chart = tmp_path / "r.html", tmp_path / "r.svg"
    points = roofline_points("--results", file, "--html", html, "--chart", chart)
    assert list(points) == [kernel.name for kernel in kernels]
    hopper = points["hopper.tma_wgmma"]
    assert hopper["measured_tflops"] == pytest.approx(0.41 * 780)
    assert hopper["intensity"]["l2"] == 32
    assert hopper["bound"]["ceilings"]["dram"] == pytest.approx(
        4096 / 3 * machines.find("H100").dram_gbs / 1e3
    )
    assert "svg" in Page(html.read_text()).seen
    assert "hopper.tma_wgmma: L2 allows 300, measured 320" in chart.read_text()


def test_a_t4s_roofline_has_its_documents_figures(tmp_path: Path) -> None:
    """Every rung of every ladder that sm_75 runs, its CTAs on an SM, and what document 003 measured
    on one.
    """
    chart = tmp_path / "t4.svg"
    points = roofline_points("--gpu", "t4", "--chart", chart)
    assert {(point["machine"], point["measured_tflops"]) for point in points.values()} == {
        ("T4", None)
    }
    assert set(points) == {kernel.name for kernel in registry.ladder() if kernel.min_arch == 75}
    assert {points[name]["dtype"] for name in ("simt.naive", "turing.wmma")} == {
        "float32",
        "float16",
    }
    # Document 003's v11: two CTAs an SM, half of the warps, by registers.
    ldmatrix = points["turing.ldmatrix"]
    assert (ldmatrix["ctas_per_sm"], ldmatrix["warps_per_sm"], ldmatrix["limiter"]) == (
        2,
        16,
        "registers",
    )
    seen = [(seed["n"], seed["tflops"]) for seed in points["turing.vectorized"]["seeds"]]
    assert seen == [(2048, [2.984, 2.984]), (4096, [12.38, 12.38])]
    # Fragments straight from global memory: eight lines of L1 a load.
    assert points["turing.wmma"]["bound"]["by"] == "l1"
    turing = [point for name, point in points.items() if name.startswith("turing.")]
    assert all(
        seed["tflops"][1] < point["bound"]["tflops"] for point in turing for seed in point["seeds"]
    )
    assert "seed 17.1 at 4096" in chart.read_text()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("ladder --ladder nothing", "--ladder is 'nothing'"),
        ("ladder --shapes 4096,16x32x64", "expected N,..."),
        ("ladder --profiles /nowhere.json", "/nowhere.json: cannot be read"),
        ("sizes nothing", "kernel is 'nothing'"),
        ("roofline --shapes 4096,512", "expected one shape"),
        ("ladder --results /nowhere.json", "/nowhere.json: cannot be read"),
        ("ladder --html /nowhere/x.html", "--html is '/nowhere/x.html'"),
        ("roofline --gpu H9000", "--gpu is 'H9000'"),
        ("roofline --dtype int8", "--dtype is 'int8'"),
        ("roofline --ladder nothing", "expected a ladder"),
        ("roofline --gpu T4 --ladder hopper", "no kernel of hopper takes bfloat16 on sm_75"),
        ("roofline --chart x.bmp", "--chart is 'x.bmp'"),
    ],
)
def test_bad_arguments_are_usage_errors(command: str, message: str) -> None:
    commands.refuses(message, "report", *command.split())


def test_the_readme_shows_the_newest_results() -> None:
    assert readme.stale() == []
    shown("readme", "--check")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """With some of the README's parts."""
    shutil.copytree(ROOT / "results", tmp_path / "results")
    shutil.copytree(ROOT / "autotune" / "tables", tmp_path / "autotune" / "tables")
    (tmp_path / "src" / "outblas").mkdir(parents=True)
    text = (ROOT / "README.md").read_text()
    parts = [
        m[0] for m in re.finditer("(?s)<!-- generated: (chart|suite|tuned) .*?<!-- end -->", text)
    ]
    assert len(parts) == 4
    (tmp_path / "README.md").write_text("\n\n".join(parts))
    return tmp_path


def test_a_changed_figure_makes_the_readme_stale(checkout: Path) -> None:
    path = checkout / "results" / "h100_suite.json"
    value = results.parsed(path)
    value["results"][1]["ratio_high"] += 0.1
    path.write_text(json.dumps(value))
    assert readme.stale(checkout) == ["README.md", "results/h100_suite.svg"]
    before = (checkout / "README.md").read_text()
    assert readme.render(checkout) == ["README.md", "results/h100_suite.svg"]
    assert readme.stale(checkout) == []
    now = (checkout / "README.md").read_text()
    changed = [
        line for line, old in zip(now.splitlines(), before.splitlines(), strict=True) if line != old
    ]
    assert len(changed) == 1
    assert f"{value['results'][1]['ratio_high']:.3f}" in changed[0]


def test_a_picture_that_was_touched_is_stale(checkout: Path) -> None:
    path = checkout / "results" / "h100_suite.svg"
    text = path.read_text()
    for other in (text[: len(text) // 2], text.replace("512", "513", 1), ""):
        path.write_text(other)
        assert readme.stale(checkout) == ["results/h100_suite.svg"]
    path.unlink()
    assert readme.render(checkout) == ["results/h100_suite.svg"]
    assert readme.stale(checkout) == []


def test_a_table_holds_one_campaign(checkout: Path) -> None:
    value = results.parsed(checkout / "results" / "h100_suite.json")
    value["environment"]["gpu"] = "NVIDIA H200"
    other = checkout / "results" / "h200.json"
    other.write_text(json.dumps(value))
    with pytest.raises(ValueError, match="2 kinds of GPU, dtype and layout"):
        rendered(checkout, "suite from results/h100_suite.json,results/h200.json")
    value["results"] = [r for r in value["results"] if r["provider"] != "cublas"]
    other.write_text(json.dumps(value))
    with pytest.raises(ValueError, match="512 has no cublas in burst"):
        rendered(checkout, "suite from results/h200.json")


def test_the_readme_is_made_in_a_checkout_only(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("")
    with pytest.raises(ValueError, match="is no checkout of outblas"):
        readme.render(tmp_path)


def test_figures_come_from_the_seeds_gpu() -> None:
    here = loaded(MEASURED[1]).measurements
    elsewhere = loaded(entry("hopper.tma_wgmma", 0.5), gpu="NVIDIA H200").measurements
    for both in (here + elsewhere, elsewhere + here):
        (ours,) = [m for row in ladder.rows(both, "hopper", (4096,)) for m in row.measured]
        assert (ours.gpu, ours.ratio) == ("H100", 0.41)


def test_the_newest_measurement_counts() -> None:
    both = loaded(entry("portable", 0.8), entry("portable", 0.9)).measurements
    found = lookup.find(both, "portable", (4096,) * 3, "bfloat16", "H100")
    assert found is not None
    assert found.ratio == 0.9


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            "nonsense from results/h100_suite.json -->\n<!-- end -->",
            "is a 'nonsense', expected one of",
        ),
        ("suite from results/none.json -->\n<!-- end -->", "none.json: cannot be read"),
        ("suite -->\n<!-- end -->", "is not of the form"),
        ("suite from results/h100_suite.json -->\n", "is not of the form"),
    ],
)
def test_a_part_that_cannot_be_made_is_an_error(part: str, message: str, checkout: Path) -> None:
    text = f"<!-- generated: {part}"
    (checkout / "README.md").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        readme.render(checkout)
    assert (checkout / "README.md").read_text() == text


def drawn(path):
    """A chart's text in a file of its own."""
    from outblas.bench import plotting

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

"""Reports of ladders: the rungs and the seeds' figures, results files, rows, the command and its
pages.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import commands
from support.reports import MEASURED, Page, entry, invoke, loaded, report, rows_of, shown, write

from outblas.core import registry
from outblas.report import ladder, lookup, results, rungs, seed_figures

RUNGS = {
    "simt": "naive coalesced shared strip register vectorized warptile pipelined",
    "turing": "wmma shared double_buffer vectorized ldmatrix cp_async",
    "hopper": (
        "tma_wgmma large_tile warp_specialized two_consumers persistent lean_barriers "
        "cluster_multicast store_tuning tma_store hilbert gemm"
    ),
}


# ---- rungs and the seeds' figures
def test_every_planned_rung_has_its_place() -> None:
    planned = {f"{name}.{rung}" for name, text in RUNGS.items() for rung in text.split()}

    assert set(rungs.names()) == planned | {"portable"}


def test_a_climb_has_what_is_built_in_the_order_of_the_plan() -> None:
    built = [kernel.name for kernel in registry.ladder()]

    assert [rung.name for rung in rungs.climb()] == sorted(built, key=rungs.names().index)


def test_a_climb_of_an_unknown_ladder_is_refused() -> None:
    with pytest.raises(ValueError, match="--ladder is 'nothing'"):
        rungs.climb("nothing")


def test_every_rung_has_a_seeds_figure_or_is_known_to_have_none() -> None:
    with_figure = {figure.rung for figure in seed_figures.FIGURES}

    assert sorted([*with_figure, *seed_figures.WITHOUT_FIGURE]) == sorted(rungs.names())


def first_figure(rung: str) -> seed_figures.Figure:
    """What the seeds say of a rung first."""
    return next(figure for figure in seed_figures.FIGURES if figure.rung == rung)


@pytest.mark.parametrize(
    ("rung", "ratio"), [("hopper.hilbert", 764 / 716), ("simt.warptile", 41.496 / 50.058)]
)
def test_a_seeds_ratio_is_of_its_own_two_figures(rung: str, ratio: float) -> None:
    assert first_figure(rung).ratio == pytest.approx((ratio, ratio))


def test_a_seeds_figure_may_be_of_tflops() -> None:
    assert first_figure("hopper.tma_wgmma").tflops == (317.0, 317.0)


@pytest.mark.parametrize("figure", seed_figures.FIGURES, ids=lambda figure: figure.rung)
def test_a_seeds_figures_are_ranges_that_a_gpu_can_reach(figure: seed_figures.Figure) -> None:
    if figure.tflops is not None:
        low, high = figure.tflops
        assert 0 < low <= high < 1000


# ---- rows
@pytest.fixture(scope="module")
def hopper_rows() -> dict[str, ladder.Row]:
    """The rows of the Hopper ladder, of which one rung is measured at one of two sizes."""
    return rows_of("hopper", (4096, 8192), *MEASURED)


def test_a_ladder_starts_where_its_climb_does(hopper_rows: dict[str, ladder.Row]) -> None:
    assert list(hopper_rows) == ["simt.warptile", *rungs.names("hopper")]


def test_a_row_has_what_was_measured_at_each_size(hopper_rows: dict[str, ladder.Row]) -> None:
    at_4096, at_8192 = hopper_rows["hopper.tma_wgmma"].at

    assert at_4096.ours is not None
    assert at_4096.ours.ratio == 0.41
    assert at_8192.ours is None


def test_a_row_has_no_gain_over_a_parent_without_a_figure(
    hopper_rows: dict[str, ladder.Row],
) -> None:
    assert hopper_rows["hopper.tma_wgmma"].at[0].gain is None


@pytest.mark.parametrize(
    ("rung", "cells"),
    [
        pytest.param(
            "hopper.tma_wgmma",
            ("317, 0.44\n001 kernel 2", "4096", "320", "0.410 (0.406–0.414)"),
            id="measured",
        ),
        pytest.param("hopper.gemm", ("–", "–", "–", "not measured"), id="not measured"),
    ],
)
def test_cells_of_a_row(
    rung: str, cells: tuple[str, ...], hopper_rows: dict[str, ladder.Row]
) -> None:
    assert hopper_rows[rung].cells()[:5] == (rung, *cells)


def test_a_gain_is_over_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = rungs.climb("hopper")[0]
    child = replace(rungs.climb("portable")[0], parent=parent.name)
    monkeypatch.setattr(ladder, "climb", lambda name: (parent, child))

    _, row = ladder.rows(loaded(*MEASURED).measurements, None, (4096,))

    assert row.at[0].gain == pytest.approx(0.9 / 0.41)
    assert row.record()["sizes"][0]["gain"] == row.at[0].gain


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("simt", (2048, 4096)), ("turing", (2048, 4096)), ("portable", (4096, 8192))],
)
def test_the_default_sizes_of_a_ladder(name: str, sizes: tuple[int, ...]) -> None:
    assert ladder.default_sizes(name) == sizes


@pytest.mark.parametrize(
    ("name", "before", "seed"),
    [
        ("simt", [], "0.502, 0.01\n002 baseline, GH200, at 4096"),
        ("turing", ["simt.vectorized"], "1.87, 0.05\n003 v07, T4"),
        ("portable", [], "–"),
    ],
)
def test_ladders_without_a_measurement_show_the_seeds(
    name: str, before: list[str], seed: str
) -> None:
    """`before`: rungs of other ladders that the climb starts from."""
    own = rungs.names(name)

    rows = rows_of(name, ladder.default_sizes(name))

    assert list(rows) == [*before, *own]
    assert rows[own[0]].cells()[1] == seed


@pytest.mark.parametrize("order", ["here first", "elsewhere first"])
def test_figures_come_from_the_seeds_gpu(order: str) -> None:
    here = loaded(MEASURED[1]).measurements
    elsewhere = loaded(entry("hopper.tma_wgmma", 0.5), gpu="NVIDIA H200").measurements
    both = here + elsewhere if order == "here first" else elsewhere + here

    rows = ladder.rows(both, "hopper", (4096,))

    (ours,) = [measured for row in rows for measured in row.measured]
    assert (ours.gpu, ours.ratio) == ("H100", 0.41)


def test_the_newest_measurement_counts() -> None:
    both = loaded(entry("portable", 0.8), entry("portable", 0.9)).measurements

    found = lookup.find(both, "portable", (4096,) * 3, "bfloat16", "H100")

    assert found is not None
    assert found.ratio == 0.9


# ---- files of results
MALFORMED: dict[str, Any] = {
    "expected an object with environment and results": [],
    "environment.gpu is None": {"environment": {}, "results": []},
    r"results\[0\].provider is None, expected text": report({}),
    r"results\[0\].mode is 'fast'": report(entry("x", 1.0, mode="fast")),
    r"results\[0\].shape is \[1, 2\]": report(entry("x", 1.0, shape=[1, 2])),
    r"results\[1\].us is -1, expected a number above 0": report(
        entry("x", 1.0), entry("x", 1.0, us=-1)
    ),
    r"results\[0\].us is 1000.*, expected a number above 0": report(entry("x", 1.0, us=10**400)),
    "expected all three or none": report(entry("x", 1.0, ratio_low=None)),
    "has figures although its check is 'wrong: 1'": report(entry("x", 1.0, check="wrong: 1")),
    "has a ratio and no us or tflops": report(entry("x", 1.0, tflops=None)),
    r"results\[0\].batch_invariant is 1, expected true or false": report(
        entry("x", 1.0, batch_invariant=1)
    ),
    r"results\[0\].epilogue is 1, expected text": report(entry("x", 1.0, epilogue=1)),
}


@pytest.fixture(params=MALFORMED)
def malformed(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A file of results that is wrong, and the message that says how."""
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(MALFORMED[request.param]))
    return path, request.param


def test_malformed_results_name_file_and_field(malformed: tuple[Path, str]) -> None:
    path, message = malformed

    with pytest.raises(ValueError, match=rf"bad\.json: .*{message}"):
        results.load([path])


def test_malformed_results_are_an_error_of_usage(malformed: tuple[Path, str]) -> None:
    path, _ = malformed

    invoke("ladder", "--results", path, code=2)


# ---- the command
@pytest.fixture
def bench_json(tmp_path: Path) -> Path:
    """A file of results, as `outblas bench --save` writes it."""
    return write(tmp_path / "bench.json", *MEASURED)


def test_ladder_prints_a_table(bench_json: Path) -> None:
    text = shown("ladder", "--ladder", "hopper", "--results", bench_json)

    assert "hopper.hilbert" in text
    assert "0.410" in text


def test_ladder_draws_a_chart(bench_json: Path, tmp_path: Path) -> None:
    chart = tmp_path / "ladder.svg"

    shown("ladder", "--ladder", "hopper", "--results", bench_json, "--chart", chart)

    assert "hopper.tma_wgmma" in chart.read_text()


def test_ladder_saves_its_rows(bench_json: Path, tmp_path: Path) -> None:
    saved = tmp_path / "ladder.json"

    shown("ladder", "--ladder", "hopper", "--results", bench_json, "--save", saved)

    value = json.loads(saved.read_text())
    assert value["sizes"] == [4096, 8192]
    rows = {rung["rung"]: rung["sizes"] for rung in value["rungs"]}
    assert list(rows) == ["simt.warptile", *rungs.names("hopper")]
    at_4096, at_8192 = rows["hopper.tma_wgmma"]
    assert at_4096["ours"]["ratio"] == 0.41
    assert at_8192["ours"] is None
    assert rows["hopper.large_tile"][0]["ours"] is None


def test_ladder_writes_a_page(bench_json: Path, tmp_path: Path) -> None:
    html = tmp_path / "ladder.html"

    shown("ladder", "--ladder", "hopper", "--results", bench_json, "--html", html)

    page = Page(html.read_text())
    assert {"svg", "table"} <= set(page.seen)


BAD_ARGUMENTS = {
    "ladder --ladder nothing": "--ladder is 'nothing'",
    "ladder --shapes 4096,16x32x64": "expected N,...",
    "ladder --profiles /nowhere.json": "/nowhere.json: cannot be read",
    "ladder --results /nowhere.json": "/nowhere.json: cannot be read",
    "ladder --html /nowhere/x.html": "--html is '/nowhere/x.html'",
    "sizes nothing": "kernel is 'nothing'",
    "roofline --shapes 4096,512": "expected one shape",
    "roofline --gpu H9000": "--gpu is 'H9000'",
    "roofline --dtype int8": "--dtype is 'int8'",
    "roofline --ladder nothing": "expected a ladder",
    "roofline --gpu T4 --ladder hopper": "no kernel of hopper takes bfloat16 on sm_75",
    "roofline --chart x.bmp": "--chart is 'x.bmp'",
}


@pytest.mark.parametrize("command", BAD_ARGUMENTS)
def test_bad_arguments_are_usage_errors(command: str) -> None:
    commands.refuses(BAD_ARGUMENTS[command], "report", *command.split())


def test_a_record_of_the_hosts_costs_is_no_report(tmp_path: Path) -> None:
    """`outblas bench-host` keeps its record beside the timings, which reports read whole."""
    record = tmp_path / "host.json"
    record.write_text(json.dumps({"environment": {}, "figures": []}))

    files = results.by_kind([record])

    assert not any((files.bench, files.profiles, files.phases))

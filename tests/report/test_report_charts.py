"""The charts of the repository's own results: all that is measured is drawn, and can be read."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import charts
from support.paths import ROOT

from outblas.bench import chart, plotting
from outblas.report import evidence, ladder, ladder_chart, raster, raster_chart

RESULTS = ROOT / "results"
CLIMBS = {
    "hopper": ("h100_hopper", "h100_hopper_8192", "h100_gemm", "h100_simt_mixed"),
    "turing": ("h100_turing",),
    "simt": ("h100_simt", "h100_simt_sizes", "h100_simt_mixed"),
}
CAMPAIGNS = ("h200_suite", "h100_suite", "h100_hopper", "h100_simt_sizes", "h100_hopper_sustained")


def files(*names: str) -> list[Path]:
    return [RESULTS / f"{name}.json" for name in names]


def climb_rows(name: str) -> list[ladder.Row]:
    loaded = evidence.load(files(*CLIMBS[name]))
    return ladder.rows(loaded.measurements, name, ladder.default_sizes(name))


def climb(name: str) -> Any:
    return ladder_chart.draw(climb_rows(name), ladder.default_sizes(name))


@functools.cache
def orders(**setting: Any) -> raster.Report:
    """The orders of tiles at 8192, with what ncu counted."""
    profiles = evidence.load(files("h100_counters")).profiles
    return raster.report(raster.Setting((8192, 8192, 8192), **setting), (16, 8), profiles)


def campaign(name: str) -> Any:
    return chart.figure(json.loads((RESULTS / f"{name}.json").read_text()))


@functools.cache
def drawn_orders() -> Any:
    return raster_chart.draw(orders())


FIGURES: dict[str, Callable[[], Any]] = {
    **{f"climb {name}": functools.partial(climb, name) for name in CLIMBS},
    **{name: functools.partial(campaign, name) for name in CAMPAIGNS},
    "orders": drawn_orders,
    "orders of clusters": lambda: raster_chart.draw(orders(cluster=(2, 1))),
}


@pytest.fixture(scope="module", params=FIGURES)
def figure(request: pytest.FixtureRequest) -> Any:
    return FIGURES[request.param]()


def test_no_texts_of_a_chart_collide_and_none_is_cut_off(figure: Any) -> None:
    assert charts.collisions(figure) == []
    assert charts.clipped(figure) == []


def test_every_panel_has_a_title_labels_and_at_most_eight_series(figure: Any) -> None:
    for panel in charts.axes_of(figure):
        assert panel.get_title(loc="left")
        assert panel.get_xlabel()
        assert panel.get_ylabel()
        assert len(charts.colours_of_data(panel)) <= plotting.MOST_SERIES


def test_every_chart_has_a_title_and_a_text_alternative(figure: Any) -> None:
    assert figure.get_suptitle()
    assert len(plotting.description(figure)) > 100


def test_a_chart_is_as_wide_as_a_readme(figure: Any) -> None:
    assert figure.get_figwidth() == plotting.WIDTH


# ---- climbs
@pytest.mark.parametrize("name", CLIMBS)
def test_every_ratio_of_the_table_has_its_bar(name: str) -> None:
    rows = climb_rows(name)

    panels = charts.axes_of(climb(name))

    for i, panel in enumerate(panels):
        bars = {
            container.get_label(): [bar.get_width() for bar in container]
            for container in panel.containers
        }
        wanted = [row.at[i].ours.ratio for row in rows if row.at[i].ours]
        assert bars["ours"] == pytest.approx(wanted)
        names = [tick.get_text() for tick in panel.get_yticklabels()]
        assert names == [row.rung.name for row in rows]


def test_the_first_row_of_hoppers_climb_has_its_bar_and_its_figure() -> None:
    figure = climb("hopper")

    (at_4096, _) = charts.axes_of(figure)
    (ours,) = (c for c in at_4096.containers if c.get_label() == "ours")
    assert ours[0].get_y() + ours[0].get_height() / 2 == pytest.approx(0.2)
    assert ours[0].get_width() == pytest.approx(0.0607, abs=1e-4)
    assert "0.0607" in {each.text for each in charts.drawn_texts(figure)}


def test_a_size_that_nobody_measured_has_no_panel() -> None:
    rows = ladder.rows(evidence.load(files("h100_hopper")).measurements, "hopper", (4096, 512))

    (panel,) = charts.axes_of(ladder_chart.draw(rows, (4096, 512)))

    assert panel.get_title(loc="left") == "N = 4096"


def test_a_rung_without_a_timing_has_a_dash() -> None:
    figure = climb("hopper")

    assert "simt.warptile not measured" in plotting.description(figure)
    assert "–" in {each.text for each in charts.drawn_texts(figure)}


# ---- orders of tiles
def paths(figure: Any) -> dict[str, list[Any]]:
    """The lines through the tiles of the corner, by order."""
    from matplotlib.collections import LineCollection

    panels = charts.axes_of(figure)
    return {
        whole.get_title(loc="left").strip(): [
            segment.tolist()
            for collection in corner.collections
            if isinstance(collection, LineCollection)
            for segment in collection.get_segments()
        ]
        for whole, corner in zip(panels[::2], panels[1::2], strict=True)
    }


def test_orders_with_the_same_waves_differ_in_their_paths() -> None:
    found = paths(drawn_orders())

    alike = [found[name] for name in ("grouped 2x2", "grouped 4x4", "row")]
    assert len(found) == 9
    assert len({json.dumps(path) for path in alike}) == 3


def test_a_path_goes_through_tiles_in_the_order_in_which_they_start() -> None:
    found = paths(drawn_orders())

    assert found["row"][0] == [[n, 0] for n in range(8)]
    assert found["grouped 2x2"][0] == [[0, 0], [0, 1]]
    assert found["grouped 16x8"][0] == [[0, m] for m in range(16)]


def test_the_model_and_ncu_stand_above_each_order() -> None:
    texts = {each.text for each in charts.drawn_texts(drawn_orders())}

    assert "hits: model 83.3%\nncu 82.8%" in texts
    assert "hits: model 64.6%\nncu –" in texts


@pytest.mark.parametrize(
    ("tiles", "covering"),
    [
        ([(0, 0), (0, 1), (1, 0), (1, 1)], [(0, 0, 2, 2)]),
        ([(0, 0), (2, 0)], [(0, 0, 1, 1), (2, 0, 1, 1)]),
        ([(0, 0), (0, 1), (1, 0)], [(0, 0, 1, 2), (1, 0, 1, 1)]),
        ([], []),
    ],
    ids=["a block", "apart", "an L", "none"],
)
def test_rectangles_cover_tiles(
    tiles: list[tuple[int, int]], covering: list[raster_chart.Rectangle]
) -> None:
    assert raster_chart.rectangles(tiles) == covering


def test_rectangles_cover_every_tile_of_a_wave_once() -> None:
    report = orders()
    for row in report.rows:
        columns = report.setting.grid[1]
        for step in row.order.steps(report.setting):
            tiles = [divmod(tile, columns) for tile in step if tile >= 0]
            found = [
                (m + i, n + j)
                for m, n, height, width in raster_chart.rectangles(tiles)
                for i in range(height)
                for j in range(width)
            ]
            assert sorted(found) == sorted(tiles)

"""The chart of a campaign: a row for each shape or provider, at most eight series a panel."""

from pathlib import Path
from typing import Any

import pytest
from support import charts

from outblas.bench import chart, plotting

Entry = dict[str, Any]


def entry(provider: str, n: int, ratio: float, **changes: Any) -> Entry:
    """A result of `outblas bench`."""
    known = {
        "provider": provider,
        "config": "",
        "shape": [n, n, n],
        "dtype": "bfloat16",
        "layout": "nt",
        "mode": "burst",
        "ratio": ratio,
        "ratio_low": ratio * 0.99,
        "ratio_high": ratio * 1.01,
        "tflops": 700 * ratio,
    }
    return known | changes


def figure_of(*entries: Entry) -> Any:
    return chart.figure(
        {"environment": {"gpu": "NVIDIA H100", "torch": "2.11"}, "results": entries}
    )


def words(figure: Any) -> set[str]:
    return {each.text for each in charts.drawn_texts(figure)}


BASES = [entry("cublas", n, 1.0, ratio_low=1.0, ratio_high=1.0) for n in (1024, 4096)]
BEST = [entry("cublaslt-best", n, 1.05) for n in (1024, 4096)]
OURS = [
    entry("outblas", 1024, 1.2, ratio_best=1.14),
    entry("outblas", 4096, 0.98, ratio_best=0.93),
]
MANY = [entry(f"kernel{i}", n, 0.1 * i) for i in range(1, 11) for n in (1024, 4096)]


def test_one_provider_stands_beside_both_bases() -> None:
    figure = figure_of(*BASES, *BEST, *OURS)

    assert {"outblas over torch.mm", "outblas over cublaslt-best"} <= words(figure)
    assert {"1.200", "1.140", "0.980", "0.930"} <= words(figure)
    assert {"geometric mean", "1.084", "1.030"} <= words(figure)
    assert "outblas beside cuBLAS on an NVIDIA H100" in words(figure)


def test_several_providers_are_series_over_cublas() -> None:
    portable = [entry("portable", n, 0.9) for n in (1024, 4096)]

    figure = figure_of(*BASES, *OURS, *portable)

    assert {"outblas over cublas", "portable over cublas"} <= words(figure)


def test_a_shape_that_was_not_timed_has_a_dash_and_no_mean() -> None:
    portable = [entry("portable", 1024, 0.9)]

    figure = figure_of(*BASES, *OURS, *portable)

    assert "–" in words(figure)
    assert "0.900" in words(figure)
    panel = charts.axes_of(figure)[0]
    marks = {line.get_label(): len(line.get_xdata()) for line in panel.lines}
    assert marks["outblas over cublas"] == 3  # two shapes, and their mean
    assert marks["portable over cublas"] == 1


def test_many_providers_are_rows_and_small_panels_in_one_colour() -> None:
    figure = figure_of(*BASES, *MANY)

    panels = charts.axes_of(figure)
    assert len(panels) == 1 + 10  # the ratios, and a panel against N for each provider
    assert all(len(charts.colours_of_data(panel)) <= 2 for panel in panels)
    assert {f"1024: kernel{i}" for i in range(1, 11)} <= words(figure)
    assert any("Grey lines: cublas." in text for text in words(figure))


def test_modes_have_panels_of_their_own() -> None:
    cold = [{**each, "mode": "cold"} for each in (*BASES, *OURS)]

    figure = figure_of(*BASES, *OURS, *cold)

    titles = [panel.get_title(loc="left") for panel in charts.axes_of(figure)]
    assert [title.partition(":")[0] for title in titles] == [
        "Burst",
        "TFLOP/s of square products",
        "Cold",
        "TFLOP/s of square products",
    ]


def test_ratios_far_apart_are_on_a_logarithmic_scale() -> None:
    (panel, *_) = charts.axes_of(figure_of(*BASES, entry("naive", 4096, 0.01)))

    assert panel.get_xscale() == "log"
    assert panel.get_xlim()[0] < 0.01
    assert panel.get_xlim()[1] > 1.0


def test_a_long_name_of_a_config_is_broken_after_commas() -> None:
    config = "stages=4,in_flight=1,order=serpentine,group_m=8,epilogue_stages=2"
    others = [entry(f"kernel{i}", 4096, 0.9) for i in range(8)]

    figure = figure_of(*BASES, entry("hopper.hilbert", 4096, 1.0, config=config), *others)

    (name,) = [text for text in words(figure) if text.startswith("hopper.hilbert[")]
    assert name.replace("\n", "") == f"hopper.hilbert[{config}]"
    assert max(map(len, name.split("\n"))) <= 46


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param([*BASES, *BEST, *OURS], id="two bases"),
        pytest.param([*BASES, *MANY[:12]], id="six providers"),
        pytest.param([*BASES, *MANY], id="ten providers"),
        pytest.param([*BASES, *OURS, entry("naive", 4096, 0.01)], id="far apart"),
        pytest.param(OURS[:1], id="one"),
        pytest.param(BASES, id="cuBLAS alone"),
    ],
)
def test_a_chart_can_be_read(entries: list[Entry]) -> None:
    figure = figure_of(*entries)

    assert charts.collisions(figure) == []
    assert charts.clipped(figure) == []
    for panel in charts.axes_of(figure):
        assert panel.get_xlabel()
        assert panel.get_ylabel()
        assert panel.get_title(loc="left")
        assert len(charts.colours_of_data(panel)) <= plotting.MOST_SERIES


def test_the_text_alternative_has_every_figure() -> None:
    text = plotting.description(figure_of(*BASES, *BEST, *OURS))

    assert "speedup of outblas over torch.mm: 1024 1.200, 4096 0.980, geometric mean 1.084" in text
    assert "TFLOP/s of outblas by N: 1024 840, 4096 686" in text


def test_one_report_makes_one_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        plotting.save(figure_of(*BASES, *BEST, *OURS), tmp_path / name)

    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()

"""`outblas report raster`: orders of tiles by the model of L2, beside what ncu measured of them."""

import json
import math
from pathlib import Path

import pytest
from support import commands
from support.reports import Entry, counted, invoke, loaded, shown, write

from outblas.report import profiles
from outblas.report import raster as report

GROUP = 16, 8
CUBLAS_HIT_RATE = 0.72


def measured(hit_rate: float, config: str = "", n: int = 1024, **changes: object) -> Entry:
    """Counters of `hopper.persistent`, in its own config but for some fields."""
    known = {"dtype": "bfloat16", "layout": "nt", "dram_read_bytes": 1.2e9}
    return counted(report.PROVIDER, config, n, l2_hit_rate=hit_rate) | known | changes


def of_cublas(n: int = 1024) -> Entry:
    return measured(CUBLAS_HIT_RATE, n=n, provider="cublas", dram_read_bytes=1.5e9)


def of_four_orders(n: int = 1024) -> tuple[Entry, ...]:
    """Hit rates of four orders, of which one says what ran and the others what was asked for."""
    row = "tile_m=128,tile_n=256,order=row,sms=128"
    return (
        measured(0.83, n=n),
        measured(0.80, "order=hilbert,group_m=2", n, dram_read_bytes=1.3e9),
        measured(0.70, "order=row", n, resolved=row, dram_read_bytes=2.4e9),
        measured(0.81, "group_m=32,group_n=4", n, dram_read_bytes=1.35e9),
    )


def reported(*entries: Entry, n: int = 1024) -> report.Report:
    """The report on a product of n on three sides."""
    return report.report(report.Setting((n, n, n)), GROUP, loaded(*entries).profiles)


# ---- orders
def test_grouped_is_reported_in_several_groups_and_every_other_order_once() -> None:
    orders = {(row.order.kind, *row.order.group) for row in reported().rows}

    groups = {("grouped", *group) for group in report.GROUPS}
    others = {("row",), ("column",), ("consecutive",), ("serpentine", 16), ("hilbert",)}
    assert orders == groups | others


def test_a_group_that_was_measured_is_reported_too() -> None:
    orders = {row.order.label for row in reported(*of_four_orders()).rows}

    assert orders - {row.order.label for row in reported().rows} == {"grouped 32x4"}


def test_the_order_that_misses_least_comes_first() -> None:
    _, of_two_halves = report.MODELS

    rows = reported(n=8192).rows

    missed = [row.traffic[report.MODELS.index(of_two_halves)].missed_bytes for row in rows]
    assert missed == sorted(missed)
    assert missed[0] < missed[-1]


# ---- what was measured
def test_measured_rates_stand_beside_their_orders() -> None:
    rows = reported(*of_four_orders()).rows

    rates = {row.order.label: row.profile.l2_hit_rate for row in rows if row.profile}
    assert rates == {"grouped 16x8": 0.83, "hilbert": 0.8, "row": 0.7, "grouped 32x4": 0.81}


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(measured(0.1, "order=column,sms=0"), id="all SMs"),
        pytest.param(measured(0.1, "order=column,cluster_m=2"), id="clusters"),
        pytest.param(measured(0.1, "order=column", layout="nn"), id="layout"),
        pytest.param(measured(0.1, "order=column", n=2048), id="shape"),
        pytest.param(measured(0.1, "order=column", provider="hopper.hilbert"), id="kernel"),
    ],
)
def test_rates_of_other_settings_stand_beside_none(other: Entry) -> None:
    rows = reported(other).rows

    assert not [row.order.label for row in rows if row.profile]


def test_a_model_ranks_orders_as_their_measured_rates_do() -> None:
    one_cache, two_halves = reported(*of_four_orders(8192), n=8192).agreements

    assert (one_cache.l2, two_halves.l2) == ("50 MB", "2 × 25 MB")
    assert one_cache.orders == two_halves.orders == 4
    assert one_cache.rank > 0.7
    assert two_halves.rank > 0.7


def test_the_hit_rate_of_cublas_is_reported() -> None:
    record = reported(of_cublas()).record()

    assert record["cublas_hit_rate"] == CUBLAS_HIT_RATE


@pytest.mark.parametrize(("sms", "orders"), [(128, 3), (132, 2)])
class TestThe4096OfResults:
    """The checked-in profiles of 4096 on three sides, by one cache of 50 MB and by two halves."""

    @pytest.fixture
    def agreements(self, sms: int) -> tuple[report.Agreement, ...]:
        """Of the two models with these profiles."""
        found = profiles.load(profiles.default_files())
        setting = report.Setting((4096, 4096, 4096), sms=sms)
        return report.report(setting, GROUP, found).agreements

    def test_the_model_of_two_halves_has_the_dram_reads_to_one_percent(
        self, agreements: tuple[report.Agreement, ...], orders: int
    ) -> None:
        _, two_halves = agreements

        assert two_halves.orders == orders
        assert two_halves.dram_error < 0.01

    def test_the_model_of_two_halves_alone_has_the_hit_rates(
        self, agreements: tuple[report.Agreement, ...], orders: int
    ) -> None:
        one_cache, two_halves = agreements

        assert two_halves.error < 0.03
        assert one_cache.error > 0.1


@pytest.mark.parametrize(
    ("pairs", "correlation"),
    [
        pytest.param([(1, 10), (2, 20), (3, 400)], 1, id="same order"),
        pytest.param([(1, 3), (2, 2), (3, 1)], -1, id="opposite order"),
        # Equal values share a rank: 1.5, 1.5, 3 against 1, 2, 3.
        pytest.param([(1, 1), (1, 2), (3, 3)], math.sqrt(3) / 2, id="equal values"),
    ],
)
def test_ranks_correlate(pairs: list[tuple[float, float]], correlation: float) -> None:
    assert report.spearman(pairs) == pytest.approx(correlation)


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param([(1, 1), (2, 2)], id="two pairs"),
        pytest.param([(1, 1), (1, 2), (1, 3)], id="one value"),
    ],
)
def test_too_few_values_have_no_correlation(pairs: list[tuple[float, float]]) -> None:
    assert report.spearman(pairs) is None


# ---- the command
@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Profiles of four orders."""
    return write(tmp_path / "profiles.json", *of_four_orders())


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A file of no profile."""
    return write(tmp_path / "none.json")


def test_the_command_prints_what_it_saves(file: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"

    printed = shown("raster", "--shapes", 1024, "--results", file, "--json", "--save", saved)

    assert json.loads(printed) == json.loads(saved.read_text())
    rates = [order["measured_hit_rate"] for order in json.loads(printed)["orders"]]
    assert sorted(filter(None, rates)) == [0.7, 0.8, 0.81, 0.83]


def test_a_chart_names_each_order_with_its_hit_rate(empty: Path, tmp_path: Path) -> None:
    chart = tmp_path / "chart.svg"

    invoke("raster", "--shapes", 4096, "--results", empty, "--chart", chart, code=0)

    assert "hilbert: model 79.2%, not measured" in chart.read_text()


def test_the_model_is_shown_beside_ncu(file: Path) -> None:
    assert "The model and ncu" in shown("raster", "--shapes", 1024, "--results", file)


def test_without_profiles_the_command_says_how_to_get_some(empty: Path) -> None:
    output = shown("raster", "--shapes", "1000x700x320", "--cluster", "2x1", "--results", empty)

    assert "No profile of hopper.persistent in these settings: outblas profile" in output
    assert "ncu" not in output


def test_hit_rates_of_the_first_document_are_named(empty: Path) -> None:
    output = shown("raster", "--shapes", 1024, "--results", empty)

    assert "001's kernel 6, grouped 16x8 83%" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shapes", "4096,512"), "expected one shape"),
        (("--tile", "128"), "--tile is '128', expected two sizes above 0 such as 2x1"),
        (("--group", "0x8"), "--group is '0x8'"),
        (("--cluster", "2x1", "--sms", "1"), "sms is 1 and cluster (2, 1)"),
        (("--results", "/nowhere.json"), "/nowhere.json: cannot be read"),
        (("--chart", "x.bmp"), "--chart is 'x.bmp'"),
    ],
    ids=["shapes", "tile", "group", "cluster", "results", "chart"],
)
def test_bad_arguments_are_errors_of_usage(arguments: tuple[str, ...], message: str) -> None:
    commands.refuses(message, "report", "raster", *arguments)

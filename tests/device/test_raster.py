"""Tile orders, the model of L2, profiles of hit rates, and `outblas report raster`."""

import functools
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import commands
from support.steps import steps_of

from outblas.device import l2
from outblas.device.raster import ORDERS, PAD, order, schedule
from outblas.report import profiles, results
from outblas.report import raster as report

KINDS = st.sampled_from(ORDERS)
SIDES = st.integers(1, 40)
GROUPS = st.integers(1, 20)
N8192 = (8192, 8192, 8192)
TILE = (128, 256)


@given(KINDS, SIDES, SIDES, GROUPS, GROUPS)
def test_every_order_visits_each_tile_once(
    kind: str, rows: int, columns: int, group_m: int, group_n: int
) -> None:
    assert sorted(order(kind, rows, columns, group_m, group_n)) == list(range(rows * columns))


def test_orders_of_a_small_grid() -> None:
    assert order("row", 2, 3) == order("consecutive", 2, 3) == [0, 1, 2, 3, 4, 5]
    assert order("column", 2, 3) == [0, 3, 1, 4, 2, 5]
    # 3 x 3 in groups of 2 x 2: m fastest inside, n fastest over groups, cut off at the edges.
    assert order("grouped", 3, 3, 2, 2) == [0, 3, 1, 4, 2, 5, 6, 7, 8]
    assert order("serpentine", 4, 3, 2) == [0, 3, 1, 4, 2, 5, 8, 11, 7, 10, 6, 9]
    assert order("hilbert", 2, 2) == [0, 2, 3, 1]


@given(SIDES, SIDES, GROUPS)
def test_serpentine_bands(rows: int, columns: int, group_m: int) -> None:
    tiles = []
    for band, first in enumerate(range(0, rows, group_m)):
        swept = sorted(range(columns), reverse=band % 2 == 1)
        tiles += [m * columns + n for n in swept for m in range(first, min(first + group_m, rows))]
    assert order("serpentine", rows, columns, group_m) == tiles


def test_hilbert_steps_to_neighbours() -> None:
    """One step in all is diagonal where the longer side is odd and the shorter even and above 2;
    none is elsewhere.
    """
    for rows, columns in itertools.product(range(1, 41), repeat=2):
        tiles = [divmod(tile, columns) for tile in order("hilbert", rows, columns)]
        steps = [(abs(m - p), abs(n - q)) for (m, n), (p, q) in itertools.pairwise(tiles)]
        short, long = sorted((rows, columns))
        diagonal = [(1, 1)] if long % 2 == 1 and short % 2 == 0 and short > 2 else []
        assert [step for step in steps if sum(step) != 1] == diagonal, (rows, columns)


@pytest.mark.parametrize("side", [2, 4, 8, 16, 32, 64])
def test_hilbert_fills_one_quadrant_after_the_other(side: int) -> None:
    tiles = [divmod(tile, side) for tile in order("hilbert", side, side)]
    size = side // 2
    while size:
        for first in range(0, side * side, size * size):
            assert len({(m // size, n // size) for m, n in tiles[first : first + size * size]}) == 1
        size //= 2


@given(KINDS, SIDES, SIDES, st.integers(1, 200), GROUPS, GROUPS)
def test_schedules_are_balanced(
    kind: str, rows: int, columns: int, workers: int, group_m: int, group_n: int
) -> None:
    steps, count = schedule(kind, rows, columns, workers, group_m, group_n), rows * columns
    dealt = [tile for step in steps for tile in step]
    runs = [[tile for tile in worker if tile != PAD] for worker in zip(*steps, strict=True)]
    assert {len(step) for step in steps} == {min(workers, count)}
    assert all(PAD not in step for step in steps[:-1])
    assert sorted(itertools.chain(*runs)) == list(range(count))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    if kind == "consecutive":
        assert list(itertools.chain(*runs)) == list(range(count))
    else:
        assert dealt[:count] == order(kind, rows, columns, group_m, group_n)


def test_a_small_schedule() -> None:
    assert schedule("row", 2, 3, 4) == [[0, 1, 2, 3], [4, 5, PAD, PAD]]
    assert schedule("row", 1, 2, 132) == [[0, 1]]


def test_longer_runs_come_first() -> None:
    assert schedule("consecutive", 2, 3, 4) == [[0, 2, 4, 5], [1, 3, PAD, PAD]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("spiral", 2, 2, 1), "kind is 'spiral', expected one of: row, column"),
        (("row", 0, 2, 1), "rows is 0, expected an integer of at least 1"),
        (("row", 2, -1, 1), "columns is -1"),
        (("row", 2, 2, 0), "workers is 0"),
        (("grouped", 2, 2, 1, 0), "group_m is 0"),
        (("grouped", 2, 2, 1, 1, 0.5), "group_n is 0.5"),
    ],
)
def test_orders_refuse(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        schedule(*arguments)


def traffic(
    kind: str,
    capacity: float,
    workers: int = 128,
    cluster: tuple[int, int] = (1, 1),
    multicast: bool = True,
) -> l2.Traffic:
    steps = schedule(kind, *l2.grid(N8192, TILE, cluster), workers)
    return l2.simulate(steps, N8192, TILE, cluster, capacity=capacity, multicast=multicast)


@given(
    KINDS,
    st.tuples(*[st.integers(1, 700)] * 3),
    st.tuples(*[st.integers(1, 3)] * 2),
    st.integers(1, 20),
    st.integers(1, 1 << 20),
    st.booleans(),
)
def test_the_model_on_any_product(
    kind: str,
    shape: tuple[int, int, int],
    cluster: tuple[int, int],
    workers: int,
    capacity: int,
    multicast: bool,
) -> None:
    tile = (48, 64)
    steps = schedule(kind, *l2.grid(shape, tile, cluster), workers, 3, 2)
    small, whole = (
        l2.simulate(steps, shape, tile, cluster, capacity=size, multicast=multicast)
        for size in (capacity, math.inf)
    )
    M, N, K = shape
    assert whole.missed_bytes == whole.compulsory_bytes == (M + N) * K * 2
    assert (
        whole.missed_bytes <= small.missed_bytes <= small.requested_bytes == whole.requested_bytes
    )
    assert 0 <= small.hit_rate <= whole.hit_rate < 1
    assert len(small.wave_missed_bytes) == len(steps)
    if not multicast:
        rows, columns = math.ceil(M / 48), math.ceil(N / 64)
        assert small.requested_bytes == (M * columns + N * rows) * K * 2


def test_neighbours_in_time_share_panels() -> None:
    half = 25 * 2**20
    grouped = traffic("grouped", half)
    # A wave is one group: 16 panels of A and 8 of B, none of which outlives it.
    assert grouped.wave_missed_bytes == ((16 * 128 + 8 * 256) * 8192 * 2,) * 16
    assert (
        grouped.missed_bytes
        < traffic("hilbert", half).missed_bytes
        < traffic("consecutive", half).missed_bytes
    )
    assert (
        traffic("grouped", half, 132).missed_bytes < traffic("consecutive", half, 132).missed_bytes
    )


def test_multicast_halves_requests_of_the_shared_operand() -> None:
    alone, shared = (
        traffic("grouped", math.inf, 64, (2, 1), multicast) for multicast in (False, True)
    )
    of_b = 8192 * 64 * 8192 * 2  # every CTA its panel: 64 rows of tiles, and all of B in each
    assert alone.requested_bytes - shared.requested_bytes == of_b // 2
    assert alone.missed_bytes == shared.missed_bytes


@pytest.mark.parametrize("kind", ORDERS)
def test_the_steps_of_an_order_grow_with_the_tiles(kind: str) -> None:
    """Sixteen times the tiles: 16 times the steps, or with a recursion as deep as log n 24 times,
    and not 256 times.
    """
    small, large = (steps_of(lambda n=n: order(kind, n, n)) for n in (40, 160))

    assert large < 30 * small


def test_the_steps_of_the_model_grow_with_the_tiles() -> None:
    """In groups, of whose panels a wave has as many however large the product is."""

    def simulate(size: int) -> None:
        shape = size, size, 8192
        steps = schedule("grouped", *l2.grid(shape, TILE), 128)
        l2.simulate(steps, shape, TILE, capacity=50 * 2**20)

    small, large = (steps_of(lambda size=size: simulate(size)) for size in (4096, 16384))

    assert large < 24 * small


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": [[4]]}, "steps have tile 4, expected one below 4, or -1"),
        ({"shape": (0, 4, 4)}, "shape is (0, 4, 4), expected sizes of at least 1"),
        ({"tile": (2, 0)}, "tile is (2, 0)"),
        ({"cluster": (0, 1)}, "cluster is (0, 1)"),
        ({"capacity": 0}, "capacity is 0, expected it above 0"),
        ({"halves": 0}, "halves is 0, expected it above 0"),
    ],
)
def test_the_model_refuses(changes: dict[str, Any], message: str) -> None:
    known = {"steps": [[0, 1], [2, 3]], "shape": (4, 4, 4), "tile": (2, 2), "capacity": 1}
    with pytest.raises(ValueError, match=re.escape(message)):
        l2.simulate(**(known | changes))


def entry(hit_rate: float, config: str = "", **changes: Any) -> dict[str, Any]:
    known = {
        "provider": report.PROVIDER,
        "shape": [8192] * 3,
        "dtype": "bfloat16",
        "layout": "nt",
        "config": config,
        "l2_hit_rate": hit_rate,
        "dram_read_bytes": 1.2e9,
    }
    return known | changes


def profiled(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"environment": {"gpu": "NVIDIA H100 80GB HBM3"}, "results": list(entries)}


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(
        tmp_path / "profiles.json",
        profiled(
            entry(0.72, provider="cublas", dram_read_bytes=1.5e9),
            entry(0.83),
            entry(0.80, "order=hilbert,group_m=2", dram_read_bytes=1.3e9),
            entry(
                0.70,
                "order=row",
                resolved="tile_m=128,tile_n=256,order=row,sms=128",
                dram_read_bytes=2.4e9,
            ),
            entry(0.81, "group_m=32,group_n=4", dram_read_bytes=1.35e9),
            entry(0.1, "order=column,sms=0"),
            entry(0.1, "order=column,cluster_m=2"),
            entry(0.1, "order=column", layout="nn"),
            entry(0.1, "order=column", shape=[4096] * 3),
            entry(0.1, "order=column", provider="hopper.hilbert"),
        ),
    )


invoke = functools.partial(commands.invoke, "report", "raster")


def test_settings_are_those_that_ran_or_those_asked_for(file: Path) -> None:
    base, _, asked, ran, *_ = profiles.load([file])
    assert (base.provider, base.gpu, base.settings) == ("cublas", "H100", {})
    assert asked.settings == {"order": "hilbert", "group_m": "2"}
    assert ran.settings == {"tile_m": "128", "tile_n": "256", "order": "row", "sms": "128"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "expected an object with environment and results, as outblas profile writes"),
        (
            profiled(entry(0.5), entry(1.5)),
            "results[1].l2_hit_rate is 1.5, expected a number from 0 to 1",
        ),
        (
            profiled({"provider": "x", "dtype": "y", "layout": "nt"}),
            "results[0] has no l2_hit_rate",
        ),
        (profiled(entry(0.5, "order")), "results[0].config is 'order', expected name=value,..."),
        (profiled(entry(0.5, resolved=3)), "results[0].resolved is 3, expected text"),
        (profiled(entry(0.5, us=-1)), "results[0].us is -1"),
        (profiled(entry(0.5, shape=[1])), "results[0].shape is [1]"),
    ],
)
def test_malformed_profiles_name_file_and_field(value: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.json", value)
    with pytest.raises(ValueError, match=re.escape(f"bad.json: {message}")):
        profiles.load([path])
    invoke("--results", path, code=2)


def test_profiles_and_benches_are_told_apart(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = write(file.with_name("bench.json"), {"environment": {"gpu": "x"}, "results": []})
    write(file.with_name("other.json"), [1])
    monkeypatch.setattr(results, "FOLDER", file.parent)
    assert results.default_files() == [bench]
    assert profiles.default_files() == [file]


def test_raster_command(file: Path, tmp_path: Path) -> None:
    saved, chart = tmp_path / "r.json", tmp_path / "r.svg"
    done = invoke("--results", file, "--json", "--save", saved, "--chart", chart, code=0)
    value = json.loads(done.stdout)
    assert value == json.loads(saved.read_text())
    rows = {(row["order"], *row["group"]): row for row in value["orders"]}
    kinds = {("row",), ("column",), ("consecutive",), ("serpentine", 16), ("hilbert",)}
    assert set(rows) == kinds | {("grouped", *group) for group in (*report.GROUPS, (32, 4))}
    missed = [row["model"][1]["missed_bytes"] for row in value["orders"]]
    assert missed == sorted(missed)
    measured = {
        key: row["measured_hit_rate"] for key, row in rows.items() if row["measured_hit_rate"]
    }
    assert measured == {
        ("grouped", 16, 8): 0.83,
        ("hilbert",): 0.8,
        ("row",): 0.7,
        ("grouped", 32, 4): 0.81,
    }
    assert [each["l2"] for each in value["agreement"]] == ["50 MB", "2 × 25 MB"]
    assert all(each["orders"] == 4 and each["rank"] > 0.7 for each in value["agreement"])
    assert value["cublas_hit_rate"] == 0.72
    assert "hilbert: 81.2%" in chart.read_text()
    assert "The model beside ncu" in invoke("--results", file).stdout


def test_raster_command_without_profiles(tmp_path: Path) -> None:
    empty = write(tmp_path / "none.json", profiled())
    done = invoke("--shapes", "1000x700x320", "--cluster", "2x1", "--results", empty, code=0)
    assert "No profile of hopper.persistent in these settings" in done.stdout
    assert "83%" in done.stdout
    assert "ncu" not in done.stdout


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
)
def test_bad_arguments_are_usage_errors(arguments: tuple[str, ...], message: str) -> None:
    commands.refuses(message, "report", "raster", *arguments)


def test_rank_correlation() -> None:
    assert report.spearman([(1, 10), (2, 20), (3, 400)]) == pytest.approx(1)
    assert report.spearman([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1)
    # Equal values share a rank: 1.5, 1.5, 3 against 1, 2, 3.
    assert report.spearman([(1, 1), (1, 2), (3, 3)]) == pytest.approx(math.sqrt(3) / 2)
    assert report.spearman([(1, 1), (2, 2)]) is None
    assert report.spearman([(1, 1), (1, 2), (1, 3)]) is None


@pytest.mark.parametrize(("sms", "orders"), [(128, 3), (132, 2)])
def test_the_model_of_two_halves_is_what_ncu_counts_at_4096(sms: int, orders: int) -> None:
    """DRAM reads of the checked-in profiles to 1%, hit rates to a few points; one cache of 50 MB is
    far off.
    """
    found = profiles.load(profiles.default_files())
    setting = report.Setting((4096, 4096, 4096), sms=sms)
    whole, halves = report.report(setting, (16, 8), found).agreements
    assert halves.orders == orders
    assert halves.dram_error < 0.01
    assert halves.error < 0.03 < 0.1 < whole.error


def test_what_one_cluster_alone_needs_one_half_misses() -> None:
    """A single tile: everything is brought in, and no other half asks for it."""
    alone = l2.simulate([[0]], (128, 256, 64), TILE, capacity=1 << 20, halves=2)
    assert alone.hit_rate == 0
    shared = l2.simulate([[0, 1]], (256, 256, 64), TILE, capacity=1 << 20, halves=2)
    assert (
        shared.requested_bytes == shared.lookup_missed_bytes
    )  # B by both halves, each A by its own
    assert shared.missed_bytes == shared.compulsory_bytes

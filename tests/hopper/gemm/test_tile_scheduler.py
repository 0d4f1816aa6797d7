"""Which CTA computes what in hopper.gemm: the scheduler's own source on Python's integers."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gemm_problems import BF16, OWN_CONFIG, SMALL_TILE, gemm_config
from support.tile_arithmetic import LaunchWork, Word, coord, launch, scheduler_on_integers

from outblas.call.artifact import example
from outblas.hopper import gemm
from outblas.hopper.gemm.tile_scheduler import TileScheduler
from outblas.hopper.parts import bounds, tile_order
from outblas.hopper.parts.config import HopperConfig

STREAM_K = replace(
    gemm_config(f"{SMALL_TILE},tile_n=64,k_serpentine=False,stream_k=True"), stages=8
)


@pytest.fixture(scope="module")
def arithmetic() -> SimpleNamespace:
    """The scheduler's functions, which compute on integers of 32 bits."""
    return scheduler_on_integers()


# ---- what is true of every launch
def check_that_every_tile_is_computed(launched: LaunchWork, rows: int, columns: int) -> None:
    tiles = launched.tiles

    assert len(tiles) == int(launched.params.tiles)
    assert {m for _, m, _ in tiles} == set(range(rows))
    assert len({column for _, _, column in tiles}) == columns


def check_that_partitions_cover_k_once_in_order(launched: LaunchWork) -> None:
    k_tiles = int(launched.params.k_tiles)
    for tile, works in launched.tiles.items():
        partitions = [work.partition for work in works]
        ends = list(itertools.accumulate(partition.count for partition in partitions))
        assert [partition.index for partition in partitions] == list(range(len(partitions))), tile
        assert [partition.begin for partition in partitions] == [0, *ends[:-1]], tile
        assert ends[-1] == k_tiles, tile
        if len(partitions) > 1 and k_tiles >= launched.config.cluster_k:
            assert all(partition.count > 0 for partition in partitions), tile


def check_that_partitions_agree_about_their_tile(launched: LaunchWork) -> None:
    for tile, works in launched.tiles.items():
        beliefs = {
            (
                work.narrow,
                work.partition.total,
                work.partition.split_tile,
                work.partition.workspace_index,
            )
            for work in works
        }
        assert len(beliefs) == 1, tile
        assert works[0].partition.total == len(works), tile


def check_that_partial_sums_have_places_of_their_own(launched: LaunchWork) -> None:
    """And that the places and counters are within the room that the host makes for them."""
    if not launched.config.split:
        return
    split = [works for works in launched.tiles.values() if len(works) > 1]
    counters = [works[0].partition.split_tile for works in split]
    places = [
        work.partition.workspace_index + work.partition.index for works in split for work in works
    ]

    room, split_tiles = room_for_partial_sums(launched)
    assert len(set(places)) == len(places)
    assert len(set(counters)) == len(counters)
    assert max(places, default=-1) < room
    assert max(counters, default=-1) < max(split_tiles, 1)


def room_for_partial_sums(launched: LaunchWork) -> tuple[int, int]:
    """Places for partitions, and tiles that are split."""
    params = launched.params
    if not launched.config.stream_k:
        return int(params.tiles * params.partitions), int(params.tiles)
    split_tiles = int(params.tiles % params.clusters)
    return int(params.clusters) + split_tiles, split_tiles


def check_that_every_cluster_has_work(launched: LaunchWork) -> None:
    for cluster in range(int(launched.params.clusters)):
        assert launched.steps_of(cluster), cluster


def check_that_stream_k_is_even(launched: LaunchWork) -> None:
    """Clusters have as many k tiles, or one more, where each has one of the last wave."""
    params = launched.params
    in_last_wave = int(params.tiles % params.clusters * params.k_tiles)
    if not launched.config.stream_k or in_last_wave < int(params.clusters):
        return
    k_tiles = [
        sum(work.partition.count for work in launched.steps_of(cluster))
        for cluster in range(int(params.clusters))
    ]

    assert max(k_tiles) - min(k_tiles) <= 1


class DrawnLaunch(NamedTuple):
    """A launch of `rows` and `columns` of cluster tiles."""

    config: HopperConfig
    rows: int
    columns: int
    scheduler: TileScheduler


@st.composite
def launches(draw: st.DrawFn) -> DrawnLaunch:
    """Launches of any kind, on GPUs that hold 1 to 132 clusters."""
    kind = draw(st.sampled_from(["whole tiles", "split-K", "stream-K", "cluster-K"]))
    config = replace(
        OWN_CONFIG,
        tile_m=64,
        tile_n=draw(st.sampled_from([32, 64])),
        cluster_m=1,
        k_serpentine=False,
        variable_tile_n=kind != "cluster-K" and draw(st.booleans()),
        cluster_k=draw(st.sampled_from([2, 4])) if kind == "cluster-K" else 1,
        split_k=draw(st.integers(2, 7)) if kind == "split-K" else 1,
        stream_k=kind == "stream-K",
    )
    M, N, K = draw(st.integers(1, 600)), draw(st.integers(1, 400)), draw(st.integers(1, 900))
    batch = draw(st.sampled_from([0, 1, 3]))
    resident = draw(st.sampled_from([1, 2, 7, 16, 132]))
    rows, columns = tile_order.cluster_tiles(config, M, N)
    in_waves = ["serpentine", "hilbert"]
    order = draw(st.sampled_from(in_waves if rows * columns > resident else ["", "assigned"]))
    return DrawnLaunch(config, rows, columns, launch(config, M, N, K, batch, resident, order))


@settings(max_examples=40, deadline=None)
@given(drawn=launches())
def test_every_launch_computes_every_tile_and_k_tile_once(
    arithmetic: SimpleNamespace, drawn: DrawnLaunch
) -> None:
    """Of any kind, on GPUs of any size."""
    launched = LaunchWork(arithmetic, drawn.scheduler, drawn.config)

    check_that_every_tile_is_computed(launched, drawn.rows, drawn.columns)
    check_that_partitions_cover_k_once_in_order(launched)
    check_that_partitions_agree_about_their_tile(launched)
    check_that_partial_sums_have_places_of_their_own(launched)
    check_that_every_cluster_has_work(launched)
    check_that_stream_k_is_even(launched)


# ---- stream-K
class Edge(NamedTuple):
    """A product of one column of tiles, and what a GPU that holds 132 clusters launches for it."""

    shape: tuple[int, int, int]
    tiles: int
    clusters: int


@pytest.mark.parametrize(
    "edge",
    [
        pytest.param(Edge((64, 64, 64 * 3), 1, 3), id="fewer k tiles than clusters fit"),
        pytest.param(Edge((128, 64, 64 * 5), 2, 10), id="two tiles of five k tiles"),
        pytest.param(Edge((64 * 7, 64, 64), 7, 7), id="a k tile each"),
        pytest.param(Edge((64 * 133, 64, 64), 133, 132), id="one tile of one k tile is left over"),
        pytest.param(Edge((64 * 264, 64, 128), 264, 132), id="no tile is left over"),
        pytest.param(
            Edge((64 * 263, 64, bounds.MOST_K_TILES * 64), 263, 132),
            id="as many k tiles as are taken",
        ),
    ],
)
def test_stream_k_shares_k_tiles_evenly_among_clusters_that_have_work(
    arithmetic: SimpleNamespace, edge: Edge
) -> None:
    launched = LaunchWork(arithmetic, launch(STREAM_K, *edge.shape), STREAM_K)

    assert (launched.params.tiles, launched.params.clusters) == (edge.tiles, edge.clusters)
    check_that_every_cluster_has_work(launched)
    check_that_stream_k_is_even(launched)


def test_as_many_k_tiles_as_are_numbered_in_32_bits_are_taken_and_no_more() -> None:
    given = example(BF16, None, "nt", (64 * 263, 64, bounds.MOST_K_TILES * 64))

    assert gemm.unsupported(given, STREAM_K) is None
    assert "k tiles" in str(gemm.unsupported(replace(given, K=given.K + 1), STREAM_K))


# ---- clusters
def test_the_ctas_of_a_cluster_have_neighbouring_tiles(arithmetic: SimpleNamespace) -> None:
    config = replace(OWN_CONFIG, tile_m=64, tile_n=64, cluster_m=2, cluster_n=2)
    scheduler = replace(launch(config, 256, 256, 64), cluster=Word(3))

    tiles = set()
    for m, n in itertools.product(range(2), range(2)):
        cta = replace(scheduler, coord=coord(m, n))
        work = arithmetic.current_work(cta, config, Word(0))
        tiles.add((int(work.m), int(work.column)))

    assert tiles == {(2, 128), (2, 192), (3, 128), (3, 192)}


# ---- variable tile N
def columns_of_tiles(
    arithmetic: SimpleNamespace, config: HopperConfig, N: int
) -> tuple[list[int], list[int]]:
    """First columns and widths of the tiles of one row, from the left to the right."""
    scheduler = launch(config, 1, N, 64)
    one_cluster = scheduler.params._replace(clusters=Word(1))
    scheduler = replace(scheduler, params=one_cluster)
    works = [
        arithmetic.current_work(scheduler, config, Word(step))
        for step in range(int(one_cluster.tiles))
    ]
    widths = [config.tile_widths[int(work.narrow)] for work in works]
    return [int(work.column) for work in works], widths


TILE_N = st.integers(3, 32).map(lambda granules: 8 * granules)


@settings(max_examples=60, deadline=None)
@given(tile_n=TILE_N, N=st.integers(1, 20_000))
def test_tiles_of_two_widths_lie_side_by_side(
    arithmetic: SimpleNamespace, tile_n: int, N: int
) -> None:
    """They end less than 8 columns beyond C, unless all tiles are narrow, and one tile fewer would
    not reach N.
    """
    config = replace(OWN_CONFIG, tile_n=tile_n, variable_tile_n=True, cluster_m=1)

    columns, widths = columns_of_tiles(arithmetic, config, N)

    assert len(columns) == tile_order.columns(config, N)
    assert set(widths) <= {tile_n, tile_n - 8}
    assert columns == [0, *itertools.accumulate(widths)][:-1]
    beyond = sum(widths) - N
    assert beyond >= 0
    if beyond >= 8:
        assert set(widths) == {tile_n - 8}
        assert (len(widths) - 1) * tile_n < N

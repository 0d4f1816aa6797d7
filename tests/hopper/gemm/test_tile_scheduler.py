"""Who computes what in hopper.gemm: its arithmetic on tiles, k tiles and partitions of K, on
Python's integers.
"""

from __future__ import annotations  # handed on by compile() to the scheduler's source

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tile_arithmetic import Word, coord, launch

from outblas.core import configs
from outblas.core.artifact import example
from outblas.hopper import gemm
from outblas.hopper.core import bounds, tile_order
from outblas.hopper.gemm import tile_scheduler

BF16 = torch.bfloat16
OWN = gemm.Config()
SMALL = (
    "tile_m=64,consumers=1,producer_registers=0,consumer_registers=0,epilogue_stages=1,"
    "stages=16,cluster_m=1"
)


def _checked(name: str) -> Any:
    compute = getattr(int, name)

    def operation(self, other: int) -> Word:
        found = compute(int(self), int(other))
        assert -(1 << 31) <= found < 1 << 31, f"{self} {name} {other} is {found}"
        return Word(found)

    return operation


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(Word, f"__{_name}__", _checked(f"__{_name}__"))
    setattr(Word, f"__r{_name}__", _checked(f"__r{_name}__"))


def all_work(arithmetic, scheduler, config):
    """(cluster, step, work tile) of a whole launch; CTAs that share a tile along K as its
    partitions.
    """
    found, params = [], scheduler.params
    for cluster, part in itertools.product(range(int(params.clusters)), range(config.cluster_k)):
        single = params.table and scheduler.single_wave
        one = replace(
            scheduler,
            cluster=Word(cluster),
            coord=coord(k=part),
            table_entry=params.table[cluster] if single else None,
        )
        for step in range(arithmetic.work_tile_count(one, config)):
            *place, partition = arithmetic.current_work(one, config, Word(step))
            m, column, narrow, matrix = map(int, place)
            partition = tile_scheduler.KPartition(*map(int, partition))
            if config.cluster_k > 1:
                partition = partition._replace(index=part, total=config.cluster_k)
            work = tile_scheduler.WorkTile(m, column, narrow, matrix, partition)
            found.append((cluster, step, work))
    return found


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_k_tile_of_every_tile_is_computed_once(arithmetic, data):
    draw = data.draw
    kind = draw(st.sampled_from(["whole", "split", "stream", "cluster"]))
    config = replace(
        OWN,
        tile_m=64,
        tile_n=draw(st.sampled_from([32, 64])),
        cluster_m=1,
        k_serpentine=False,
        variable_tile_n=kind != "cluster" and draw(st.booleans()),
        cluster_k=draw(st.sampled_from([2, 4])) if kind == "cluster" else 1,
        split_k=draw(st.integers(2, 7)) if kind == "split" else 1,
        stream_k=kind == "stream",
    )
    M, N, K = draw(st.integers(1, 600)), draw(st.integers(1, 400)), draw(st.integers(1, 900))
    batch, fit = draw(st.sampled_from([0, 1, 3])), draw(st.sampled_from([1, 2, 7, 16, 132]))
    rows, columns = tile_order.cluster_tiles(config, M, N)
    order = draw(
        st.sampled_from(["serpentine", "hilbert"] if rows * columns > fit else ["", "dealt"])
    )
    check(arithmetic, launch(config, M, N, K, batch, fit, order), config, rows, columns)


def check(arithmetic, scheduler, config, rows, columns):
    params = scheduler.params
    k_tiles, clusters = int(params.k_tiles), int(params.clusters)
    found = all_work(arithmetic, scheduler, config)
    tiles = {}
    for _, _, work in found:
        partition = work.partition
        assert partition.count > 0 or partition.total == 1 or k_tiles < config.cluster_k
        tiles.setdefault((work.matrix, work.m, work.column), []).append(work)
    assert len(tiles) == int(params.tiles)
    assert {m for _, m, _ in tiles} == set(range(rows))
    assert len({column for _, _, column in tiles}) == columns
    places = set()
    split_tiles = set()
    for works in tiles.values():
        works.sort(key=lambda work: work.partition.index)
        parts = [work.partition for work in works]
        first = parts[0]
        assert [part.index for part in parts] == list(range(first.total))
        assert len({work.narrow for work in works}) == 1
        assert len({(part.total, part.split_tile, part.workspace_index) for part in parts}) == 1
        ends = 0
        for part in parts:
            assert part.begin == ends
            ends += part.count
        assert ends == k_tiles
        if len(parts) > 1 and config.split:
            own = {first.workspace_index + part.index for part in parts}
            assert not own & places
            assert first.split_tile not in split_tiles
            places |= own
            split_tiles.add(first.split_tile)
    # The host's room for partial sums and counters.
    cut = int(params.tiles % params.clusters if config.stream_k else params.tiles)
    room = clusters + cut if config.stream_k else int(params.tiles * params.partitions)
    assert max(places, default=-1) < room
    assert max(split_tiles, default=-1) < max(cut, 1)
    steps = [sum(1 for cluster, _, _ in found if cluster == c) for c in range(clusters)]
    assert min(steps) >= 1
    if config.stream_k:
        counts = [
            sum(work.partition.count for cluster, _, work in found if cluster == c)
            for c in range(clusters)
        ]
        row = int(params.tiles % params.clusters * params.k_tiles)
        assert max(counts) - min(counts) <= 1 or row < clusters


@pytest.mark.parametrize(
    ("M", "N", "K", "tiles", "clusters"),
    [
        (64, 64, 64 * 3, 1, 3),  # fewer k tiles than clusters fit
        (128, 64, 64 * 5, 2, 10),
        (64 * 7, 64, 64, 7, 7),  # a k tile each
        (64 * 133, 64, 64, 133, 132),  # one tile of one k tile is left over
        (64 * 264, 64, 128, 264, 132),  # none is
    ],
)
def test_stream_k_with_few_k_tiles(arithmetic, M, N, K, tiles, clusters):
    config = configs.from_text(
        gemm.Config, f"{SMALL},tile_n=64,stages=8,k_serpentine=False,stream_k=True"
    )
    scheduler = launch(config, M, N, K)
    assert (scheduler.params.tiles, scheduler.params.clusters) == (tiles, clusters)
    check(arithmetic, scheduler, config, *tile_order.cluster_tiles(config, M, N))


def test_the_longest_row_of_k_tiles_is_numbered_in_32_bits(arithmetic):
    config = configs.from_text(
        gemm.Config, f"{SMALL},tile_n=64,stages=8,k_serpentine=False,stream_k=True"
    )
    M, K = 64 * 263, bounds.MOST_K_TILES * 64
    check(arithmetic, launch(config, M, 64, K), config, 263, 1)
    given = example(BF16, None, "nt", (M, 64, K))
    assert gemm.unsupported(given, config) is None
    assert "k tiles" in str(gemm.unsupported(replace(given, K=K + 1), config))


def test_ctas_of_a_cluster_have_neighbouring_tiles(arithmetic: Any) -> None:
    config = replace(OWN, tile_m=64, tile_n=64, cluster_m=2, cluster_n=2)
    scheduler = replace(launch(config, 256, 256, 64), cluster=Word(3))
    tiles = set()
    for m, n in itertools.product(range(2), range(2)):
        work = arithmetic.current_work(replace(scheduler, coord=coord(m, n)), config, Word(0))
        tiles.add((int(work.m), int(work.column)))
    assert tiles == {(m, column) for m in (2, 3) for column in (128, 192)}


@settings(max_examples=300, deadline=None)
@given(tile_n=st.integers(3, 32).map(lambda n: 8 * n), N=st.integers(1, 20_000))
def test_elastic_columns_cover_the_matrix(arithmetic: Any, tile_n: int, N: int) -> None:
    """In whole steps of 8, unless narrow ones are too wide, of which one fewer would not do."""
    config = replace(OWN, tile_n=tile_n, variable_tile_n=True, cluster_m=1)
    scheduler = launch(config, 1, N, 64)
    scheduler = replace(scheduler, params=scheduler.params._replace(clusters=Word(1)))
    tiles = [
        arithmetic.current_work(scheduler, config, Word(n))
        for n in range(int(scheduler.params.tiles))
    ]
    widths = [config.tile_widths[int(work.narrow)] for work in tiles]
    assert len(tiles) == tile_order.columns(config, N)
    assert set(widths) <= {tile_n, tile_n - 8}
    assert [int(work.column) for work in tiles] == [sum(widths[:n]) for n in range(len(widths))]
    over = sum(widths) - N
    assert over >= 0
    if over >= 8:
        assert set(widths) == {tile_n - 8}
        assert (len(widths) - 1) * tile_n < N

"""Tiles dealt out by where clusters run."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outblas.device import raster
from outblas.hopper import placement, schedule
from outblas.hopper.gemm import Config

DEVICE = torch.device("cuda", 0)


@given(rows=st.integers(1, 12), columns=st.integers(1, 11), gpcs=st.integers(1, 9), seed=st.integers(0, 1 << 16))
def test_every_gpc_has_a_run_of_tiles(rows: int, columns: int, gpcs: int, seed: int) -> None:
    tiles = raster.order("serpentine", rows, columns, placement.BAND)
    sms = random.Random(seed).sample(range(132), len(tiles))
    places = [(0, sm % gpcs, sm) for sm in sms]
    made = placement.dealt(tiles, places)
    assert sorted(made) == list(range(rows * columns))
    by_sm = [
        made[cluster] for cluster in sorted(range(len(sms)), key=lambda cluster: (sms[cluster] % gpcs, sms[cluster]))
    ]
    assert by_sm == tiles


def test_sms_that_clusters_connect_are_one_gpc() -> None:
    assert placement.joined(7, [[5, 3], [6, 5], [0, 1]]) == {0: 0, 1: 0, 2: 2, 3: 3, 4: 4, 5: 3, 6: 3}


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """What probes see, call by call, in place of a GPU: CTAs of a launch, then clusters of eight."""
    seen: list[list[int]] = []
    monkeypatch.setattr(placement, "_seen", lambda device, cluster, ctas, jitter: seen.pop(0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("", (), {"multi_processor_count": 20}))
    for cached in (placement.places, placement.gpcs, placement._table):
        cached.cache_clear()
        monkeypatch.setattr(placement, cached.__name__, cached)
    yield seen
    for cached in (placement.places, placement.gpcs, placement._table):
        cached.cache_clear()


def test_parts_of_a_gpc_that_no_cluster_had_lie_together(board: list[list[int]]) -> None:
    board += [[9, 0, 19, 17, 8, 18], [*range(8), *range(8, 16)]]
    assert placement.places(DEVICE, 1, 6) == [
        (8, 8, 9), (8, 0, 0), (1, 19, 19), (1, 17, 17), (8, 8, 8), (1, 18, 18),
    ]  # fmt: skip


def test_a_launch_that_other_work_disturbs_keeps_its_order(
    board: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    board += [[0, 0, 1, 2]] * placement.TRIES
    monkeypatch.setattr(schedule, "kept", lambda order, device: list(order))
    monkeypatch.setattr(schedule, "refuse_capture", lambda: None)
    assert placement.table(Config(cluster_m=1), 2, 2, DEVICE) == raster.order("serpentine", 2, 2, placement.BAND)
    assert not board


@pytest.mark.gpu
def test_probes_see_every_sm_once() -> None:
    count = torch.cuda.get_device_properties(0).multi_processor_count
    homes = placement.gpcs(DEVICE)
    assert sorted(homes) == list(range(count))
    assert 8 <= max(Counter(homes.values()).values()) <= 18
    places = placement.places(DEVICE, 2, count // 2)
    assert places is not None
    assert {sm // 2 for *_, sm in places} == set(range(count // 2))
    tiles = placement.table(Config(cluster_m=2), 8, 8, DEVICE)
    assert sorted(tiles.tolist()) == list(range(64))

"""How many clusters a persistent launch has, and the tables in which it finds the order of its
tiles.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch

from outblas.hopper.parts import tile_order


@pytest.mark.parametrize(
    ("tiles", "clusters"),
    [
        pytest.param(1, 66, id="one tile"),
        pytest.param(66, 66, id="one whole wave"),
        pytest.param(256, 64, id="four waves of 64"),
        pytest.param(1024, 64, id="sixteen waves of 64"),
        pytest.param(67, 66, id="one tile over would halve them"),
        pytest.param(260, 65, id="four waves of 65"),
    ],
)
def test_clusters_that_would_idle_in_the_last_wave_are_left_out(tiles: int, clusters: int) -> None:
    assert tile_order.balance_waves(66, tiles) == clusters


def test_leaving_clusters_out_costs_no_wave_and_at_most_one_cluster_in_16() -> None:
    for clusters, tiles in itertools.product(range(1, 140), range(1, 600)):
        launched = tile_order.balance_waves(clusters, tiles)

        case = f"{launched} of {clusters} clusters for {tiles} tiles"
        assert 15 * clusters <= 16 * launched <= 16 * clusters, case
        assert -(-tiles // launched) == -(-tiles // clusters), case


@pytest.mark.parametrize(
    ("sms", "cluster", "expected"),
    [(0, 1, 132), (0, 2, 66), (100, 2, 50), (0, 4, 28), (0, 8, 14), (100, 4, 21), (2, 8, 1)],
)
def test_a_launch_has_the_clusters_that_run_at_once(
    sms: int, cluster: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four or eight CTAs, fewer than the SMs have room for: a GPC has no multiple of them."""
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    assert tile_order.clusters(torch.device("cuda", 7), sms, cluster) == expected


def test_a_table_is_kept_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table that stands for a failed probe is not in the way of the right one."""
    monkeypatch.setattr(tile_order.driver, "for_good", lambda device, make: make())
    monkeypatch.setattr(tile_order, "_kept", {})
    cpu = torch.device("cpu")

    by_columns = tile_order.kept(cpu, ("tiles", 0, 1, 2), lambda: [0, 1, 2])
    by_gpcs = tile_order.kept(cpu, ("tiles", 2, 1, 0), lambda: [2, 1, 0])
    again = tile_order.kept(cpu, ("tiles", 0, 1, 2), lambda: pytest.fail("made twice"))

    assert by_columns.tolist() == [0, 1, 2]
    assert by_gpcs.tolist() == [2, 1, 0]
    assert again is by_columns

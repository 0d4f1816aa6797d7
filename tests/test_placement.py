"""Tiles dealt out by where clusters run."""

import random
from collections import Counter

import pytest
import torch

from outblas.device import raster
from outblas.hopper import placement, schedule
from outblas.hopper.gemm import Config

DEVICE = torch.device("cuda", 0)


def panels(tiles, columns, gpc):
    """Rows and columns of tiles that GPCs ask L2 for, each GPC for its own."""
    of = list(zip(tiles, gpc, strict=True))
    return len({(home, tile // columns) for tile, home in of}) + len({(home, tile % columns) for tile, home in of})


def test_a_gpc_asks_for_as_little_as_it_can():
    sms = random.Random(0).sample(range(128), 128)  # which SM has which cluster
    gpc = [sm % 8 for sm in sms]
    order = raster.order("serpentine", 16, 8, placement.BAND)
    made = placement.dealt(order, list(zip(gpc, sms, strict=True)))
    assert sorted(made) == sorted(order)
    assert panels(made, 8, gpc) == 8 * (4 + 4)
    assert panels(raster.order("column", 16, 8), 8, gpc) > 2 * 8 * (4 + 4)


def test_sms_that_clusters_connect_are_one_gpc():
    assert placement.joined([[5, 3], [6, 5], [0, 30]]) == {0: 0, 3: 3, 5: 3, 6: 3, 30: 0}


@pytest.fixture
def board(monkeypatch):
    """What probes see, call by call, in place of a GPU."""
    seen = []
    monkeypatch.setattr(placement, "_seen", lambda device, cluster, ctas, jitter: seen.pop(0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("", (), {"multi_processor_count": 20}))
    monkeypatch.setattr(placement.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(schedule, "kept", lambda device, key, order: order())
    placement.places.cache_clear()
    placement.gpcs.cache_clear()
    yield seen
    placement.places.cache_clear()
    placement.gpcs.cache_clear()


def test_sms_that_no_cluster_had_cut_no_gpc(board):
    sms = [9, 0, 19, 17, 8, 30]
    board += [sms, sms, [*range(8), *range(8, 16)]]
    found = placement.places(DEVICE, 1, 6)
    assert [sm for *_, sm in sorted(found)] == [17, 19, 30, 0, 8, 9]
    assert [home for _, home, _ in sorted(found)][3:] == [0, 8, 8]


def test_a_probe_that_was_disturbed_is_made_again(board):
    board += [[0, 0, 1, 2], [3, 0, 1, 2], [3, 0, 1, 2], [0, 3, 1, 2], [3, 2, 1, 0], [3, 2, 1, 0], [*range(8)]]
    assert [sm for *_, sm in placement.places(DEVICE, 1, 4)] == [3, 2, 1, 0]


def test_where_probes_never_agree_tiles_go_as_they_come(board):
    board += [[0, 0, 1, 2, 3, 4]] * 2 * placement.TRIES
    with pytest.warns(RuntimeWarning, match="tiles are dealt out to SMs as they come"):
        assert placement.table(Config(cluster_m=1), 2, 3, DEVICE) == raster.order("column", 2, 3)
    assert not board


@pytest.mark.gpu
@pytest.mark.sm90
def test_probes_see_gpcs_and_every_sm_once():
    count = torch.cuda.get_device_properties(0).multi_processor_count
    sizes = Counter(placement.gpcs(DEVICE).values())
    assert sum(size for size in sizes.values() if 12 <= size <= 18) >= 0.8 * count
    assert {sm // 2 for *_, sm in placement.places(DEVICE, 2, count // 2)} == set(range(count // 2))
    assert sorted(placement.table(Config(cluster_m=2), 8, 8, DEVICE).tolist()) == list(range(64))

"""What the cost model says of waves, of tiles along K, and of what an SM holds."""

from dataclasses import replace

from support.spaces import FOOTPRINT, H100

from outblas.autotune.search import cost_model
from outblas.autotune.store.records import Workload


def tiles(count: int, K: int = 4096) -> Workload:
    """A product of so many tiles in a row."""
    return Workload(128, 128 * count, K)


def test_a_tile_beyond_a_wave_costs_another() -> None:
    one_wave = cost_model.predict(FOOTPRINT, Workload(12 * 128, 11 * 128, 4096), H100).us
    two_waves = cost_model.predict(FOOTPRINT, Workload(12 * 128, 12 * 128, 4096), H100).us

    assert two_waves > 1.6 * one_wave


def test_ctas_that_share_k_have_a_part_of_it_each() -> None:
    alone = cost_model.predict(FOOTPRINT, tiles(16, K=65536), H100).us
    shared = cost_model.predict(replace(FOOTPRINT, cluster_k=4), tiles(16, K=65536), H100).us

    assert shared < alone / 2


def test_partial_sums_take_time_to_combine() -> None:
    """Two calls of as many k tiles a CTA, of which one cuts them in half."""
    whole = cost_model.predict(FOOTPRINT, Workload(1024, 1024, 4096), H100).us
    cut = cost_model.predict(replace(FOOTPRINT, split_k=2), Workload(1024, 1024, 8192), H100).us

    cycles = cost_model.COMBINE + 3 * FOOTPRINT.tile_m * FOOTPRINT.tile_n * 4 / cost_model.SUMS
    assert cut > whole + 0.9 * cycles / H100.boost_mhz


def test_what_l2_does_not_hold_comes_at_the_rate_of_dram() -> None:
    """A product of one row of tiles, whose time is that of reading B."""
    workload = Workload(128, 65536, 8192)
    size = 2 * workload.N * workload.K

    assert cost_model.predict(FOOTPRINT, workload, H100).us > size / H100.dram_gbs / 1e3

"""What holds of the cost model for all kernels, machines and shapes: what cannot be faster, and
what takes in proportion; and what it says of waves and of what an SM holds.
"""

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from support.spaces import (
    FOOTPRINT,
    H100,
    NAMES,
    SHAPES,
    precisions,
    runs_on,
    some,
    space,
    valid,
    workload,
)

from outblas.autotune.search import cost_model
from outblas.autotune.store.records import Workload
from outblas.base.machines import Machine
from outblas.base.space import Footprint
from outblas.hopper import gemm

ALL_SHAPES = (
    *SHAPES,
    (1, 1, 1),
    (1, 16384, 1),
    (4096, 1, 4096),
    (8192, 8192, 1024),
    (16384, 16384, 16384),
)
Sample = tuple[Footprint, Workload, Machine]


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """A config of each kernel, on each machine that it runs on, at each shape, and configs of
    `hopper.gemm` whose CTAs share tiles, where such are tried.
    """
    dice = random.Random(0)
    found = []
    for name in NAMES:
        for machine in runs_on(name):
            asked = workload(name, dtype=precisions(name, machine)[0])
            tried = space(name, asked, machine)
            configs = some(name, tried, 6)
            for shape in ALL_SHAPES:
                at = workload(name, shape, asked.dtype)
                found.append((tried.footprint(dice.choice(configs)), at, machine))
    assert len(found) > 500
    for shape in (*SHAPES[:2], (512, 512, 512), (128, 512, 8192)):
        asked = Workload(*shape)
        tried = space("hopper.gemm", asked)
        split = [config for config in valid(tried) if config.split][::20]
        found += [(tried.footprint(config), asked, H100) for config in split]
    assert any(f.split_k > 1 for f, _, _ in found)
    assert any(f.stream_k for f, _, _ in found)
    return found


def us(f: Footprint, asked: Workload, machine: Machine) -> float:
    return cost_model.predict(f, asked, machine).us


def test_a_prediction_is_a_time_that_a_machine_can_reach(samples: list[Sample]) -> None:
    for f, asked, machine in samples:
        peak = max(machine.flops_per_sm_clock.values()) * machine.sms * machine.boost_mhz
        least = max(cost_model.LAUNCH_US, 2 * math.prod(asked.shape) / peak)
        assert least <= us(f, asked, machine) < math.inf, (f, asked, machine.name)


def test_a_prediction_has_waves_and_shares(samples: list[Sample]) -> None:
    for f, asked, machine in samples:
        found = cost_model.predict(f, asked, machine)
        assert 0 < found.waves < math.inf
        assert 0 < found.wave_efficiency <= 1
        shares = (found.tensor, found.l2, found.latency, found.store)
        assert all(0 <= share <= 1 for share in shares)
        assert "waves" in found.limits


def test_fewer_stages_are_never_faster(samples: list[Sample]) -> None:
    for f, asked, machine in samples:
        times = [us(replace(f, stages=stages), asked, machine) for stages in (1, 2, 3, 4, 6, 8)]
        assert all(fewer >= more * (1 - 1e-12) for fewer, more in itertools.pairwise(times)), times


def test_rows_inside_of_lines_are_never_faster(samples: list[Sample]) -> None:
    for f, asked, machine in samples:
        whole, one, both = (
            us(replace(f, cache_lines=lines), asked, machine) for lines in ((1, 1), (1, 2), (2, 2))
        )
        assert whole <= one <= both, (f, asked, machine.name)


def test_a_larger_gpu_is_never_slower(samples: list[Sample]) -> None:
    """With SMs, L2 and memory in proportion: SMs alone would share the same L2. Kernels without a
    pipeline are allowed a little, as fewer CTAs of an SM cover each other's waits then.
    """
    for f, asked, machine in samples:
        doubled: dict[str, Any] = {
            name: 2 * getattr(machine, name) for name in ("sms", "l2_bytes_per_clock", "dram_gbs")
        }
        allowed = 1.2 if f.stages == 1 else 1 + 1e-12
        larger = us(f, asked, replace(machine, **doubled))
        assert larger <= us(f, asked, machine) * allowed, (f, asked, machine.name)


@pytest.mark.parametrize(("size", "inside"), [(2048, False), (2056, True)])
def test_clusters_pay_where_rows_begin_inside_of_lines(size: int, inside: bool) -> None:
    """H100: 2048 takes 25.6 µs without clusters and 26.6 with; 2048 x 2048 x 2056 takes 35.5 and
    26.1.
    """
    asked = Workload(2048, 2048, size)
    found = space("hopper.gemm", asked)

    alone, pairs = (us(found.footprint(gemm.Config(cluster_m=m)), asked, H100) for m in (1, 2))

    assert (pairs < alone) is inside


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        pytest.param({"shared_memory": 100 << 10, "registers": 64}, 2, id="by shared memory"),
        pytest.param({"shared_memory": 228 << 10}, 0, id="more shared memory than a CTA may have"),
        pytest.param({"shared_memory": 0, "threads": 256, "registers": 128}, 2, id="by registers"),
        pytest.param({"shared_memory": 0, "threads": 1024, "registers": 16}, 2, id="by threads"),
        pytest.param({"persistent": True}, 1, id="persistent"),
        pytest.param({"shared_memory": 0, "registers": 16, "threads": 32}, 32, id="by CTAs"),
    ],
)
def test_resident_ctas(changes: dict[str, Any], count: int) -> None:
    footprint = replace(FOOTPRINT, **{"persistent": False} | changes)

    assert cost_model.resident(footprint, H100) == count


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

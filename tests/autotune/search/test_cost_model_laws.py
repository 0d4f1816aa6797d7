"""What holds of the cost model for all kernels, machines and shapes: what cannot be faster, and
what takes in proportion.
"""

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from support import faulty_kernel
from support.spaces import (
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
        pytest.param({"shared_memory": 100 << 10}, 2, id="by shared memory"),
        pytest.param({"shared_memory": 228 << 10}, 0, id="more shared memory than a CTA may have"),
        pytest.param({"shared_memory": 0, "threads": 256, "registers": 128}, 2, id="by registers"),
        pytest.param({"shared_memory": 0, "threads": 1024, "registers": 16}, 2, id="by threads"),
        pytest.param({"persistent": True}, 1, id="persistent"),
        pytest.param({"shared_memory": 0, "registers": 16, "threads": 32}, 32, id="by CTAs"),
    ],
)
def test_resident_ctas(changes: dict[str, Any], count: int) -> None:
    footprint = replace(faulty_kernel.footprint(faulty_kernel.Config()), **changes)

    assert cost_model.resident(footprint, H100) == count

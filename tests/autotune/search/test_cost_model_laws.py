"""What holds of the cost model for all kernels, machines and shapes: what cannot be faster, and
what takes in proportion.
"""

import functools
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
    SQUARE,
    precisions,
    runs_on,
    some,
    space,
    valid,
    workload,
)

from outblas.autotune.search import cost_model, rank
from outblas.autotune.store.records import Workload
from outblas.core.machines import Machine
from outblas.core.space import Footprint
from outblas.hopper import gemm, hilbert
from outblas.kernels import portable_config

ALL_SHAPES = (
    *SHAPES,
    (1, 1, 1),
    (1, 16384, 1),
    (4096, 1, 4096),
    (8192, 8192, 1024),
    (16384, 16384, 16384),
)
Sample = tuple[Footprint, Workload, Machine]


@functools.cache
def sampled(count: int) -> list[Sample]:
    """So many configs of each kernel, on each machine, at each shape."""
    dice = random.Random(0)
    found = []
    for name in NAMES:
        for machine in runs_on(name):
            asked = workload(name, dtype=precisions(name, machine)[0])
            tried = space(name, asked, machine)
            configs = some(name, tried, 12)
            for shape in ALL_SHAPES:
                at = workload(name, shape, asked.dtype)
                for config in dice.sample(configs, min(count, len(configs))):
                    found.append((tried.footprint(config), at, machine))
    return found


@functools.cache
def cut(of_so_many: int) -> list[Sample]:
    """One of so many configs whose CTAs share tiles, where such are tried."""
    found = []
    for shape in (*SHAPES[:2], (512, 512, 512), (128, 512, 8192)):
        asked = Workload(*shape)
        tried = space("hopper.gemm", asked)
        configs = [config for config in valid(tried) if config.split]
        found += [(tried.footprint(config), asked, H100) for config in configs[::of_so_many]]
    assert any(f.split_k > 1 for f, _, _ in found)
    assert any(f.stream_k for f, _, _ in found)
    return found


# `pytest -m slow` takes twice as many.
FEW, MANY = pytest.param((1, 20), id="few"), pytest.param((2, 5), id="many", marks=pytest.mark.slow)


@pytest.fixture(params=[FEW, MANY])
def samples(request: pytest.FixtureRequest) -> list[Sample]:
    """Configs of all kernels, on all machines that they run on, at all shapes."""
    count, _ = request.param
    found = sampled(count)
    assert len(found) > 500 * count
    return found


@pytest.fixture(params=[FEW, MANY])
def samples_and_cut(request: pytest.FixtureRequest) -> list[Sample]:
    """The same, and configs of `hopper.gemm` whose CTAs share tiles."""
    count, of_so_many = request.param
    return sampled(count) + cut(of_so_many)


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
        assert found.wave_efficiency == cost_model.wave_efficiency(f, asked, machine)
        shares = (found.tensor, found.l2, found.latency, found.store)
        assert all(0 <= share <= 1 for share in shares)
        assert "waves" in found.limits


def without_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on pieces of K are combined in no time."""
    monkeypatch.setattr(cost_model, "COMBINE", 0.0)
    monkeypatch.setattr(cost_model, "SUMS", math.inf)


def test_half_the_terms_take_about_half_the_time(
    samples_and_cut: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what does not depend on K, for what combines pieces of K, and where L2 holds all
    operands of the smaller call.
    """
    without_sums(monkeypatch)

    for f, asked, machine in samples_and_cut:
        machine = replace(machine, l2_bytes=0)
        long, half, quarter = (
            us(f, replace(asked, K=K), machine) for K in (1 << 18, 1 << 17, 1 << 16)
        )
        assert 1.9 < (long - half) / (half - quarter) < 2.1, (f, asked, machine.name)


def test_combining_takes_as_long_for_any_number_of_terms(
    samples_and_cut: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where DRAM is not what takes the time. Nothing where no CTAs share a tile."""
    cases = [
        (f, replace(asked, K=K), replace(machine, dram_gbs=1e12))
        for f, asked, machine in samples_and_cut
        for K in (65536, 32768)
    ]
    whole = [us(*case) for case in cases]
    without_sums(monkeypatch)

    taken = [time - us(*case) for time, case in zip(whole, cases, strict=True)]

    for (f, _, _), long, half in zip(cases[::2], taken[::2], taken[1::2], strict=True):
        assert long == pytest.approx(half, abs=1e-6)
        assert (long > 0.1) if f.split_k > 1 or f.stream_k else long == 0


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


@pytest.mark.parametrize(("size", "lines"), [(2048, (1, 1)), (2056, (2, 2))])
def test_a_row_that_begins_inside_of_a_line_takes_two(size: int, lines: tuple[int, int]) -> None:
    asked = Workload(2048, 2048, size)

    assert space("hopper.gemm", asked).footprint(gemm.Config()).cache_lines == lines
    own = portable_config.PortableConfig()
    assert space("portable", asked).footprint(own).cache_lines == lines


@pytest.mark.parametrize(
    ("tile_n", "variable", "layout", "lines"),
    [
        pytest.param(128, False, "nn", (1, 1), id="boxes of 64 columns"),
        pytest.param(96, False, "nn", (1, 2), id="boxes of 32 columns"),
        pytest.param(48, False, "nn", (1, 4), id="boxes of 16 columns"),
        pytest.param(136, True, "nn", (1, 4), id="stages rounded up to 144 columns"),
        pytest.param(48, False, "nt", (1, 1), id="columns along K"),
    ],
)
def test_short_boxes_of_contiguous_columns_request_lines_again(
    tile_n: int, variable: bool, layout: str, lines: tuple[int, int]
) -> None:
    found = space("hopper.gemm", Workload(2048, 2048, 2048, layout=layout))
    config = gemm.Config(
        tile_m=64, consumers=1, cluster_m=1, tile_n=tile_n, variable_tile_n=variable
    )
    flipped = {"nn": "tt"}.get(layout, "nt")
    exchanged = space("hopper.gemm", Workload(2048, 2048, 2048, layout=flipped))

    assert found.footprint(config).cache_lines == lines
    assert exchanged.footprint(replace(config, swap_ab=True)).cache_lines == lines[::-1]


def test_clusters_take_no_more_from_l2() -> None:
    """Where L2 is all that counts, and both kinds of cluster fill the GPU alike."""
    found = space("hopper.hilbert")
    starved = replace(H100, l2_bytes_per_clock=8, sms=128)
    alone = [
        found.footprint(config)
        for config in some("hopper.hilbert", found, 300)
        if config.cluster == 1 and 4096 % (2 * config.tile_m) == 4096 % (2 * config.tile_n) == 0
    ]

    assert len(alone) > 10
    for f in alone:
        for cluster in (replace(f, cluster_m=2), replace(f, cluster_n=2)):
            assert us(cluster, SQUARE, starved) < us(f, SQUARE, starved), f


def test_a_config_that_leaves_sms_idle_is_slower() -> None:
    f = space("hopper.hilbert").footprint(hilbert.Config())

    assert us(replace(f, sms=64), SQUARE, H100) > 1.5 * us(f, SQUARE, H100)


def test_a_config_that_issues_at_half_the_rate_is_slower() -> None:
    f = space("hopper.hilbert").footprint(hilbert.Config())

    assert us(replace(f, issue=0.5), SQUARE, H100) > us(f, SQUARE, H100)


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


def test_predictions_that_are_all_equal_have_no_order() -> None:
    with pytest.raises(ValueError, match=r"predicted has 1\.0 only, expected values that differ"):
        rank.spearman([1.0, 1.0], [1.0, 2.0])

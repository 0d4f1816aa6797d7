"""The analytic model for grouped products: tiles of each group, one wave after another, beside
what DRAM has to move.

Its constants are those of `cost_model`, and of the rule of `hopper.grouped`; no sweep of groups was
fitted.
"""

import math
from dataclasses import dataclass

from ...core.grouped_shapes import GroupedWorkload
from ...core.machines import Machine
from ...core.space import Footprint
from ..store.records import Workload
from .cost_model import (
    DRAM_SHARE,
    DRAM_SHARPNESS,
    L2_PORT,
    LAUNCH_US,
    PROLOGUE,
    SHARPNESS,
    STORE,
    Prediction,
)

BETWEEN = 1500.0  # cycles between two tiles of a CTA: finding a group, first load, last store
L2_RATE = 0.5  # of a port of L2, while all SMs load


@dataclass(frozen=True)
class _Tiles:
    """The tiles of all groups. `steps`: the k tiles of all CTAs' tiles together."""

    count: int
    steps: int


def _tiles(f: Footprint, groups: GroupedWorkload) -> _Tiles:
    """Groups begin a tile each. CTAs of a cluster count, whether they have rows or not."""
    M, N, K = groups.shape
    of_cluster = f.cluster_m * f.cluster_n
    columns = math.ceil(N / (f.tile_n * f.cluster_n)) * of_cluster
    rows = f.tile_m * f.cluster_m
    if groups.form == "rows":
        count = columns * sum(math.ceil(size / rows) for size in groups.sizes)
        return _Tiles(count, count * math.ceil(K / f.tile_k))
    of_group = columns * math.ceil(M / rows)
    steps = sum(math.ceil(size / f.tile_k) for size in groups.sizes)
    return _Tiles(of_group * groups.experts, of_group * steps)


def efficiency(f: Footprint, workload: Workload, machine: Machine) -> float:
    """Returns the products that are needed, divided by those that all SMs could compute in as many
    waves.
    """
    tiles = _tiles(f, _grouped(workload))
    waves = math.ceil(tiles.count / machine.sms)
    depth = tiles.steps / tiles.count * f.tile_k
    computed = waves * machine.sms * f.tile_m * f.tile_n * depth
    return math.prod(workload.shape) / computed


def predict(f: Footprint, workload: Workload, machine: Machine) -> Prediction:
    """Predicts the time of a call, and what limits it."""
    groups = _grouped(workload)
    tiles = _tiles(f, groups)
    waves = tiles.count / machine.sms
    flops = machine.flops_per_sm_clock[workload.dtype]
    products = 2.0 * f.tile_m * f.tile_n * f.tile_k / flops
    loads = 2 * f.tile_k * (f.tile_m / f.cluster_n + f.tile_n / f.cluster_m)
    from_l2 = loads / (L2_PORT * L2_RATE)
    step = (products**SHARPNESS + from_l2**SHARPNESS) ** (1 / SHARPNESS)

    out_bytes = 4 if workload.out_dtype == "float32" else 2
    store = f.tile_m * f.tile_n * out_bytes / (STORE[f.store] * max(1, f.groups))
    steps = tiles.steps / tiles.count
    tile = steps * step + max(BETWEEN, store)
    cycles = PROLOGUE + math.ceil(waves) * tile
    on_sms = cycles / machine.boost_mhz
    on_dram = _bytes_moved(groups, out_bytes) / (DRAM_SHARE * machine.dram_gbs * 1e3)
    us = LAUNCH_US + (on_sms**DRAM_SHARPNESS + on_dram**DRAM_SHARPNESS) ** (1 / DRAM_SHARPNESS)
    return Prediction(
        us=us,
        waves=waves,
        wave_efficiency=efficiency(f, workload, machine),
        tensor=products / step,
        l2=from_l2 / step,
        latency=0.0,
        store=store / tile,
    )


def _bytes_moved(groups: GroupedWorkload, out_bytes: int) -> float:
    """The bytes of 16-bit operands, without weights of groups that have no rows, and the result."""
    weights = groups.K * groups.N
    if groups.form == "terms":
        return 2 * groups.rows * (groups.K + groups.N) + out_bytes * groups.experts * weights
    in_use = sum(size > 0 for size in groups.sizes)
    return 2 * (groups.rows * groups.K + in_use * weights) + out_bytes * groups.rows * groups.N


def _grouped(workload: Workload) -> GroupedWorkload:
    found = workload.grouped
    assert found is not None, "`candidates.prediction` chooses workloads of groups"
    return found

"""The configs of hopper.grouped that a sweep would try, and what the model predicts of them. No GPU
needed.
"""

from dataclasses import replace
from functools import cache

import pytest

from outblas.autotune.search import cost_model, gpu, prune
from outblas.autotune.search.candidates import Candidate
from outblas.autotune.search.plan import plan
from outblas.autotune.search.prune import Plan
from outblas.autotune.search.target import HOPPER_GROUPED
from outblas.autotune.store.records import Workload
from outblas.base.grouped_shapes import GroupedWorkload, parse
from outblas.hopper.gemm import group_host as host
from outblas.hopper.gemm import heuristic

H100 = gpu.imagined("h100")


def workload(groups: GroupedWorkload) -> Workload:
    layout = "nt" if groups.form == "rows" else "tn"
    return Workload(*groups.shape, layout=layout, grouping=str(groups.grouping))


@cache
def planned(groups: GroupedWorkload) -> Plan:
    return plan([HOPPER_GROUPED], workload(groups), H100)


WORKLOADS = parse("moe:4096:zipf,moe:65536:terms,8x1x64x64")
MIXTRAL = GroupedWorkload(8, 65536, 28672, 4096)


def of_tile(ranked: Plan, tile_m: int, tile_n: int) -> Candidate:
    """A config of this tile and without clusters."""
    return next(
        candidate
        for candidate in ranked.ranked
        if (f := candidate.footprint) and (f.tile_m, f.tile_n) == (tile_m, tile_n)
        if (f.cluster_m, f.cluster_n) == (1, 1)
    )


@pytest.mark.parametrize("groups", WORKLOADS, ids=str)
def test_the_rules_config_is_tried(groups: GroupedWorkload) -> None:
    (own,) = [each for each in planned(groups).ranked if each.own]

    problem, machine = prune.grouped_problem(workload(groups)), gpu.machine(H100)
    assert machine is not None
    assert own.config == host.config_for(problem, heuristic.rates(machine))


def test_tiles_clusters_and_stages_are_axes() -> None:
    found = planned(MIXTRAL).ranked

    assert {each.footprint.tile_m for each in found} == {64, 128, 192, 256}
    assert {(each.footprint.cluster_m, each.footprint.cluster_n) for each in found} == {
        (1, 1),
        (2, 1),
        (1, 2),
    }
    stages = {each.footprint.stages for each in found if each.footprint.tile_m == 128}
    assert len(stages) > 2


def test_tiles_are_not_wider_than_a_group() -> None:
    found = planned(GroupedWorkload(8, 512, 136, 512)).ranked

    assert {each.footprint.tile_n for each in found if not each.own} == {64, 128}


def test_a_product_is_none_of_its_workloads() -> None:
    with pytest.raises(ValueError, match=r"'hopper\.grouped' multiplies groups, but was given one"):
        plan([HOPPER_GROUPED], Workload(64, 64, 64), H100)


# ---- the model
def predicted(groups: GroupedWorkload, tile_m: int = 128, tile_n: int = 256) -> float:
    footprint, machine = of_tile(planned(MIXTRAL), tile_m, tile_n).footprint, gpu.machine(H100)
    assert machine is not None
    return cost_model.predict(footprint, workload(groups), machine).us


def test_twice_the_rows_take_nearly_twice_as_long_where_products_bound() -> None:
    half = predicted(replace(MIXTRAL, rows=32768))

    assert predicted(MIXTRAL) == pytest.approx(2 * half, rel=0.05)


def test_skew_costs_time_where_a_tile_ends_with_a_group() -> None:
    even = GroupedWorkload(128, 128 * 128, 1536, 2048)

    assert predicted(replace(even, distribution="zipf")) > predicted(even)


def test_groups_without_rows_are_not_loaded() -> None:
    all_of_them = GroupedWorkload(256, 256, 4096, 7168)

    assert predicted(replace(all_of_them, distribution="zipf")) < 0.9 * predicted(all_of_them)

"""The configs that a sweep of hopper.grouped tries, on the model of the kernels' protocols."""

from dataclasses import replace
from functools import cache

import pytest
from protocol.fault import ProtocolFault
from protocol.grouped import GroupedCase, simulate_grouped

from outblas.autotune.search import gpu, grouped_kernel, prune
from outblas.autotune.search.plan import plan
from outblas.autotune.search.target import HOPPER_GROUPED
from outblas.autotune.store.records import Workload
from outblas.hopper.parts.config import HopperConfig

ENDS = (0, 130, 130, 400)
SEEDS = range(2)


@cache
def tried() -> dict[str, HopperConfig]:
    """A config for each tile height, cluster and width of the space."""
    workload = Workload(4096, 4096, 4096, grouping="8")
    found: dict[str, HopperConfig] = {}
    for candidate in plan([HOPPER_GROUPED], workload, gpu.imagined("h100")).ranked:
        c = candidate.config
        found.setdefault(f"{c.tile_m}x{c.tile_n} {c.cluster_m}x{c.cluster_n}", c)
    return found


@pytest.mark.parametrize("form", ["ragged_m", "ragged_k"])
@pytest.mark.parametrize("name", sorted(tried()))
def test_every_group_gets_its_product(name: str, form: str) -> None:
    config = tried()[name]
    columns = 2 * config.tile_n * config.cluster_n
    case = GroupedCase(config, form, ENDS, 512, columns, 3, M=2 * config.tile_m)
    if form == "ragged_m":
        case = replace(case, M=0, K=6 * config.tile_k)
    for seed in SEEDS:
        try:
            simulate_grouped(case, seed)
        except ProtocolFault as fault:
            pytest.fail(f"{fault}\nseed {seed}, {case}")


def test_tiles_whose_terms_the_consumers_cannot_divide_are_not_tried() -> None:
    """Three consumers have 384 threads, which divide 64 terms of 192 columns, but not of 64."""
    config = next(c for c in tried().values() if (c.tile_m, c.tile_n) == (192, 192))
    terms = prune.grouped_problem(Workload(4096, 4096, 4096, grouping="8:terms", layout="tn"))
    rows = prune.grouped_problem(Workload(4096, 4096, 4096, grouping="8"))

    for tile_n, is_tried in ((192, True), (128, False), (64, False)):
        narrow = replace(config, tile_n=tile_n)
        reason = grouped_kernel.unsupported(terms, narrow)
        assert (reason is None) == is_tried, reason
        assert grouped_kernel.unsupported(rows, narrow) is None

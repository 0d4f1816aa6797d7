"""Configs that no search and no rule may give: those that do not fit, and those that cannot pay."""

from dataclasses import replace

import pytest
import torch

from outblas.base import machines
from outblas.core.artifact import example
from outblas.core.epilogue import Epilogue
from outblas.hopper import gemm
from outblas.hopper.gemm import heuristic, rule_tiles, search_space
from outblas.hopper.parts.config import SHARED_MEMORY
from outblas.hopper.parts.config_limits import gated_reason, invalid_reason, promoted_reason

H100 = machines.find("H100")
CONFIG = replace(gemm.Config(), cluster_m=1)
SHAPES = [(64, 4096, 4096), (1000, 1000, 512), (2048, 1280, 1280), (4096, 4096, 4096)]


def product(M: int, N: int, K: int):
    """A packed product."""
    return example(torch.bfloat16, None, "nt", (M, N, K))


def test_no_config_takes_more_shared_memory_than_there_is() -> None:
    config = rule_tiles.filled(replace(CONFIG, tile_n=128))
    more = replace(config, stages=config.stages + 1)

    assert config.shared_memory_bytes <= SHARED_MEMORY < more.shared_memory_bytes
    assert invalid_reason(config) is None
    assert "bytes of shared memory" in str(invalid_reason(more))


def test_no_tile_is_tried_whose_accumulators_spill() -> None:
    problem = product(4096, 4096, 4096)
    wide, wider = (
        rule_tiles.filled(replace(CONFIG, tile_m=256, tile_n=n, consumers=2)) for n in (192, 224)
    )

    assert "spill" not in str(search_space.pruned_reason(wide, H100, problem))
    assert "spill" in str(search_space.pruned_reason(wider, H100, problem))


@pytest.mark.parametrize(("size", "pays"), [(256, True), (4096, False)])
def test_k_is_cut_only_where_tiles_leave_sms_idle(size: int, pays: bool) -> None:
    config = rule_tiles.filled(replace(CONFIG, tile_n=128, split_k=16, k_serpentine=False))

    reason = search_space.pruned_reason(config, H100, product(size, size, 16384))

    assert (reason is None) == pays, reason


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_rule_gives_gated_products_tiles_that_hold_pairs(shape) -> None:
    M, N, K = shape
    gated = replace(product(M, N // 2, K), epilogue=Epilogue("silu", gated=True))
    packed = product(M, N, K)
    gated = replace(gated, b=packed.b)

    assert gated_reason(heuristic.config(gated, heuristic.Rates())) is None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_rule_gives_promoted_sums_tiles_whose_registers_fit(shape) -> None:
    problem = replace(product(*shape), formats="e4m3 e4m3 promoted")

    assert promoted_reason(heuristic.config(problem, heuristic.Rates())) is None

"""Configs that no search tries, because they cannot pay."""

from dataclasses import replace

import pytest
import torch

from outblas.base import machines
from outblas.call.artifact import example
from outblas.hopper import gemm
from outblas.hopper.gemm import rule_tiles, search_space

H100 = machines.find("H100")
CONFIG = replace(gemm.Config(), cluster_m=1)


def product(M: int, N: int, K: int):
    """A packed product."""
    return example(torch.bfloat16, None, "nt", (M, N, K))


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

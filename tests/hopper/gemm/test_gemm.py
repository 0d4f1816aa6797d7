"""What hopper.gemm refuses, and in which words."""

from dataclasses import replace

import pytest
import torch
from support.gemm_problems import BF16, OWN_CONFIG, SMALL_TILE, gemm_config, problem_of, product

from outblas.hopper import gemm


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("split_k=65", "split_k is 65, expected 1 to 64 partitions of K"),
        ("split_k=2,stream_k=True", "split_k is 2 with stream_k, expected 1"),
        (
            "pingpong=True,consumers=1,producer_registers=0,consumer_registers=0,tile_n=64",
            "pingpong with 1 consumers",
        ),
        ("pingpong=True,split_k=2,tile_m=64", "pingpong with 2 consumers and partitions of K"),
        (
            "variable_tile_n=True,tile_n=20",
            "expected a multiple of 8 from 24 to 256 and 0 when variable_tile_n",
        ),
        ("variable_tile_n=True,tile_n=192,mma_n=96", "mma_n 96, expected"),
        ("tile_m=64", "consumers is 2, expected 1, 2 or 3 that share tile_m"),
        ("phases=True", "phases is True, expected False"),
        ("cluster_m=3", "cluster_m is 3, expected 1, 2 or 4"),
        # Beside the barriers of 61 stages other words of shared memory have no room.
        (
            f"{SMALL_TILE},tile_n=16,tile_k=16".replace("stages=16", "stages=61"),
            "stages is 61, expected at most 60",
        ),
    ],
)
def test_a_config_that_cannot_be_built_is_refused(text: str, reason: str) -> None:
    config = gemm_config(text)

    assert reason in str(gemm.unsupported(product(64, 64, 64), config))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("split_k=2,k_serpentine=False", id="split-K"),
        pytest.param("stream_k=True,k_serpentine=False", id="stream-K"),
        pytest.param("", id="serpentine K"),
    ],
)
class TestBatchInvariance:
    """Where a row's bits must not depend on other rows, K has one order."""

    def test_refuses_another_order_of_k(self, text: str) -> None:
        given = product(64, 64, 4096, batch_invariant=True)

        reason = gemm.unsupported(given, gemm_config(text))

        assert "batch_invariant needs one order of K" in str(reason)

    def test_takes_the_config_with_one_order_of_k(self, text: str) -> None:
        given = product(64, 64, 4096, batch_invariant=True)
        one_order = replace(gemm_config(text), split_k=1, stream_k=False, k_serpentine=False)

        assert gemm.unsupported(given, one_order) is None


@pytest.mark.parametrize(("split_k", "is_refused"), [(64, True), (16, False)])
def test_partial_sums_beyond_32_bits_are_refused(split_k: int, is_refused: bool) -> None:
    given = problem_of(*(torch.empty(8192, 8192, dtype=BF16, device="meta") for _ in range(3)))
    config = replace(OWN_CONFIG, split_k=split_k, k_serpentine=False)

    reason = gemm.unsupported(given, config)

    assert ("split_k supports up to 2147483648 partial sums" in str(reason)) == is_refused
    assert (reason is not None) == is_refused

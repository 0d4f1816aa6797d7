"""The block-scaled operands of the bench: how they are quantised, and which products are exact."""

import pytest
import torch

from outblas.bench.operands import BlockScaled, block_scaled, normal

# With tails: 5 rows, 2 blocks of columns, 3 blocks of terms.
SHAPE = (5, 200, 300)


def test_normal_values_come_back_within_the_error_of_fp8() -> None:
    source_a, source_b, _ = normal(SHAPE, "nt", torch.bfloat16, device="cpu")

    a, b = block_scaled(SHAPE, "cpu").dequantised()

    # half a unit in the last of four places, or of the smallest value, under a scale of 5/448
    torch.testing.assert_close(a, source_a.double(), rtol=2**-4, atol=2**-10 * 5 / 448)
    torch.testing.assert_close(b, source_b.double(), rtol=2**-4, atol=2**-10 * 5 / 448)


def test_scales_are_those_of_their_blocks() -> None:
    scaled = BlockScaled(
        torch.ones(2, 130),
        torch.ones(130, 129),
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        torch.tensor([[5.0, 6.0], [7.0, 8.0]]),
    )

    a, b = scaled.dequantised()

    assert a[:, [0, 127, 128, 129]].tolist() == [[1, 1, 2, 2], [3, 3, 4, 4]]
    assert b[[0, 127, 128]][:, [0, 127, 128]].tolist() == [[5, 5, 6], [5, 5, 6], [7, 7, 8]]


@pytest.mark.parametrize("K", [300, 1024, 16384, 1 << 18])
def test_sums_of_integers_are_exact_in_any_order(K: int) -> None:
    a, b = block_scaled((3, 5, K), "cpu", exact_terms=K).dequantised()

    reverse = a.float().flip(1) @ b.float().flip(0)

    assert torch.equal(reverse.double(), a @ b)
    assert bool(a.any(1).all())


def test_sums_of_a_block_of_integers_fit_the_tensor_cores() -> None:
    found = block_scaled((64, 64, 1024), "cpu", exact_terms=1024)

    assert 128 * found.a.float().abs().max() * found.b.float().abs().max() <= 2**13


def test_a_sum_that_leaves_no_room_for_integers_is_refused() -> None:
    with pytest.raises(ValueError, match="K is 2097152, expected at most 1048576 for exact sums"):
        block_scaled((1, 1, 128), "cpu", exact_terms=1 << 21)

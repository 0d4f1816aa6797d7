"""Bank conflicts of layouts, which Triton computes."""

from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.compile, pytest.mark.oldest_triton]
TILE = (64, 32)


def blocked(lanes: list[int]) -> Any:
    """Registers of which each thread holds four in a row."""
    from triton.experimental.gluon import language as gl

    return gl.BlockedLayout([1, 4], lanes, [4, 1], [1, 0])


def unswizzled(order: list[int]) -> Any:
    """Shared memory by rows [1, 0] or by columns [0, 1]."""
    from triton.experimental.gluon import language as gl

    return gl.SwizzledSharedLayout(1, 1, 1, order)


@pytest.mark.parametrize(
    ("lanes", "order", "conflicts"),
    [
        pytest.param([8, 4], [0, 1], 3, id="by columns"),
        # Eight lanes store two half rows: of the 32 banks, 16 are written twice.
        pytest.param([8, 4], [1, 0], 1, id="half rows"),
        pytest.param([4, 8], [1, 0], 0, id="whole rows"),
    ],
)
def test_a_store_has_conflicts_where_lanes_write_one_bank(
    lanes: list[int], order: list[int], conflicts: int
) -> None:
    from outblas.device.triton_artifact import bank_conflicts

    found = bank_conflicts(blocked(lanes), unswizzled(order), TILE, torch.float32)

    assert found == conflicts


def test_a_padded_layout_is_refused() -> None:
    from triton.experimental.gluon import language as gl

    from outblas.device.triton_artifact import bank_conflicts

    padded = gl.PaddedSharedLayout.with_identity_for([[32, 4]], [64, 32], [1, 0])

    with pytest.raises(ValueError, match="shared is a PaddedSharedLayout"):
        bank_conflicts(blocked([8, 4]), padded, TILE, torch.float32)

"""The model of L2: what CTAs request of it under an order of tiles, and what DRAM must bring in."""

import math
import re
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outblas.device import l2
from outblas.device.raster import ORDERS, schedule

TILE = (128, 256)


def traffic(
    kind: str,
    capacity: float,
    workers: int = 128,
    cluster: tuple[int, int] = (1, 1),
    multicast: bool = True,
) -> l2.Traffic:
    """Of a product of 8192 on three sides, in tiles of 128x256."""
    shape = 8192, 8192, 8192
    steps = schedule(kind, *l2.grid(shape, TILE, cluster), workers)
    return l2.simulate(steps, shape, TILE, cluster, capacity=capacity, multicast=multicast)


# ---- any product
class Product(NamedTuple):
    """A product in tiles of 48x64, in an order of clusters of them."""

    shape: tuple[int, int, int]
    cluster: tuple[int, int]
    steps: list[list[int]]

    def traffic(self, capacity: float, multicast: bool = True) -> l2.Traffic:
        return l2.simulate(
            self.steps,
            self.shape,
            (48, 64),
            self.cluster,
            capacity=capacity,
            multicast=multicast,
        )


@st.composite
def products(draw: st.DrawFn) -> Product:
    """Products up to 700 on a side, in any order, in clusters of up to 3x3 on up to 20 workers."""
    shape = draw(st.tuples(*[st.integers(1, 700)] * 3))
    cluster = draw(st.tuples(*[st.integers(1, 3)] * 2))
    kind, workers = draw(st.sampled_from(ORDERS)), draw(st.integers(1, 20))
    steps = schedule(kind, *l2.grid(shape, (48, 64), cluster), workers, 3, 2)
    return Product(shape, cluster, steps)


@settings(max_examples=40)
@given(products(), st.booleans())
def test_an_unlimited_cache_has_each_element_brought_in_once(
    product: Product, multicast: bool
) -> None:
    M, N, K = product.shape

    unlimited = product.traffic(math.inf, multicast)

    assert unlimited.missed_bytes == unlimited.compulsory_bytes == (M + N) * K * 2
    assert unlimited.hit_rate < 1


@settings(max_examples=40)
@given(products(), st.integers(1, 1 << 20), st.booleans())
def test_a_smaller_cache_misses_more_of_the_same_requests(
    product: Product, capacity: int, multicast: bool
) -> None:
    unlimited = product.traffic(math.inf, multicast)

    small = product.traffic(capacity, multicast)

    assert small.requested_bytes == unlimited.requested_bytes
    assert unlimited.missed_bytes <= small.missed_bytes <= small.requested_bytes
    assert 0 <= small.hit_rate <= unlimited.hit_rate


# ---- orders of a large product
def test_multicast_halves_requests_of_the_shared_operand() -> None:
    b_by_every_row_of_tiles = 8192 * 64 * 8192 * 2
    alone = traffic("grouped", math.inf, workers=64, cluster=(2, 1), multicast=False)

    shared = traffic("grouped", math.inf, workers=64, cluster=(2, 1), multicast=True)

    assert alone.requested_bytes - shared.requested_bytes == b_by_every_row_of_tiles // 2
    assert alone.missed_bytes == shared.missed_bytes


# ---- halves of L2
def test_one_tile_finds_nothing_in_l2() -> None:
    """Everything is brought in, and no other half asks for it."""
    alone = l2.simulate([[0]], (128, 256, 64), TILE, capacity=1 << 20, halves=2)

    assert alone.hit_rate == 0


# ---- costs and refusals
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": [[4]]}, "steps have tile 4, expected one below 4, or -1"),
        ({"shape": (0, 4, 4)}, "shape is (0, 4, 4), expected sizes of at least 1"),
        ({"tile": (2, 0)}, "tile is (2, 0)"),
        ({"cluster": (0, 1)}, "cluster is (0, 1)"),
        ({"capacity": 0}, "capacity is 0, expected more than 0"),
        ({"halves": 0}, "halves is 0, expected more than 0"),
    ],
    ids=["steps", "shape", "tile", "cluster", "capacity", "halves"],
)
def test_the_model_refuses_what_means_nothing(changes: dict[str, Any], message: str) -> None:
    known: dict[str, Any] = {"steps": [[0, 1], [2, 3]], "shape": (4, 4, 4), "tile": (2, 2)}

    with pytest.raises(ValueError, match=re.escape(message)):
        l2.simulate(**(known | {"capacity": 1} | changes))
